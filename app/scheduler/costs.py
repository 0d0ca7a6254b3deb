"""What steps cost on this machine: forwards by rows and width, drafting by method, rows and number of drafts.

Measured points, never a formula: kernels change at certain widths, and one drafter pays for each draft, another once.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import NamedTuple

from app.core.draft_lengths import draft_lengths
from app.core.step import StepCost

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


Part = int | str
"""Of a step that a context slows down: a forward by its class of widths, drafting by its method."""


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
    """Seconds by number of drafts: places joined by lines, or by `steps`."""

    places: tuple[int, ...]
    seconds: tuple[float, ...]

    rise: float
    """For each draft beyond the last place."""
    steps: bool = False
    """Whether what lies between two places costs what the next one does: kernels step there."""

    @classmethod
    def through(cls, points: Mapping[int, float], *, beyond: float, steps: bool = False) -> "Curve":
        """Beyond the last point that part of the slope over all of them is believed."""
        (first, least), (last, most) = min(points.items()), max(points.items())
        seconds = {0: least, **points}
        places = tuple(sorted(seconds))
        rise = max(beyond * (most - least) / max(1, last - first), UNKNOWN_SLOPE * least)
        return cls(places, tuple(seconds[place] for place in places), rise, steps)

    def at(self, drafts: int) -> float:
        """What is believed of so many."""
        right = bisect(self.places, drafts)
        start, low = self.places[right - 1], self.seconds[right - 1]
        if right == len(self.places):
            return low + self.rise * (drafts - start)
        if self.steps:
            return self.seconds[right] if drafts > start else low
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

    def __init__(self, measured: Iterable[StepCost] = (), *, cheap_tokens: tuple[int, ...] = ()) -> None:
        self._cheap_tokens = cheap_tokens
        self._forwards: dict[Shape, _Cost] = {}
        """In a context that costs next to nothing."""
        self._drafts: dict[Shape, _Cost] = {}
        self._slowdowns: dict[tuple[int, Part], _Cost] = {}
        """Of longer contexts, by how often they doubled."""
        self._seen: set[Shape] = set()
        self._learnt: set[Shape] = set()
        self._previous = ""
        self._step = 0
        self._untimed = 0
        self._pace = Average(1.0, MEMORY)
        self.version = 0
        """Changes with what is told."""
        self._drawn: dict[tuple[str, int, int], Curves] = {}
        for cost in sorted(measured, key=lambda cost: cost.context_tokens):
            self._recall(cost)

    def _recall(self, cost: StepCost) -> None:
        shape, doublings = Shape(cost.method, cost.rows, cost.drafts), _doublings(cost.context_tokens)
        if doublings:
            short = self.curves(shape.method, shape.rows)
            for part, seconds, usual in (
                (_width(shape.drafts), cost.seconds, short.forward.at(shape.drafts)),
                (shape.method, cost.draft_seconds, short.drafting.at(shape.drafts)),
            ):
                if seconds > 0 and usual > 0:
                    self._slowdowns[doublings, part] = _Cost(seconds / usual, 1.0)
            return
        self._seen.add(shape)
        self._learnt |= {shape} if cost.is_learnt else set()
        for table, seconds in ((self._forwards, cost.seconds), (self._drafts, cost.draft_seconds)):
            if seconds > 0:
                table[shape] = _Cost(seconds, 1.0, seconds)

    def export(self) -> tuple[StepCost, ...]:
        """Everything that is known, for the next load of this model on this machine."""
        unknown = _Cost(0.0)
        short = [
            StepCost(*shape, forward.value, drafting.value, is_learnt=shape in self._learnt)
            for shape in sorted({*self._forwards, *self._drafts})
            for forward, drafting in [(self._forwards.get(shape, unknown), self._drafts.get(shape, unknown))]
        ]
        return (*short, *(self._in_context(*key, cost.value) for key, cost in sorted(self._slowdowns.items(), key=str)))

    def _in_context(self, doublings: int, part: Part, slowdown: float) -> StepCost:
        """What a slowdown means for one shape."""
        context = SHORT_TOKENS << (doublings - 1)
        if isinstance(part, str):
            drafts = max((shape.drafts for shape in self._drafts if shape[:2] == (part, 1)), default=1)
            drafting = slowdown * self.curves(part, 1).drafting.at(drafts)
            return StepCost(part, 1, drafts, 0.0, drafting, context_tokens=context, is_learnt=True)
        drafts = (1 << part) - 1
        seconds = slowdown * self.curves(PLAIN, 1).forward.at(drafts)
        return StepCost(PLAIN, 1, drafts, seconds, context_tokens=context, is_learnt=True)

    def observe(self, shape: Shape, *, seconds: float, draft_seconds: float | None, context: int = 0) -> None:
        """Learn one step; `draft_seconds` None: they were not timed, what is known of them is taken off.

        A long `context` (in tokens) slows every step down, wide ones more, so that is learnt apart. Ignored: steps
        nobody timed (0 seconds), and the first of a shape or of a plain run (it warms up).
        """
        self._step += 1
        self._untimed = self._untimed + 1 if draft_seconds is None else 0
        warm = self._previous == PLAIN if shape.method == PLAIN else shape in self._seen
        self._previous = shape.method if seconds > 0 else ""
        self._seen.add(shape)
        if seconds <= 0:
            return
        doublings, known = _doublings(context), self._forwards.get(shape)
        short, here = self.curves(shape.method, shape.rows), self.curves(shape.method, shape.rows, context)
        expected, drafting = short.forward.at(shape.drafts), here.drafting.at(shape.drafts)
        if draft_seconds is not None and shape.drafts and (warm or not drafting):
            drafting = draft_seconds
            slowdown = self._slow(doublings, shape.method, draft_seconds, self._drafts.get(shape))
            self._learn(self._drafts.setdefault(shape, _Cost(draft_seconds / slowdown, 1.0)), draft_seconds / slowdown)
        if warm:
            forward = seconds - drafting
            slowdown = self._slow(doublings, _width(shape.drafts), forward, known)
            forward /= slowdown
            # The first sample of a shape counts as much as what was expected of it.
            first = _Cost(expected if self._forwards else forward, 1.0)
            origin = self._learn(self._forwards.setdefault(shape, first), forward).origin
            self._learnt.add(shape)
            if origin:
                self._pace.learn(min(4.0, max(0.25, forward / origin)), MEMORY)

    def _slow(self, doublings: int, part: Part, seconds: float, usual: _Cost | None) -> float:
        """How much such a context slows that part of a step down, now that this one was seen beside the usual."""
        believed = self._slowdown(doublings, part)
        if doublings and usual and usual.value > 0 and seconds > 0:
            # The first sample is believed, lest the shape in a short context be blamed for the rest of it.
            sample = min(4 * believed, max(believed / 4, seconds / usual.value))
            return self._learn(self._slowdowns.setdefault((doublings, part), _Cost(sample)), sample).value
        return believed

    def _slowdown(self, doublings: int, part: Part) -> float:
        """Where nobody knows: as forwards of another width, the narrower first, by what they differed in when the
        context was shorter; else as when it was shorter."""
        if not doublings:
            return 1.0
        if (doublings, part) in self._slowdowns:
            return self._slowdowns[doublings, part].value
        shorter = self._slowdown(doublings - 1, part)
        if isinstance(part, str):
            return shorter
        widths = (width for length, width in self._slowdowns if length == doublings and isinstance(width, int))
        near = min(widths, key=lambda width: (width > part, abs(width - part)), default=None)
        if near is None:
            return shorter
        return self._slowdowns[doublings, near].value * shorter / self._slowdown(doublings - 1, near)

    def must_time(self, method: str, *, rows: int, drafts: int) -> bool:
        """Whether the next drafting should be timed: it was not for long, or too little is known to interpolate."""
        known = [shape.drafts for shape in self._drafts if shape[:2] == (method, rows)]
        return self._untimed >= INTERVAL_STEPS or (len(known) < 2 and drafts not in known)

    def knows_plain(self, rows: int, samples: int) -> bool:
        """Whether plain steps of that many rows were measured here so often, or before this model was loaded."""
        known = self._forwards.get(Shape(PLAIN, rows, 0))
        return known is not None and (known.weight >= samples or known.origin > 0)

    def knows_context(self, context: int) -> bool:
        """Whether plain steps behind about so many tokens were seen, or nothing says that they take longer there."""
        slowed = {part: cost.value for (length, part), cost in self._slowdowns.items() if length == _doublings(context)}
        return 0 in slowed or max(slowed.values(), default=1.0) < 1 + NOISE

    def curves(self, method: str, rows: int, context: int = 0) -> Curves:
        """What is known, drawn as curves. That costs more than a step should, so they are believed for a while."""
        doublings = _doublings(context)
        if (method, rows, doublings) not in self._drawn:
            # Forwards of this method, else of others, else of as many tokens of one row.
            points = self._points(method, rows)
            slowed = {drafts: self._slowdown(doublings, _width(drafts)) * points[drafts] for drafts in points}
            forward = Curve.through(slowed, beyond=BEYOND, steps=bool(self._cheap_tokens))
            plain = forward.at(0) if method == PLAIN else self.curves(PLAIN, rows, context).plain
            drafting = self._drafting(method, rows, self._slowdown(doublings, method))
            self._drawn[method, rows, doublings] = Curves(drafting, forward, plain)
        return self._drawn[method, rows, doublings]

    def _drafting(self, method: str, rows: int, slowdown: float) -> Curve:
        """A method that nobody timed costs nothing, and beyond the longest that was timed nothing more. A batch follows
        the law that another number of rows shows (one pays for each draft, another once), at the cost known of it."""
        timed: defaultdict[int, dict[int, float]] = defaultdict(lambda: {0: 0.0})
        for shape, cost in self._drafts.items():
            if shape.method == method:
                timed[shape.rows][shape.drafts] = slowdown * (self._now(cost) or cost.value)
        own, known = timed.pop(rows, {}), max(timed.values(), key=len, default={0: 0.0})
        law = Curve.through(known, beyond=0.0)
        dearer = [own[drafts] / law.at(drafts) for drafts in own if law.at(drafts)] or [1.0]
        return Curve.through({drafts: fmean(dearer) * law.at(drafts) for drafts in known} | own, beyond=0.0)

    def _points(self, method: str, rows: int) -> Mapping[int, float]:
        """Seconds of forwards, by number of drafts. What nobody ran in a batch of this size should cost what as many
        tokens do in the next smaller one that was measured."""
        points = self._measured(method, rows)
        smaller = {few: self._measured(method, few) for few in {shape.rows for shape in self._forwards} if few < rows}
        few = max((few for few in smaller if len(smaller[few]) > 1), default=0)
        if few:
            law = Curve.through(smaller[few], beyond=BEYOND, steps=bool(self._cheap_tokens))
            lengths = (0, *draft_lengths(self._cheap_tokens, rows))
            batch = {drafts: law.at(max(0, ceil(rows * (1 + drafts) / few) - 1)) for drafts in lengths}
            scale = points[0] / batch[0] if 0 in points else 1.0
            points = {drafts: scale * seconds for drafts, seconds in batch.items()} | points
        return points or {0: 1.0}

    def _measured(self, method: str, rows: int) -> dict[int, float]:
        """Of exactly so many rows. Wide forwards that nobody ran for long are forgotten, or as they were measured long
        ago."""
        known = []
        for shape, cost in self._forwards.items():
            own, wide = shape.method == method, shape.drafts > 0
            seconds = self._now(cost) or (0.0 if wide else cost.value)
            if seconds and shape.rows == rows and (own or wide or shape.method == PLAIN):
                known.append((own, -seconds, shape.drafts))
        return {drafts: -seconds for _, seconds, drafts in sorted(known)}  # the last one counts: own, else cheapest

    def _learn(self, cost: _Cost, sample: float) -> _Cost:
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


def _doublings(context: int) -> int:
    """How often a context doubled since it was short."""
    return (context // SHORT_TOKENS).bit_length()


def _width(drafts: int) -> int:
    """Forwards of one class run the same kind of kernel over the context: 1, 2, 3-4, 5-8 or 9-16 tokens a row."""
    return drafts.bit_length()
