"""Counters of one sequence: they become `Statistics`.

A stop token counts as generated, as vLLM and mlx-lm count it, although it is never told. Drafts behind the end of a
sequence count nowhere: nobody asked for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.core.reason import NO_REASON, Reason
from app.core.step import MethodStatistics, StepResult

PLAIN = "off"


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the seconds of one step went."""

    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rewind_seconds: float = 0.0


class Splitter:
    """Steps are taken apart now and then; the others are split as the last one of their method was."""

    def __init__(self) -> None:
        self._shares: dict[str, tuple[float, float]] = {}

    def split(self, result: StepResult, method: str, draft_seconds: float) -> Parts:
        """The parts of a step; `draft_seconds` is what its drafting usually takes."""
        if method == PLAIN:
            return Parts(verify_seconds=result.seconds)
        if result.timed:
            rest = result.seconds - result.draft_seconds
            if rest > 0:
                self._shares[method] = result.verify_seconds / rest, result.rewind_seconds / rest
            return Parts(result.draft_seconds, result.verify_seconds, result.rewind_seconds)
        drafting = min(draft_seconds, result.seconds)
        verify, rewind = self._shares.get(method, (1.0, 0.0))
        rest = result.seconds - drafting
        return Parts(drafting, verify * rest, rewind * rest)


@dataclass(slots=True)
class MethodCounters:
    """Of the steps that one method ran."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rewind_seconds: float = 0.0

    def count(self, drafted: int, accepted: int, parts: Parts) -> None:
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        add_positions(self.accepted_per_position, [1] * accepted + [0] * (drafted - accepted))
        self.draft_seconds += parts.draft_seconds
        self.verify_seconds += parts.verify_seconds
        self.rewind_seconds += parts.rewind_seconds

    def statistics(self, method: str) -> MethodStatistics:
        return MethodStatistics(
            method=method,
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            accepted_per_position=tuple(self.accepted_per_position),
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            rewind_seconds=self.rewind_seconds,
        )


@dataclass(slots=True)
class Counters:
    """Steps, drafts and acceptances, added up one decode step of one row at a time."""

    generated: int = 0
    by_method: dict[str, MethodCounters] = field(default_factory=dict)
    """In order of first use; `off` counts the steps without drafts."""

    def count_step(self, *, kept: int, drafted: int, accepted: int, method: str, parts: Parts | None = None) -> None:
        """Add one decode step that gained `kept` tokens, the first `accepted` of them out of `drafted` drafts."""
        self.generated += kept
        counters = self.by_method.setdefault(method if drafted else PLAIN, MethodCounters())
        counters.count(drafted, accepted, parts or Parts())

    @property
    def steps(self) -> int:
        return sum(counters.steps for counters in self.by_method.values())

    @property
    def cycles(self) -> int:
        """Steps that verified at least one draft."""
        return sum(counters.steps for method, counters in self.by_method.items() if method != PLAIN)

    @property
    def drafted(self) -> int:
        return sum(counters.drafted for counters in self.by_method.values())

    @property
    def accepted(self) -> int:
        return sum(counters.accepted for counters in self.by_method.values())

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        totals: list[int] = []
        for counters in self.by_method.values():
            add_positions(totals, counters.accepted_per_position)
        return tuple(totals)

    @property
    def methods(self) -> tuple[str, ...]:
        """What ran, in order of first use: `off` only when nothing ever drafted."""
        return tuple(method for method in self.by_method if method != PLAIN) or tuple(self.by_method)

    def statistics(self) -> tuple[MethodStatistics, ...]:
        """By method."""
        return tuple(counters.statistics(method) for method, counters in self.by_method.items())


def add_positions(totals: list[int], counts: Sequence[int]) -> None:
    """Add counts by position; `totals` grows as needed."""
    totals.extend([0] * (len(counts) - len(totals)))
    for position, count in enumerate(counts):
        totals[position] += count


@dataclass(slots=True)
class Refusals:
    """Why decode steps of one sequence ran without drafts, by code; values may change, the last ones are kept.

    A *firm* reason means that drafting was not allowed: it is told even when other steps drafted. The others (no
    n-gram matched, one token was left) belong to drafting and are told only when nothing was ever drafted.
    """

    _counts: dict[str, int] = field(default_factory=dict)
    _last: dict[str, Reason] = field(default_factory=dict)
    _firm: set[str] = field(default_factory=set)

    def add(self, reason: Reason, *, firm: bool) -> None:
        self._counts[reason.code] = self._counts.get(reason.code, 0) + 1
        self._last[reason.code] = reason
        if firm:
            self._firm.add(reason.code)

    def told(self, *, cycles: int) -> Reason:
        """The reason that held for most steps; none when every step was allowed to draft and some did."""
        codes = [code for code in self._counts if code in self._firm or not cycles]
        return self._last[max(codes, key=self._counts.__getitem__)] if codes else NO_REASON
