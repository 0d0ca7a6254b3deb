"""Shares of similar cases: one for `make test`, one for `make landing` before each merge, the rest for `make soak`."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

LANDING = (pytest.mark.soak, pytest.mark.landing)
"""Marks of long random tests that run before each merge too: a fixed share of the soak."""


def one_in(share: int, *axes: Sequence[Any]) -> list[Any]:
    """Return all combinations: one in `share` for `make test`, as many for `make landing`, the rest for `make soak`.

    Of several axes, `make test` tries each value. Raises ValueError if `share` is too large for that.
    """
    marks = [(), LANDING, *[(pytest.mark.soak,)] * (share - 2)]
    ways = [[*enumerate(places)] for places in product(*map(range, map(len, axes)))]
    turns = [sum(place for _, place in way) % share for way in ways]
    first = {value for way, turn in zip(ways, turns, strict=True) if turn == 0 for value in way}
    if len(axes) > 1 and len(first) < sum(map(len, axes)):
        raise ValueError(f"one in {share} leaves out a value of an axis")
    return [
        pytest.param(*(axes[axis][place] for axis, place in way), marks=marks[turn])
        for way, turn in zip(ways, turns, strict=True)
    ]
