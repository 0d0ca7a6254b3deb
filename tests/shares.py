"""Which of many alike cases `make test` tries: the others only deepen, and are tried by each landing."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

LANDING = (pytest.mark.soak, pytest.mark.landing)
"""The marks of what only deepens, and is tried by each landing too: the fixed share of the soak."""


def one_in(share: int, *axes: Sequence[Any]) -> list[Any]:
    """The combinations of the axes: one in so many for `make test`, every value of each axis among them, the others for
    each landing."""
    ways = product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(*(value for _, value in way), marks=() if sum(place for place, _ in way) % share == 0 else LANDING)
        for way in ways
    ]
