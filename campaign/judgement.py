"""Pure functions that judge answers, streams, memory and attacks by the promises.

Time limits are for a quiet machine. An undisturbed stream measures how much slower this machine is now; the limits are
scaled up by that factor, never down.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from statistics import median
from typing import NamedTuple

QUIET_SECONDS = 0.25
"""Longest silence between two chunks of a stream, in seconds, with one busy process on two otherwise idle cores."""
GROWTH_SHARE, GROWTH_BYTES = 0.10, 16 << 20
"""Growth of a process in the second half of its time that still counts as flat: a share of its memory, plus bytes."""
MIN_SAMPLES = 12
"""Number of samples before the growth of a process is judged: it warms up first."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Limits in seconds on a set of times: on the worst of them, and on their median."""

    worst_seconds: float
    median_seconds: float = inf


SILENCE, FIRST_TOKEN, CHILDREN_GONE = "silence", "first token", "children gone"
"""Names of the times: the honest stream's longest silence in a turn; from a kill to the first token of a waiting
request; from a kill of the server to the end of its last child."""
PROMISES = {SILENCE: Promise(0.5), FIRST_TOKEN: Promise(10.0, 5.0), CHILDREN_GONE: Promise(1.0)}


class Event(NamedTuple):
    """An event of a stream, as its reader sees it."""

    moment: float
    what: str
    """`chunk`, or another word where the stream begins or ends."""
    waited: float = 0.0
    """Seconds so far in which the reader was ready to run but had no processor: the server is not silent then."""


class Timed(NamedTuple):
    """A time in seconds, and what was done meanwhile."""

    seconds: float
    about: str = ""


@dataclass(slots=True)
class Findings:
    """Findings of an attack's turns."""

    tried: int = 0
    failures: list[str] = field(default_factory=list)
    """Broken promises other than time limits."""
    times: dict[str, list[Timed]] = field(default_factory=dict)
    """Times, by what was timed."""

    def expect(self, holds: object, message: str) -> None:
        """Record a failure unless `holds`."""
        if not holds:
            self.failures.append(message)

    def count_response(self, status: int, headers: Mapping[str, str], body: bytes, description: str) -> None:
        """Count one answer, as a failure if it is an unhandled error."""
        self.tried += 1
        self.expect(not is_unhandled(status, headers, body), f"{description}: {status} {body[:160]!r}")

    def count_stream(self, ends: Sequence[str], description: str) -> None:
        """Count one stream, as a failure unless it has exactly one end."""
        self.tried += 1
        self.expect(len(ends) == 1, f"{description}: {len(ends)} ends ({', '.join(ends) or 'cut'})")

    def record_time(self, what: str, seconds: float, about: str = "") -> None:
        """Record a time."""
        self.times.setdefault(what, []).append(Timed(seconds, about))

    def add(self, other: "Findings") -> None:
        """Add the findings of another turn."""
        self.tried += other.tried
        self.failures += other.failures
        for what, times in other.times.items():
            self.times.setdefault(what, []).extend(times)


def is_unhandled(status: int, headers: Mapping[str, str], body: bytes = b"") -> bool:
    """Return whether an answer is an unhandled error: a 5xx, unless it is a 503 with `Retry-After`, or blames the
    hub."""
    if status < 500:
        return False
    return not ((status == 503 and "retry-after" in headers) or (status in {502, 503} and b'"hub_' in body))


def ends_of(lines: Iterable[str]) -> list[str]:
    """Return the ends in a stream of server-sent events: `done` or `error`."""
    ends = []
    for line in lines:
        if line == "data: [DONE]":
            ends.append("done")
        elif line.startswith('data: {"error"'):
            ends.append("error")
    return ends


def longest_silence(events: Sequence[Event], since: float, until: float) -> tuple[float, float]:
    """Return the longest time between two chunks of one stream within the given times, in seconds, and the moment at
    which it began; a stream that has not ended is silent until `until`."""
    longest = (0.0, since)
    for last, event in pairwise([*events, Event(until, "now", events[-1].waited if events else 0.0)]):
        if last.what == "chunk" and event.moment > since and last.moment < until:
            began = max(last.moment, since)
            longest = max(longest, (min(event.moment, until) - began - (event.waited - last.waited), began))
    return longest


def measured_slowdown(quiet: Sequence[float]) -> float:
    """Return how many times slower this machine is than a quiet one, at least 1.

    Measured by the second longest silence of the quiet turns: limits are on the worst time, and a single
    measurement proves little.
    """
    return max(1.0, sorted(quiet)[-2] / QUIET_SECONDS) if len(quiet) > 1 else 1.0


def missed_time_limits(
    promises: Mapping[str, Promise], times: Mapping[str, Sequence[Timed]], slowdown: float
) -> list[str]:
    """List the exceeded time limits, scaled for a machine slower by `slowdown`."""
    problems = []
    for what, promise in promises.items():
        measured_times = times.get(what) or (Timed(0.0),)
        for name, timed, promised in (
            ("median", Timed(median(measured.seconds for measured in measured_times)), promise.median_seconds),
            ("worst", max(measured_times), promise.worst_seconds),
        ):
            if timed.seconds > promised * slowdown:
                about = f" ({timed.about})" if timed.about else ""
                allowed = f"promised {promised:g} s, allowed here {promised * slowdown:.2f} s"
                problems.append(f"{what}, {name}: {timed.seconds:.2f} s{about}, {allowed}")
    return problems


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one process at one moment."""

    process_id: int
    resident_bytes: int


def growth_bytes(samples: Sequence[Memory]) -> int:
    """Return the growth of a process since the middle of its samples; 0 if it is flat or has too few samples."""
    sizes = [sample.resident_bytes for sample in samples if sample.process_id == samples[-1].process_id]
    half, end = sizes[(len(sizes) - 1) // 2], sizes[-1]
    return end - half if len(sizes) >= MIN_SAMPLES and end - half > GROWTH_SHARE * half + GROWTH_BYTES else 0
