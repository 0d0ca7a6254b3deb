"""Pearson's chi-square test, and distributions as plain loops over tokens: references for rejection sampling."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.core.request import SamplingParameters

Floats = NDArray[np.float64]


def fits(counts: NDArray[np.int64], probabilities: Floats) -> bool:
    """Return whether `counts` follow `probabilities` with p > 0.001; a token of probability 0 must not occur at all.

    The quantile is Wilson and Hilferty's (1931); cells with an expected count below five are merged.
    """
    if np.any(counts[probabilities == 0]):
        return False
    expected = probabilities * counts.sum()
    small = expected < 5
    observed = [*counts[~small], counts[small].sum()]
    wanted = [*expected[~small], expected[small].sum()]
    cells = [(count, other) for count, other in zip(observed, wanted, strict=True) if other >= 1]
    statistic = sum((count - other) ** 2 / other for count, other in cells)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    return bool(statistic < freedom * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3)


def distribution(probabilities: Sequence[float], parameters: SamplingParameters) -> Floats:
    """Apply temperature, then top-k, top-p and min-p to `probabilities`, token by token."""
    scaled = np.asarray(probabilities, dtype=np.float64) ** (1 / parameters.temperature)
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    kept = order[: parameters.top_k or len(order)]
    total, mass, allowed = sum(scaled[token] for token in kept), 0.0, []
    for token in kept:
        if mass < parameters.top_p or not allowed:
            allowed.append(token)
        mass += scaled[token] / total
    result = np.zeros(len(scaled))
    for token in allowed:
        if scaled[token] >= parameters.min_p * scaled[order[0]]:
            result[token] = scaled[token]
    normalised: Floats = result / result.sum()
    return normalised
