"""What steps cost on this machine: forwards by rows and width, drafting by method, rows and number of drafts.

Measured points, never a formula: kernels change at certain widths, and one drafter pays for each draft, another once.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from app.core.step import DRAFT_LENGTHS, StepCost

PLAIN = "off"
STALE_STEPS = 1_024
"""A cost that nobody measured for so long is forgotten, or is what it was at load, at the pace of now."""
MEMORY = 20
"""Samples that all former ones count for at most."""
SHORT_TOKENS = 256
"""Of contexts that cost next to nothing."""
INTERVAL_STEPS = 32
"""After so many, drafting is timed again; in between, the last figures stand for it. Evidence fades: a judgement stands
for so many tokens at most."""
NOISE = 0.04
"""What is measured has to differ by more to change anything: a curve that is drawn, a decision."""
BEYOND, UNKNOWN_SLOPE = 0.5, 0.02
"""Beyond the last measured width this part of the slope so far is believed, at least so many plain steps a column."""


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
    """Seconds. `origin`: by an earlier measurement, or 0; `drawn`: what curves show; `step`: when last learnt."""

    origin: float = 0.0
    drawn: float = 0.0
    step: int = -STALE_STEPS


class Curve(NamedTuple):
    """Seconds by number of drafts: places joined by lines."""

    places: tuple[int, ...]
    seconds: tuple[float, ...]

    rise: float
    """For each draft beyond the last place."""

    @classmethod
    def through(cls, points: Mapping[int, float], *, beyond: float) -> "Curve":
        """Beyond the last point that part of the slope over all of them is believed."""
        (first, least), (last, most) = min(points.items()), max(points.items())
        seconds = {0: least, **points}
        places = tuple(sorted(seconds))
        rise = max(beyond * (most - least) / max(1, last - first), UNKNOWN_SLOPE * least)
        return cls(places, tuple(seconds[place] for place in places), rise)

    def at(self, drafts: int) -> float:
        """What is believed of so many."""
        right = bisect(self.places, drafts)
        start, low = self.places[right - 1], self.seconds[right - 1]
        if right == len(self.places):
            return low + self.rise * (drafts - start)
        return low + (self.seconds[right] - low) * (drafts - start) / (self.places[right] - start)


@dataclass(frozen=True, slots=True)
class Curves:
    """Drafting and verifying of one method and so many rows; `plain`: seconds of a step without drafts."""

    drafting: Curve
    forward: Curve
    plain: float
    _cycles: dict[int, tuple[float, float]] = field(default_factory=dict)

    def cycle(self, drafts: int) -> tuple[float, float]:
        """Both together in plain steps, as believed, and if a forward that was never measured cost no more than the
        next narrower one."""
        if drafts not in self._cycles:
            drafting, forward = self.drafting.at(drafts), self.forward
            narrower = forward.seconds[bisect(forward.places, drafts) - 1]
            self._cycles[drafts] = (drafting + forward.at(drafts)) / self.plain, (drafting + narrower) / self.plain
        return self._cycles[drafts]


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
        self._slowdowns: defaultdict[int, Average] = defaultdict(lambda: Average(1.0))
        """Of contexts that are not short, by how often they doubled."""
        self.version = 0
        """Changes with what is told."""
        self._drawn: dict[tuple[str, int], Curves] = {}
        for cost in measured:
            shape = Shape(cost.method, cost.rows, cost.drafts)
            self._seen.add(shape)
            for table, seconds in ((self._forwards, cost.seconds), (self._drafts, cost.draft_seconds)):
                if seconds > 0:
                    table[shape] = _Cost(seconds, 1.0, seconds)

    def export(self) -> tuple[StepCost, ...]:
        """Everything that is known, for the next load of this model on this machine."""
        unknown, tables, shapes = _Cost(0.0), (self._forwards, self._drafts), sorted({*self._forwards, *self._drafts})
        return tuple(StepCost(*shape, *(table.get(shape, unknown).value for table in tables)) for shape in shapes)

    def observe(self, shape: Shape, *, seconds: float, draft_seconds: float | None, context: int = 0) -> None:
        """Learn one step; `draft_seconds` None: they were not timed, what is known of them is taken off.

        A long `context` (in tokens) slows every step down, so that is learnt apart. Ignored: steps nobody timed (0
        seconds), and the first of a shape or of a plain run (it warms up).
        """
        self._step += 1
        self._untimed = self._untimed + 1 if draft_seconds is None else 0
        warm = self._previous == PLAIN if shape.method == PLAIN else shape in self._seen
        self._previous = shape.method if seconds > 0 else ""
        self._seen.add(shape)
        if seconds <= 0:
            return
        slowdown, known = self._slowdowns[(context // SHORT_TOKENS).bit_length()], self._forwards.get(shape)
        curves = self.curves(shape.method, shape.rows)
        drafting, expected = curves.drafting.at(shape.drafts), curves.forward.at(shape.drafts)
        if warm and known and context >= SHORT_TOKENS:
            slowdown.learn(min(4.0, seconds / (drafting + known.value)), MEMORY)
        if draft_seconds is not None and shape.drafts and (warm or not drafting):
            drafting = draft_seconds / slowdown.value
            self._learn(self._drafts, shape, drafting)
        if warm:
            forward = seconds / slowdown.value - drafting
            origin = self._learn(self._forwards, shape, forward, expected if self._forwards else forward).origin
            if origin:
                self._pace.learn(min(4.0, max(0.25, forward / origin)), MEMORY)

    def must_time(self, method: str, *, rows: int, drafts: int) -> bool:
        """Whether the next drafting should be timed: it was not for long, or too little is known to interpolate."""
        known = [shape.drafts for shape in self._drafts if shape[:2] == (method, rows)]
        return self._untimed >= INTERVAL_STEPS or (len(known) < 2 and drafts not in known)

    def knows_plain(self, rows: int, samples: int) -> bool:
        """Whether plain steps of that many rows were measured here so often, or before this model was loaded."""
        known = self._forwards.get(Shape(PLAIN, rows, 0))
        return known is not None and (known.weight >= samples or known.origin > 0)

    def curves(self, method: str, rows: int) -> Curves:
        """What is known, drawn as curves. That costs more than a step should, so they are believed for a while."""
        if (method, rows) not in self._drawn:
            # Forwards of this method, else of others, else of as many tokens of one row.
            forward = Curve.through(self._points(method, rows), beyond=BEYOND)
            plain = forward.at(0) if method == PLAIN else self.curves(PLAIN, rows).plain
            self._drawn[method, rows] = Curves(self._drafting(method, rows), forward, plain)
        return self._drawn[method, rows]

    def _drafting(self, method: str, rows: int) -> Curve:
        """A method that nobody timed costs nothing, and beyond the longest that was timed nothing more. A batch follows
        the law that another number of rows shows (one pays for each draft, another once), at the cost known of it."""
        timed: defaultdict[int, dict[int, float]] = defaultdict(lambda: {0: 0.0})
        for shape, cost in self._drafts.items():
            if shape.method == method:
                timed[shape.rows][shape.drafts] = self._now(cost) or cost.value
        own, known = timed.pop(rows, {}), max(timed.values(), key=len, default={0: 0.0})
        law = Curve.through(known, beyond=0.0)
        dearer = [own[drafts] / law.at(drafts) for drafts in own if law.at(drafts)] or [1.0]
        return Curve.through({drafts: fmean(dearer) * law.at(drafts) for drafts in known} | own, beyond=0.0)

    def _points(self, method: str, rows: int) -> Mapping[int, float]:
        """Seconds of forwards, by number of drafts. Wide ones that nobody ran for long are forgotten, or as they were
        measured long ago."""
        known = []
        for shape, cost in self._forwards.items():
            own, wide = shape.method == method, shape.drafts > 0
            seconds = self._now(cost) or (0.0 if wide else cost.value)
            if seconds and shape.rows == rows and (own or wide or shape.method == PLAIN):
                known.append((own, -seconds, shape.drafts))
        points = {drafts: -seconds for _, seconds, drafts in sorted(known)}  # the last one counts: own, else cheapest
        if rows > 1 and len(one := self._points(method, 1)) > 1:
            # What a batch should cost by the forwards of one row that feed as many tokens.
            alone = Curve.through(one, beyond=BEYOND)
            batch = {drafts: alone.at(rows * (1 + drafts) - 1) for drafts in (0, *DRAFT_LENGTHS)}
            scale = points[0] / batch[0] if 0 in points else 1.0
            points = {drafts: scale * seconds for drafts, seconds in batch.items()} | points
        return points or {0: 1.0}

    def _learn(self, table: dict[Shape, _Cost], shape: Shape, sample: float, expected: float | None = None) -> _Cost:
        """The first sample of a shape counts as much as what was expected of it."""
        cost = table.setdefault(shape, _Cost(sample if expected is None else expected, 1.0))
        cost.learn(min(max(sample, cost.value / 2), 2 * cost.value), MEMORY)  # no outlier (a pause) moves it by much
        cost.step = self._step
        if abs(cost.value - cost.drawn) > NOISE * cost.drawn or self._step % (STALE_STEPS // 8) == 0:
            cost.drawn = cost.value
            self.version += 1
            self._drawn.clear()
        return cost

    def _now(self, cost: _Cost) -> float:
        """What it costs now; 0 when that is unknown."""
        return cost.value if cost.step > self._step - STALE_STEPS else cost.origin * self._pace.value
