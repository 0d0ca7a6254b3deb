"""What steps cost on this machine: forwards by rows and width, drafting by method, rows and number of drafts.

Measured points, never a formula: kernels change at certain widths, and one drafter pays for each draft, another once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from app.core.step import DRAFT_LENGTHS, StepCost

PLAIN = "off"
STALE_STEPS = 1_024
TIMING_INTERVAL = 32
"""Cycles after which the drafting is timed again; in between, the last figures stand for it."""
SHORTEST_SECONDS = 1e-7
UNKNOWN_SLOPE = 0.02
"""Cost of one more column, in plain steps, beyond what was measured: optimistic, so that it is tried."""

Key = tuple[str, int]
"""Method and rows."""


def smooth(old: float | None, sample: float, weight: float) -> float:
    """Moving average that no single outlier (a compilation, a pause of the machine) moves by much."""
    return sample if old is None else old + weight * (min(sample, 2 * old) - old)


@dataclass(slots=True)
class _Cost:
    """`origin` is what an earlier measurement said (0: there was none); `samples` counts the ones since."""

    seconds: float
    origin: float = 0.0
    samples: int = 0
    step: int = 0


class CostTable:
    """Seconds of steps. `measured` is known from the start; what runs here is believed sooner and sooner."""

    def __init__(self, measured: Iterable[StepCost] = ()) -> None:
        self._forwards: dict[Key, dict[int, _Cost]] = {}
        self._drafts: dict[Key, dict[int, _Cost]] = {}
        self._seen: set[tuple[str, int, int]] = set()
        self._previous = ""
        self._step = 0
        self._untimed = 0
        self._pace = 1.0
        for cost in measured:
            key = cost.method, cost.rows
            self._seen.add((*key, 1 + cost.drafts))
            if cost.seconds > 0:
                self._forwards.setdefault(key, {})[1 + cost.drafts] = _Cost(cost.seconds, cost.seconds)
            if cost.drafts and cost.draft_seconds > 0:
                self._drafts.setdefault(key, {})[cost.drafts] = _Cost(cost.draft_seconds, cost.draft_seconds)

    def export(self) -> tuple[StepCost, ...]:
        """Everything that is known, for the next load of this model on this machine."""
        known = {(*key, width - 1) for key, row in self._forwards.items() for width in row}
        known |= {(*key, drafts) for key, row in self._drafts.items() for drafts in row}
        return tuple(
            StepCost(
                method,
                rows,
                drafts,
                _seconds(self._forwards, (method, rows), 1 + drafts),
                _seconds(self._drafts, (method, rows), drafts),
            )
            for method, rows, drafts in sorted(known)
        )

    # --- learning ---------------------------------------------------------------------------------------------

    def observe(self, method: str, *, rows: int, width: int, seconds: float, draft_seconds: float | None) -> None:
        """Learn one step; `draft_seconds` None: they were not timed, what is known of them is taken off.

        Ignored: steps nobody timed (0 seconds), and the first of a shape or of a plain run (it warms up).
        """
        self._step += 1
        self._untimed = self._untimed + 1 if draft_seconds is None else 0
        shape = (method, rows, width)
        warm = self._previous == PLAIN if method == PLAIN else shape in self._seen
        self._previous = method
        self._seen.add(shape)
        if seconds <= 0:
            return
        if width > 1 and draft_seconds is not None:
            self._learn(self._drafts, (method, rows), width - 1, draft_seconds)
        if warm:
            drafting = self.drafting(method, rows=rows)(width - 1) if draft_seconds is None else draft_seconds
            if origin := self._learn(self._forwards, (method, rows), width, seconds - drafting):
                self._pace = min(4.0, max(0.25, smooth(self._pace, (seconds - drafting) / origin, 0.1)))

    def _learn(self, table: dict[Key, dict[int, _Cost]], key: Key, at: int, sample: float) -> float:
        """Add a sample; the answer is what was measured long ago."""
        sample = max(sample, SHORTEST_SECONDS)
        cost = table.setdefault(key, {}).setdefault(at, _Cost(sample))
        cost.samples += 1
        cost.step = self._step
        cost.seconds = smooth(cost.seconds, sample, max(0.1, 1 / (cost.samples + (cost.origin > 0))))
        return cost.origin

    def must_time(self, method: str, *, rows: int, drafts: int) -> bool:
        """Whether the next drafting should be timed: it was not for long, or too little is known to interpolate."""
        known = self._drafts.get((method, rows), {})
        return self._untimed >= TIMING_INTERVAL or (len(known) < 2 and drafts not in known)

    # --- telling ----------------------------------------------------------------------------------------------

    def knows_plain(self, rows: int, samples: int) -> bool:
        """Whether plain steps of that many rows were measured here so often, or before this model was loaded."""
        known = self._forwards.get((PLAIN, rows), {}).get(1)
        return known is not None and (known.samples >= samples or known.origin > 0)

    def plain_age(self, rows: int) -> int:
        """Steps since a plain step of that many rows was measured."""
        known = self._forwards.get((PLAIN, rows), {}).get(1)
        return self._step - (known.step if known else 0)

    def drafting(self, method: str, *, rows: int) -> Callable[[int], float]:
        """Cost by number of drafts, between and through measurements; a method that nobody timed costs nothing."""
        near = min((key for key in self._drafts if key[0] == method), key=lambda key: abs(key[1] - rows), default=None)
        if near is None:
            return lambda _drafts: 0.0
        points = {at: self._value(cost) or cost.seconds for at, cost in self._drafts[near].items()}
        known = sorted(points)

        def seconds(drafts: int) -> float:
            """Beyond the outermost measurements it costs something between nothing more and as much for each draft."""
            nearest = min(max(drafts, known[0]), known[-1])
            edge = _line(points, known, nearest)
            if drafts == nearest:
                return edge
            low, high = sorted((edge, edge * drafts / nearest))
            return low if len(known) == 1 else min(max(_line(points, known, drafts), low), high)

        return seconds

    def curve(self, method: str, *, rows: int) -> "CostCurve":
        """Forwards of that many rows: this method's own, else other methods', else those of as many tokens of one row.

        Wide ones that nobody ran for long are forgotten, or as they were measured long ago.
        """
        others: dict[int, float] = {}
        own: dict[int, float] = {}
        for key, row in self._forwards.items():
            if key[1] != rows:
                continue
            for width, cost in row.items():
                value = self._value(cost) or (cost.seconds if width == 1 else 0.0)
                if value and key[0] == method:
                    own[width] = value
                elif value and (width > 1 or key[0] == PLAIN):
                    others[width] = min(value, others.get(width, value))
        points = others | own
        return CostCurve(points if rows == 1 else self._derived(method, rows, points.get(1)) | points)

    def _derived(self, method: str, rows: int, plain: float | None) -> dict[int, float]:
        """What a batch should cost by the forwards of one row that feed as many tokens."""
        one = self.curve(method, rows=1)
        if one.widest < 2:
            return {}
        scale = 1.0 if plain is None else plain / one.seconds(rows)
        return {width: scale * one.seconds(rows * width) for width in (1, *(1 + length for length in DRAFT_LENGTHS))}

    def _value(self, cost: _Cost) -> float:
        """What it costs now; 0 when that is unknown."""
        fresh = cost.samples and cost.step > self._step - STALE_STEPS
        return cost.seconds if fresh else cost.origin * self._pace


class CostCurve:
    """Seconds of a forward by width: measured points, and half of what the line through them says elsewhere.

    Across a gap it would hide a step (kernels change at certain widths), beyond the last point it may end.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self._points = points or {1: 1.0}
        self._widths = sorted(self._points)
        self.widest = self._widths[-1]
        self.narrowest_seconds = self._points[self._widths[0]]
        """A forward without drafts; 1 when nothing was measured, so that lengths still compare."""

    def seconds(self, width: float) -> float:
        """Cost at `width`."""
        if width <= self._widths[0]:
            return self.narrowest_seconds
        at = bisect_right(self._widths, width) - 1
        left = self._widths[at]
        line = _line(self._points, self._widths, width)
        guess = self._points[left] + UNKNOWN_SLOPE * self.narrowest_seconds * (width - left)
        if left != self.widest and self._widths[at + 1] - left == 1:
            return line
        return max(guess, (line + self._points[left]) / 2) if left == self.widest else min(line, (line + guess) / 2)


def _line(points: Mapping[int, float], known: list[int], at: float) -> float:
    """On the line through the two measurements around `at`, or through the outermost two."""
    if len(known) == 1:
        return points[known[0]]
    place = min(max(bisect_left(known, at), 1), len(known) - 1)
    left, right = known[place - 1], known[place]
    return points[left] + (points[right] - points[left]) * (at - left) / (right - left)


def _seconds(table: Mapping[Key, Mapping[int, _Cost]], key: Key, at: int) -> float:
    cost = table.get(key, {}).get(at)
    return cost.seconds if cost else 0.0
