"""Measures comparisons: contenders take turns (A B A B), medians are reported, ratios are paired by round.

Taking turns makes a slow minute of the machine hurt all contenders equally; the first turn of each is warm-up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import median
from typing import Literal

ERROR_CHANCE = 0.05
"""Largest accepted chance that an interval does not contain the median."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one contender: the measured value and notes that explain it (acceptance, cycles)."""

    value: float
    notes: Mapping[str, float] = field(default_factory=dict)


Progress = Callable[[str], None]
"""Callback that gets the name of the turn that is being measured."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A name in the table and the turn it takes."""

    name: str
    take_turn: Callable[[int], Sample]
    """Function of the round, from 0; the warm-up is round -1. All contenders do the same work in a round."""


@dataclass(frozen=True, slots=True)
class Series:
    """All turns of one contender."""

    name: str
    samples: tuple[Sample, ...]

    @property
    def median(self) -> float:
        """Median value, which one slow minute cannot move."""
        return median(sample.value for sample in self.samples)

    def median_notes(self) -> dict[str, float]:
        """Return the medians of the notes that every turn carries."""
        shared = set.intersection(*(set(sample.notes) for sample in self.samples))
        return {name: median(sample.notes[name] for sample in self.samples) for name in sorted(shared)}


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: a measured value, and the bound it must keep."""

    label: str
    value: float
    bound: float
    direction: Literal["at least", "at most"] = "at least"

    @property
    def passed(self) -> bool:
        """Whether the promise held in this run."""
        return self.value >= self.bound if self.direction == "at least" else self.value <= self.bound


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Results of one case."""

    name: str
    summary: str
    unit: str
    series: tuple[Series, ...]
    checks: tuple[Check, ...]
    notes: Mapping[str, float] = field(default_factory=dict)


def take_turns(contenders: Sequence[Contender], rounds: int, progress: Progress) -> dict[str, Series]:
    """Run every contender once per round, after one uncounted warm-up turn each."""
    for contender in contenders:
        progress(f"{contender.name}: warm-up")
        contender.take_turn(-1)
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            progress(f"{contender.name}: round {number + 1} of {rounds}")
            samples[contender.name].append(contender.take_turn(number))
    return {name: Series(name, tuple(taken)) for name, taken in samples.items()}


def paired_ratio(subject: Series, baseline: Series) -> float:
    """Return the median over the rounds of subject / baseline: both halves of a ratio come from the same round."""
    return median(paired_ratios(subject, baseline))


def paired_ratios(subject: Series, baseline: Series) -> list[float]:
    """Return subject / baseline of each round."""
    pairs = zip(subject.samples, baseline.samples, strict=True)
    return [ours.value / theirs.value for ours, theirs in pairs]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower end of the median's confidence interval, the median of `values`, and the upper end.

    The interval drops as many of the smallest and the largest values as a confidence of 95 % allows, whatever their
    distribution (order statistics; binomial with p = 1/2). With fewer than six values it drops none and covers less.
    """
    ordered, count, left_out, chance = sorted(values), len(values), 0, 2 * 0.5 ** len(values)
    while chance + 2 * comb(count, left_out + 1) * 0.5**count <= ERROR_CHANCE:
        left_out += 1
        chance += 2 * comb(count, left_out) * 0.5**count
    return ordered[left_out], median(ordered), ordered[count - 1 - left_out]
