"""What the rates of several workloads say about the governor: against the best fixed setting of each, and against the
best single one for all of them. Pure.

The best of many settings is the luckiest one too, so the ratios are rather too low than too high.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from app.serving.sweep.grid import PLAIN, Setting


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one workload, a value for each round: of every fixed setting, and of the governor."""

    name: str
    fixed: Mapping[Setting, Sequence[float]]
    governor: Sequence[float]

    @property
    def best(self) -> Setting:
        """The fixed setting with the highest median."""
        return max(self.fixed, key=lambda setting: median(self.fixed[setting]))

    @property
    def ratio(self) -> float:
        """The governor against the best fixed setting."""
        return self.ratio_to(self.best)

    def ratio_to(self, setting: Setting) -> float:
        """Median over the rounds of governor / setting."""
        return paired(self.governor, self.of(setting))

    def of(self, setting: Setting) -> Sequence[float]:
        """The rates of a setting; where its drafter is not loaded, requests decode plainly."""
        return self.fixed.get(setting, self.fixed[PLAIN])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is promised, in numbers."""

    worst: float
    worst_name: str
    mean: float
    """Geometric mean of the governor over the best fixed setting of each workload."""
    single: Setting
    """The fixed setting that is best for all workloads together."""
    lead: float
    """Geometric mean of the governor over it."""


def judge(workloads: Sequence[Rates]) -> Verdict:
    """Sum up."""
    worst = min(workloads, key=lambda rates: rates.ratio)
    single = best_single(workloads)
    return Verdict(
        worst=worst.ratio,
        worst_name=worst.name,
        mean=geometric_mean(rates.ratio for rates in workloads),
        single=single,
        lead=geometric_mean(rates.ratio_to(single) for rates in workloads),
    )


def best_single(workloads: Sequence[Rates]) -> Setting:
    """The setting whose medians have the highest geometric mean."""
    settings = dict.fromkeys(setting for rates in workloads for setting in rates.fixed)
    return max(settings, key=lambda setting: geometric_mean(median(rates.of(setting)) for rates in workloads))


def paired(subject: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over the rounds of subject / baseline."""
    return median(ours / theirs for ours, theirs in zip(subject, baseline, strict=True))


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive values."""
    logarithms = [log(value) for value in values]
    return exp(sum(logarithms) / len(logarithms))
