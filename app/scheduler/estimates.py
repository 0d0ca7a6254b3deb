"""What the governor knows: how likely drafts are accepted, and what a forward costs. Pure running estimates."""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

PLAIN = "off"
MEMORY = 1 - 1 / 64
"""Evidence is worth half after 44 further cycles, so that a new kind of text is noticed."""
PRIOR_WEIGHT = 2.0
STALE_STEPS = 1_024
UNKNOWN_SLOPE = 0.02
"""Cost of one more column, in plain steps, while nothing wider was measured: optimistic, so that it is tried."""


def smooth(old: float | None, sample: float, weight: float) -> float:
    """Moving average that no single outlier (a compilation, a pause of the machine) moves by much."""
    return sample if old is None else old + weight * (min(sample, 2 * old) - old)


class Acceptance:
    """Chance that the draft at each position is accepted, given that the ones before it were; and of a proposal at all.

    Position j leans on position j - 1 and the first one on `prior`, until its own evidence is heavier. Evidence
    about positions that are no longer drafted fades, so they are tried again.
    """

    def __init__(self, *, maximum: int, prior: float, proposal_prior: float) -> None:
        self._prior = prior
        self._proposal_prior = proposal_prior
        self._hits = [0.0] * maximum
        self._tries = [0.0] * maximum
        self._proposed = 0.0
        self._asked = 0.0

    @property
    def proposal_rate(self) -> float:
        """How often the drafter has something to propose when it is asked (1 for a model, less for n-grams)."""
        return (self._proposed + PRIOR_WEIGHT * self._proposal_prior) / (self._asked + PRIOR_WEIGHT)

    @property
    def first(self) -> float:
        """Acceptance of the first draft."""
        return (self._hits[0] + PRIOR_WEIGHT * self._prior) / (self._tries[0] + PRIOR_WEIGHT)

    def observe(self, *, asked: int, drafted: int, accepted: int) -> None:
        """One row was asked for drafts. A proposal shorter than asked counts as a miss where it ended."""
        self._scale(MEMORY)
        self._asked += 1
        if not drafted:
            return
        self._proposed += 1
        for position in range(min(accepted + 1, asked, len(self._hits))):
            self._tries[position] += 1
            self._hits[position] += position < accepted

    def forget(self, weight: float) -> None:
        """Keep at most `weight` cycles' worth of evidence: the next few observations decide."""
        self._scale(min(1.0, weight / max(self._asked, weight)))

    def expected_tokens(self) -> list[float]:
        """Tokens per step and row, by draft length 0, 1, 2, ...: the target's own one plus the drafts that survive."""
        reached, expected, rate = self.proposal_rate, 1.0, self._prior
        totals = [expected]
        for hits, tries in zip(self._hits, self._tries, strict=True):
            rate = (hits + PRIOR_WEIGHT * rate) / (tries + PRIOR_WEIGHT)
            reached *= rate
            expected += reached
            totals.append(expected)
        return totals

    def _scale(self, factor: float) -> None:
        self._hits = [hits * factor for hits in self._hits]
        self._tries = [tries * factor for tries in self._tries]
        self._proposed *= factor
        self._asked *= factor


@dataclass(slots=True)
class _Cost:
    seconds: float
    samples: int
    step: int


class CostTable:
    """Seconds of one forward without the drafting, by method, rows and width, as measured on this machine.

    The method is part of the key because a lazy engine may not be able to tell draft time from verify time.
    """

    def __init__(self) -> None:
        self._costs: defaultdict[tuple[str, int], dict[int, _Cost]] = defaultdict(dict)
        self._seen: set[tuple[str, int, int]] = set()
        self._previous = ""
        self._step = 0

    def observe(self, method: str, *, rows: int, width: int, seconds: float) -> None:
        """Learn one step. Ignored: steps nobody timed, and the first of a shape or of a plain run (it warms up)."""
        self._step += 1
        key = (method, rows, width)
        warm = self._previous == PLAIN if method == PLAIN else key in self._seen
        self._previous = method
        self._seen.add(key)
        if not warm or seconds <= 0:
            return
        known = self._costs[method, rows].get(width)
        if known is None:
            self._costs[method, rows][width] = _Cost(seconds, 1, self._step)
            return
        known.samples += 1
        known.step = self._step
        known.seconds = smooth(known.seconds, seconds, max(0.1, 1 / known.samples))

    def plain_samples(self, rows: int) -> int:
        known = self._costs[PLAIN, rows].get(1)
        return known.samples if known else 0

    def plain_age(self, rows: int) -> int:
        """Steps since a plain step of that many rows was measured."""
        known = self._costs[PLAIN, rows].get(1)
        return self._step - (known.step if known else 0)

    def curve(self, method: str, *, rows: int) -> "CostCurve":
        """What is known of forwards of that many rows; wide ones that nobody ran for long are forgotten."""
        known = {**self._costs[PLAIN, rows], **self._costs[method, rows]}
        if not known:
            # Somebody else always drafted beside these rows: their forwards are the nearest thing to a plain one.
            known = {width: cost for key, row in self._costs.items() if key[1] == rows for width, cost in row.items()}
        fresh = self._step - STALE_STEPS
        return CostCurve(
            sorted((width, cost.seconds) for width, cost in known.items() if width == 1 or cost.step > fresh)
        )


class CostCurve:
    """Seconds of a forward by width, from measured points and optimism: what was never measured costs little more."""

    def __init__(self, points: list[tuple[int, float]]) -> None:
        self._points = points or [(1, 1.0)]
        self._slope = UNKNOWN_SLOPE * self._points[0][1]

    @property
    def narrowest_seconds(self) -> float:
        """A forward without drafts; 1 when nothing was measured, so that lengths still compare."""
        return self._points[0][1]

    def seconds(self, width: float) -> float:
        """Cost at `width`, on the line between neighbouring measurements.

        Across a gap the line would hide a step (kernels change at certain widths), so the gap is explored instead.
        """
        at = bisect_right(self._points, width, key=_width_of)
        if not at:
            return self._points[0][1]
        left_width, left = self._points[at - 1]
        guess = left + self._slope * (width - left_width)
        if at == len(self._points):
            return guess
        right_width, right = self._points[at]
        line = left + (right - left) * (width - left_width) / (right_width - left_width)
        return line if right_width - left_width == 1 else min(line, guess)


def _width_of(point: tuple[int, float]) -> int:
    return point[0]
