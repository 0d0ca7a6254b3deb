"""Pure functions that compare the governor's rates on several workloads with the best fixed setting of each, and with
the best single setting for all of them.

A sweep finds the best setting and separate rounds measure it, because the winner owes its place partly to luck.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from app.serving.sweep.grid import GOVERNOR, PLAIN, Setting

RatesBySetting = Mapping[Setting, Sequence[float]]
"""Tokens per second of one workload, by setting: one value per round."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one workload: every fixed setting in `sweep`; the governor and its rivals in `rounds`."""

    name: str
    sweep: RatesBySetting
    rounds: RatesBySetting

    @property
    def best(self) -> Setting:
        """Best fixed setting."""
        return best_single([self.sweep])

    @property
    def ratio(self) -> float:
        """Ratio of the governor to the best fixed setting."""
        return self.ratio_to(self.best)

    def ratio_to(self, setting: Setting) -> float:
        """Return the median over the rounds of governor / setting."""
        return paired(self.rounds[GOVERNOR], self.rounds[effective_setting(setting, self.sweep)])


@dataclass(frozen=True, slots=True)
class Verdict:
    """Measured values of the promises."""

    worst: float
    worst_name: str
    mean: float
    """Geometric mean of the governor over the best fixed setting of each workload."""
    single: Setting
    """Fixed setting that is best for all workloads together."""
    mean_over_single: float
    """Geometric mean of the governor over `single`."""


def summarise(workloads: Sequence[Rates]) -> Verdict:
    """Summarise the workloads."""
    worst = min(workloads, key=lambda rates: rates.ratio)
    single = best_single([rates.sweep for rates in workloads])
    return Verdict(
        worst=worst.ratio,
        worst_name=worst.name,
        mean=geometric_mean(rates.ratio for rates in workloads),
        single=single,
        mean_over_single=geometric_mean(rates.ratio_to(single) for rates in workloads),
    )


def best_single(sweeps: Sequence[RatesBySetting]) -> Setting:
    """Return the setting whose medians have the highest geometric mean; among equals, the first in order."""

    def mean(setting: Setting) -> float:
        return geometric_mean(median(sweep[effective_setting(setting, sweep)]) for sweep in sweeps)

    return max(sorted({setting for sweep in sweeps for setting in sweep}), key=mean)


def effective_setting(setting: Setting, sweep: RatesBySetting) -> Setting:
    """Return the setting that takes effect: plain decoding if the setting's drafter is not loaded."""
    return setting if setting in sweep else PLAIN


def paired(subject: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median over the rounds of subject / baseline."""
    return median(ours / theirs for ours, theirs in zip(subject, baseline, strict=True))


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive values."""
    logarithms = [log(value) for value in values]
    return exp(sum(logarithms) / len(logarithms))
