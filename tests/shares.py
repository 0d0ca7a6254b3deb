"""Which of many alike cases `make test` tries: the others only deepen, and are tried by each landing."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

LANDING = (pytest.mark.soak, pytest.mark.landing)
"""The marks of what only deepens, and is tried by each landing too: the fixed share of the soak."""


def one_in(share: int, *axes: Sequence[Any]) -> list[Any]:
    """The combinations of the axes: one in so many for `make test`, the others for each landing.

    Of several axes, each value is among the first; ValueError where the share is too small for that.
    """
    ways = [[*enumerate(values)] for values in product(*map(range, map(len, axes)))]
    first = [way for way in ways if sum(place for _, place in way) % share == 0]
    if len(axes) > 1 and len({each for way in first for each in way}) < sum(map(len, axes)):
        raise ValueError(f"one in {share} leaves out a value of an axis")
    return [
        pytest.param(*(axes[axis][place] for axis, place in way), marks=() if way in first else LANDING) for way in ways
    ]
