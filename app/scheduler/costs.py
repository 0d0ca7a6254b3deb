"""Step costs on this machine: forwards by rows and width, drafting by method, rows and number of drafts.

They are measured points, never a formula: kernels change at certain widths, and some drafters pay once, not per draft.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from statistics import fmean
from typing import NamedTuple

from app.core.request import OFF
from app.core.step import StepCost
from app.models.draft_lengths import draft_lengths
from app.models.drafters.methods import AT_ONCE_METHODS

STALE_STEPS = 1_024
"""Number of steps after which an unmeasured cost is forgotten, or falls back to its value at load, times the pace."""
MAX_WEIGHT = 20
"""Maximum weight of all earlier samples together, in samples."""
SHORT_TOKENS = 256
"""Context length, in tokens, below which the context adds next to nothing to a step."""
INTERVAL_STEPS = 32
"""Interval in steps between timings of drafting, and in tokens between judgements: evidence fades as a text grows."""
NOISE = 0.04
"""Relative difference that a measurement must exceed to change a curve or a decision."""
EXTRAPOLATED_SHARE, MIN_SLOPE = 0.5, 0.02
"""Share of the average slope assumed beyond the last measured width, and minimum slope, in plain steps per draft."""


class Shape(NamedTuple):
    """Shape of a step: drafting method, rows, and drafts per row."""

    method: str
    rows: int
    drafts: int


@dataclass(slots=True)
class Average:
    """Running average, worth `weight` samples."""

    value: float
    weight: float = 0.0

    def learn(self, sample: float, max_weight: float) -> None:
        """Add a sample; earlier ones together never count for more than `max_weight`."""
        self.weight = min(self.weight + 1, max_weight)
        self.value += (sample - self.value) / self.weight


@dataclass(slots=True)
class _Cost(Average):
    """Cost in seconds, or a factor. `origin` is its value at load, or 0; `curve_value` its value in the cached curves;
    `step` the step of its last sample."""

    origin: float = 0.0
    curve_value: float = 0.0
    step: int = -STALE_STEPS


class Curve(NamedTuple):
    """Seconds by number of drafts: points joined by lines, or by `steps`."""

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]

    slope: float
    """Seconds per draft beyond the last point."""
    steps: bool = False
    """Whether a length between two points costs as much as the longer one, because kernels change in steps."""

    @classmethod
    def through(cls, points: Mapping[int, float], *, beyond: float, steps: bool = False) -> "Curve":
        """Draw a curve through `points`; past the last one, it rises with the share `beyond` of the overall slope."""
        (first, least), (last, most) = min(points.items()), max(points.items())
        seconds = {0: least, **points}
        lengths = tuple(sorted(seconds))
        slope = max(beyond * (most - least) / max(1, last - first), MIN_SLOPE * least)
        return cls(lengths, tuple(seconds[length] for length in lengths), slope, steps)

    @classmethod
    def onward(cls, points: Mapping[int, float]) -> "Curve":
        """Draw a curve through `points`, 0 included, that rises past the last point as it did just before it."""
        curve = cls.through(points, beyond=0.0)
        if len(points) == 1:
            return curve
        (first, least), (last, most) = sorted(points.items())[-2:]
        return curve._replace(slope=max(0.0, (most - least) / (last - first)))

    def at(self, drafts: int) -> float:
        """Return the estimated seconds for `drafts`."""
        right = bisect(self.lengths, drafts)
        start, low = self.lengths[right - 1], self.seconds[right - 1]
        if right == len(self.lengths):
            return low + self.slope * (drafts - start)
        if self.steps:
            return self.seconds[right] if drafts > start else low
        return low + (self.seconds[right] - low) * (drafts - start) / (self.lengths[right] - start)


@dataclass(frozen=True, slots=True)
class Curves:
    """Costs of drafting and verifying for one method and number of rows; `plain`: seconds of a step without drafts."""

    drafting: Curve
    forward: Curve
    plain: float
    _cycles: dict[int, tuple[float, float]] = field(default_factory=dict)

    def cycle(self, drafts: int) -> tuple[float, float]:
        """Return a cycle's cost in plain steps: as estimated, and at best, if unmeasured widths cost nothing extra."""
        if drafts not in self._cycles:
            drafting, forward = self.drafting.at(drafts), self.forward
            narrower = forward.seconds[bisect(forward.lengths, drafts) - 1]
            self._cycles[drafts] = (drafting + forward.at(drafts)) / self.plain, (drafting + narrower) / self.plain
        return self._cycles[drafts]


class CostTable:
    """Step costs in seconds, starting from `measured` and refined by the steps that run."""

    def __init__(self, measured: Iterable[StepCost] = (), *, cheap_tokens: tuple[int, ...] = ()) -> None:
        self._cheap_tokens = cheap_tokens
        self._forwards: dict[Shape, _Cost] = {}
        """Forward costs in a short context, by shape."""
        self._drafts: dict[Shape, _Cost] = {}
        self._context_costs: dict[tuple[int, int], _Cost] = {}
        """Seconds per row that a longer context adds to a forward, by the context's doublings and the width class."""
        self._slowdowns: dict[tuple[int, str], _Cost] = {}
        """Factor by which a longer context slows drafting, by the context's doublings and the method."""
        self._warm_shapes: set[Shape] = set()
        self._timed_methods: set[str] = set()
        """Methods whose drafting has been timed, even if it takes no time."""
        self._learnt: set[Shape] = set()
        self._previous = ""
        self._step = 0
        self._untimed = 0
        self._pace = Average(1.0, MAX_WEIGHT)
        self.version = 0
        """Number that changes whenever the reported costs change."""
        self._curves_cache: dict[tuple[str, int, int], Curves] = {}
        self.add(measured)

    def add(self, measured: Iterable[StepCost]) -> None:
        """Add measured costs, where none are known."""
        for cost in sorted(measured, key=lambda cost: cost.context_tokens):
            self._add_measured(cost)
        self.version += 1
        self._curves_cache.clear()

    def _add_measured(self, cost: StepCost) -> None:
        shape, doublings = Shape(cost.method, cost.rows, cost.drafts), _doublings(cost.context_tokens)
        if doublings:
            short = self.curves(shape.method, shape.rows)
            if cost.seconds > 0:
                extra = (cost.seconds - short.forward.at(shape.drafts)) / shape.rows
                self._context_costs.setdefault((doublings, _width_class(shape.drafts)), _Cost(extra, 1.0))
            if cost.draft_seconds > 0 and (usual := short.drafting.at(shape.drafts)) > 0:
                self._slowdowns.setdefault((doublings, shape.method), _Cost(cost.draft_seconds / usual, 1.0))
            return
        self._warm_shapes.add(shape)
        self._timed_methods.add(shape.method)
        self._learnt |= {shape} if cost.is_learnt else set()
        for table, seconds in ((self._forwards, cost.seconds), (self._drafts, cost.draft_seconds)):
            if seconds > 0:
                table.setdefault(shape, _Cost(seconds, 1.0, seconds))

    def export(self) -> tuple[StepCost, ...]:
        """Return all known costs, for the next load of this model on this machine."""
        unknown = _Cost(0.0)
        short = [
            StepCost(*shape, forward.value, drafting.value, is_learnt=shape in self._learnt)
            for shape in sorted({*self._forwards, *self._drafts})
            for forward, drafting in [(self._forwards.get(shape, unknown), self._drafts.get(shape, unknown))]
        ]
        return (*short, *self._in_contexts())

    def _in_contexts(self) -> Iterator[StepCost]:
        """Yield costs in longer contexts, for one row: of one shape per width class, and of drafting by method."""
        for (doublings, width), extra in sorted(self._context_costs.items()):
            drafts, context = (1 << width) - 1, SHORT_TOKENS << (doublings - 1)
            seconds = self.curves(OFF, 1).forward.at(drafts) + extra.value
            yield StepCost(OFF, 1, drafts, seconds, context_tokens=context, is_learnt=True)
        for (doublings, method), slowdown in sorted(self._slowdowns.items()):
            drafts = max((shape.drafts for shape in self._drafts if shape[:2] == (method, 1)), default=1)
            seconds = slowdown.value * self.curves(method, 1).drafting.at(drafts)
            context = SHORT_TOKENS << (doublings - 1)
            yield StepCost(method, 1, drafts, 0.0, seconds, context_tokens=context, is_learnt=True)

    def observe(self, shape: Shape, *, seconds: float, draft_seconds: float | None, context: int = 0) -> None:
        """Learn from one step. If `draft_seconds` is None, drafting was not timed: its known cost is subtracted.

        The cost of a long `context` (in tokens) is learnt separately, because wide steps pay most of it. Untimed steps
        (0 seconds) and the first step of a shape or of a plain run, which warms up, are ignored.
        """
        self._step += 1
        self._untimed = self._untimed + 1 if draft_seconds is None else 0
        warm = self._previous == OFF if shape.method == OFF else shape in self._warm_shapes
        self._previous = shape.method if seconds > 0 else ""
        self._warm_shapes.add(shape)
        if seconds <= 0:
            return
        doublings = _doublings(context)
        drafting = self.curves(shape.method, shape.rows, context).drafting.at(shape.drafts)
        if draft_seconds is not None and shape.drafts and (warm or not drafting):
            drafting = draft_seconds
            self._learn_drafting(shape, doublings, draft_seconds)
        if warm:
            self._learn_forward(shape, doublings, seconds - drafting)

    def _learn_drafting(self, shape: Shape, doublings: int, seconds: float) -> None:
        self._timed_methods.add(shape.method)
        slowdown, known = self._slowdown(doublings, shape.method), self._drafts.get(shape)
        if doublings and known and known.value > 0:
            # The first sample counts fully, or its excess would be attributed to the shape in short contexts.
            sample = _clamped(16, slowdown, seconds / known.value)
            slowdown = self._learn(self._slowdowns.setdefault((doublings, shape.method), _Cost(sample)), sample).value
        seconds /= slowdown
        self._learn(self._drafts.setdefault(shape, _Cost(seconds, 1.0)), seconds)

    def _learn_forward(self, shape: Shape, doublings: int, seconds: float) -> None:
        width, known = _width_class(shape.drafts), self._forwards.get(shape)
        if doublings and known:
            short_seconds = known.value
            # The first sample counts fully, or its excess would be attributed to the shape in short contexts.
            expected_seconds, key = short_seconds + shape.rows * self._extra(doublings, width), (doublings, width)
            sample = _clamped(2 if key in self._context_costs else 4, expected_seconds, seconds) - short_seconds
            sample /= shape.rows
            cost = self._context_costs.setdefault(key, _Cost(sample))
            # Of the first two samples the cheaper counts: only a pause can have made the other one slower.
            cost.learn(min(cost.value, sample) if cost.weight == 1 else sample, MAX_WEIGHT)
            cost.value = min(cost.value, sample) if cost.weight == 2 else cost.value
            self._drop_stale_curves(cost, short_seconds)
            # The remainder is noise of the whole step, of which the shape gets its share.
            seconds *= short_seconds / max(short_seconds / 2, short_seconds + shape.rows * cost.value)
        else:
            seconds -= shape.rows * self._extra(doublings, width)
        # The first sample of a shape weighs as much as its estimate.
        expected = self.curves(shape.method, shape.rows).forward.at(shape.drafts) if self._forwards else seconds
        origin = self._learn(self._forwards.setdefault(shape, _Cost(expected, 1.0)), seconds).origin
        self._learnt.add(shape)
        if origin:
            self._pace.learn(_clamped(4, 1.0, seconds / origin), MAX_WEIGHT)

    def _slowdown(self, doublings: int, method: str) -> float:
        """Return a method's slowdown in this context; if unknown, that in half the context."""
        if not doublings:
            return 1.0
        known = self._slowdowns.get((doublings, method))
        return known.value if known else self._slowdown(doublings - 1, method)

    def _extra(self, doublings: int, width: int) -> float:
        """Return the seconds that a context adds per row.
        If unknown, in this order: the nearest narrower width class, scaled by the ratio of both in half the context; a
        wider one, unscaled; the same one in half the context, doubled if that was measured."""
        if not doublings:
            return 0.0
        if (doublings, width) in self._context_costs:
            return max(0.0, self._context_costs[doublings, width].value)
        shorter = self._extra(doublings - 1, width)
        widths = (other for length, other in self._context_costs if length == doublings)
        near = min(widths, key=lambda other: (other > width, abs(other - width)), default=None)
        if near is None:
            return (1 + ((doublings - 1, width) in self._context_costs)) * shorter
        known, usual = self._context_costs[doublings, near].value, self._extra(doublings - 1, near)
        return known * min(4.0, max(1.0, shorter / usual)) if usual > 0 and near < width else known

    def must_time(self, method: str, *, rows: int, drafts: int, context: int = 0) -> bool:
        """Return whether to time the next drafting: long untimed, new in this context, or few lengths are known."""
        known, doublings = [shape.drafts for shape in self._drafts if shape[:2] == (method, rows)], _doublings(context)
        is_new = doublings > 0 and (doublings, method) not in self._slowdowns
        return self._untimed >= INTERVAL_STEPS or is_new or (len(known) < 2 and drafts not in known)

    def knows_drafting(self, method: str) -> bool:
        """Return whether the cost of a draft of this method is known, or does not depend on the number of drafts."""
        return method in AT_ONCE_METHODS or method in self._timed_methods

    def knows_plain(self, rows: int, samples: int) -> bool:
        """Return whether plain steps of `rows` rows have `samples` samples, or were measured before this load."""
        known = self._forwards.get(Shape(OFF, rows, 0))
        return known is not None and (known.weight >= samples or known.origin > 0)

    def knows_context(self, context: int) -> bool:
        """Return whether plain steps were measured in about this context, or nothing shows that it slows them."""
        extras = {width: cost for (length, width), cost in self._context_costs.items() if length == _doublings(context)}
        if 0 in extras and extras[0].weight >= 2:
            return True
        return max((cost.value for cost in extras.values()), default=0.0) < NOISE * self.curves(OFF, 1).plain

    def curves(self, method: str, rows: int, context: int = 0) -> Curves:
        """Return the known costs as curves, cached because drawing them in every step would take too long."""
        doublings = _doublings(context)
        if (method, rows, doublings) not in self._curves_cache:
            # Forwards of this method, else of others, else of as many tokens in a smaller batch.
            points = self._points(method, rows)
            extras = {drafts: rows * self._extra(doublings, _width_class(drafts)) for drafts in points}
            slowed = {drafts: max(seconds / 2, seconds + extras[drafts]) for drafts, seconds in points.items()}
            forward = Curve.through(slowed, beyond=EXTRAPOLATED_SHARE, steps=bool(self._cheap_tokens))
            plain = forward.at(0) if method == OFF else self.curves(OFF, rows, context).plain
            drafting = self._drafting(method, rows, self._slowdown(doublings, method))
            self._curves_cache[method, rows, doublings] = Curves(drafting, forward, plain)
        return self._curves_cache[method, rows, doublings]

    def _drafting(self, method: str, rows: int, slowdown: float) -> Curve:
        """Return a method's drafting curve: 0 if never timed; beyond the longest timed length it is flat if one forward
        drafts all tokens, else it keeps rising. Lengths not timed with this number of rows (methods pay per draft or
        once) follow the curve of another number of rows, scaled to the costs known here."""
        timed: defaultdict[int, dict[int, float]] = defaultdict(lambda: {0: 0.0})
        for shape, cost in self._drafts.items():
            if shape.method == method:
                timed[shape.rows][shape.drafts] = slowdown * (self._current(cost) or cost.value)
        measured, known = timed.pop(rows, {}), max(timed.values(), key=len, default={0: 0.0})
        draw = partial(Curve.through, beyond=0.0) if method in AT_ONCE_METHODS else Curve.onward
        curve = draw(known)
        ratios = [measured[drafts] / curve.at(drafts) for drafts in measured if curve.at(drafts)] or [1.0]
        return draw({drafts: fmean(ratios) * curve.at(drafts) for drafts in known} | measured)

    def _points(self, method: str, rows: int) -> Mapping[int, float]:
        """Return the seconds of forwards by number of drafts.
        A shape that never ran at this batch size is estimated from as many tokens in the next smaller batch."""
        points = self._measured(method, rows)
        smaller = {
            fewer: self._measured(method, fewer) for fewer in {shape.rows for shape in self._forwards} if fewer < rows
        }
        fewer = max((fewer for fewer in smaller if len(smaller[fewer]) > 1), default=0)
        if fewer:
            curve = Curve.through(smaller[fewer], beyond=EXTRAPOLATED_SHARE, steps=bool(self._cheap_tokens))
            lengths = (0, *draft_lengths(self._cheap_tokens, rows))
            batch = {drafts: curve.at(max(0, ceil(rows * (1 + drafts) / fewer) - 1)) for drafts in lengths}
            scale = points[0] / batch[0] if 0 in points else 1.0
            points = {drafts: scale * seconds for drafts, seconds in batch.items()} | points
        return points or {0: 1.0}

    def _measured(self, method: str, rows: int) -> dict[int, float]:
        """Return the measured seconds of forwards of exactly `rows` rows, by number of drafts.
        Wide forwards that have not run for long are forgotten, or fall back to their cost at load."""
        known = []
        for shape, cost in self._forwards.items():
            own, wide = shape.method == method, shape.drafts > 0
            seconds = self._current(cost) or (0.0 if wide else cost.value)
            if seconds and shape.rows == rows and (own or wide or shape.method == OFF):
                known.append((own, -seconds, shape.drafts))
        return {drafts: -seconds for _, seconds, drafts in sorted(known)}  # the last wins: own, else the cheapest

    def _learn(self, cost: _Cost, sample: float) -> _Cost:
        cost.learn(_clamped(2, cost.value, sample), MAX_WEIGHT)
        return self._drop_stale_curves(cost, 0.0)

    def _drop_stale_curves(self, cost: _Cost, beside: float) -> _Cost:
        """Discard the cached curves from time to time, and if `cost` plus `beside` has changed by more than noise."""
        cost.step = self._step
        if (
            abs(cost.value - cost.curve_value) > NOISE * (cost.curve_value + beside)
            or self._step % (STALE_STEPS // 8) == 0
        ):
            cost.curve_value = cost.value
            self.version += 1
            self._curves_cache.clear()
        return cost

    def _current(self, cost: _Cost) -> float:
        """Return the current cost; 0 if unknown."""
        return cost.value if cost.step > self._step - STALE_STEPS else cost.origin * self._pace.value


def _clamped(factor: float, known: float, sample: float) -> float:
    """Return `sample`, clamped to `known` / `factor` … `known` * `factor`, so that a pause does not count fully."""
    return min(factor * known, max(known / factor, sample))


def _doublings(context: int) -> int:
    """Return how often a context has doubled since it was short."""
    return (context // SHORT_TOKENS).bit_length()


def _width_class(drafts: int) -> int:
    """Return the width class, which shares a kind of attention kernel: 1, 2, 3-4, 5-8, 9-16 or 17-32 tokens a row."""
    return drafts.bit_length()
