"""What steps cost on this machine: forwards by rows and width, drafting by method, rows and number of drafts.

Measured points, never a formula: kernels change at certain widths, and one drafter pays for each draft, another once.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from app.core.step import DRAFT_LENGTHS, StepCost

PLAIN = "off"
STALE_STEPS = 1_024
MEASURED_WEIGHT, MEMORY = 2, 10
"""Samples that an earlier measurement counts for, and that all former ones count for at most."""
TIMING_INTERVAL = 32
"""Cycles after which the drafting is timed again; in between, the last figures stand for it."""
SHORTEST_SECONDS = 1e-7
UNKNOWN_SLOPE = 0.02
"""Cost of one more column, in plain steps, beyond what was measured: optimistic, so that it is tried."""


class Shape(NamedTuple):
    """Of a step: who drafts, how many rows, how many drafts a row."""

    method: str
    rows: int
    drafts: int


@dataclass(slots=True)
class Average:
    """A belief that is worth `weight` samples, and moves with every further one."""

    value: float
    weight: float = 0.0

    def learn(self, sample: float, memory: float) -> None:
        """Add a sample; earlier ones together never count for more than `memory`."""
        self.weight = min(self.weight + 1, memory)
        self.value += (sample - self.value) / self.weight


@dataclass(slots=True)
class _Cost(Average):
    """Seconds. `origin` is what an earlier measurement said (0: there was none); `step` when it was last learnt."""

    origin: float = 0.0
    step: int = -STALE_STEPS
    last: tuple[float, ...] = ()


class Curve:
    """Seconds by width or by number of drafts: measured points, joined by lines.

    Beyond the last point only the part `beyond` of the last line's slope is believed: it may end there.
    """

    def __init__(self, points: Mapping[int, float], *, beyond: float) -> None:
        self.points = dict(sorted(points.items()))
        self._known = list(self.points)
        self._beyond = beyond

    def seconds(self, at: float) -> float:
        """The cost there; below the first point, what is known of that."""
        points, known = self.points, self._known
        if at <= known[0]:
            return points[known[0]]
        place = min(bisect_left(known, at), len(known) - 1)
        left, right = known[place - 1], known[place]
        if at > right:
            slope = (points[right] - points[left]) / max(1, right - left)
            return points[right] + max(self._beyond * slope, UNKNOWN_SLOPE * points[known[0]]) * (at - right)
        return points[right] + (points[right] - points[left]) / (right - left) * (at - right)

    def least(self, at: float) -> float:
        """What it may cost there: as much as the nearest measured point below."""
        return min(
            self.seconds(at), self.points[max((each for each in self._known if each <= at), default=self._known[0])]
        )


class CostTable:
    """Seconds of steps. `measured` is known from the start; what runs here is believed sooner and sooner."""

    def __init__(self, measured: Iterable[StepCost] = ()) -> None:
        self._forwards: dict[Shape, _Cost] = {}
        self._drafts: dict[Shape, _Cost] = {}
        self._seen: set[Shape] = set()
        self._previous = ""
        self._step = 0
        self._untimed = 0
        self._pace = Average(1.0, MEMORY)
        for cost in measured:
            shape = Shape(cost.method, cost.rows, cost.drafts)
            self._seen.add(shape)
            for table, seconds in ((self._forwards, cost.seconds), (self._drafts, cost.draft_seconds)):
                if seconds > 0:
                    table[shape] = _Cost(seconds, MEASURED_WEIGHT, seconds)

    def export(self) -> tuple[StepCost, ...]:
        """Everything that is known, for the next load of this model on this machine."""
        unknown, tables = _Cost(0.0), (self._forwards, self._drafts)
        shapes = sorted(self._forwards.keys() | self._drafts.keys())
        return tuple(StepCost(*shape, *(table.get(shape, unknown).value for table in tables)) for shape in shapes)

    def observe(self, method: str, *, rows: int, width: int, seconds: float, draft_seconds: float | None) -> None:
        """Learn one step; `draft_seconds` None: they were not timed, what is known of them is taken off.

        Ignored: steps nobody timed (0 seconds), and the first of a shape or of a plain run (it warms up).
        """
        self._step += 1
        self._untimed = self._untimed + 1 if draft_seconds is None else 0
        shape = Shape(method, rows, width - 1)
        warm = self._previous == PLAIN if method == PLAIN else shape in self._seen
        self._previous = method if seconds > 0 else ""
        self._seen.add(shape)
        if seconds <= 0:
            return
        if draft_seconds is None:
            draft_seconds = self.drafting(method, rows=rows).seconds(shape.drafts)
        elif shape.drafts:
            self._learn(self._drafts, shape, draft_seconds)
        if warm:
            forward = self._learn(self._forwards, shape, seconds - draft_seconds)
            if forward.origin:
                self._pace.learn(min(4.0, max(0.25, (seconds - draft_seconds) / forward.origin)), MEMORY)

    def must_time(self, method: str, *, rows: int, drafts: int) -> bool:
        """Whether the next drafting should be timed: it was not for long, or too little is known to interpolate."""
        known = [shape.drafts for shape in self._drafts if shape[:2] == (method, rows)]
        return self._untimed >= TIMING_INTERVAL or (len(known) < 2 and drafts not in known)

    def knows_plain(self, rows: int, samples: int) -> bool:
        """Whether plain steps of that many rows were measured here so often, or before this model was loaded."""
        known = self._forwards.get(Shape(PLAIN, rows, 0))
        return known is not None and known.weight >= samples

    def drafting(self, method: str, *, rows: int) -> Curve:
        """By number of drafts, of the nearest number of rows. A method that nobody timed costs nothing, and beyond the
        longest that was timed nothing more."""
        known = [shape for shape in self._drafts if shape.method == method]
        nearest = min((shape.rows for shape in known), key=lambda each: abs(each - rows), default=rows)
        costs = {shape.drafts: self._drafts[shape] for shape in known if shape.rows == nearest}
        points = {drafts: self._now(cost) or cost.value for drafts, cost in costs.items()}
        return Curve({0: 0.0} | points, beyond=0.0)

    def forward(self, method: str, *, rows: int) -> Curve:
        """By width: this method's own forwards, else other methods', else those of as many tokens of one row.

        Wide ones that nobody ran for long are forgotten, or as they were measured long ago.
        """
        known = []
        for shape, cost in self._forwards.items():
            own, wide = shape.method == method, shape.drafts > 0
            seconds = self._now(cost) or (0.0 if wide else cost.value)
            if seconds and shape.rows == rows and (own or wide or shape.method == PLAIN):
                known.append((own, -seconds, 1 + shape.drafts))
        points = {width: -seconds for _, seconds, width in sorted(known)}  # the last one counts: own, else cheapest
        if rows > 1:
            points = self._of_one_row(method, rows, points.get(1)) | points
        return Curve(points or {1: 1.0}, beyond=0.5)

    def _of_one_row(self, method: str, rows: int, plain: float | None) -> dict[int, float]:
        """What a batch should cost by the forwards of one row that feed as many tokens."""
        one = self.forward(method, rows=1)
        if len(one.points) < 2:
            return {}
        scale = 1.0 if plain is None else plain / one.seconds(rows)
        return {1 + drafts: scale * one.seconds(rows * (1 + drafts)) for drafts in (0, *DRAFT_LENGTHS)}

    def _learn(self, table: dict[Shape, _Cost], shape: Shape, sample: float) -> _Cost:
        sample = max(sample, SHORTEST_SECONDS)
        cost = table.setdefault(shape, _Cost(sample))
        cost.last = (*cost.last[-2:], sample)
        middle = sorted(cost.last)[(len(cost.last) - 1) // 2]
        cost.learn(min(max(middle, cost.value / 2), 2 * cost.value), MEMORY)  # no outlier (a pause) moves it by much
        cost.step = self._step
        return cost

    def _now(self, cost: _Cost) -> float:
        """What it costs now; 0 when that is unknown."""
        return cost.value if cost.step > self._step - STALE_STEPS else cost.origin * self._pace.value
