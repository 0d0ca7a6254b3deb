"""Thousands of random schedules over every family, run by `make soak`."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.schedules import FEATURE_METHODS, METHODS, SCRIPTS, run_schedule
from tests.tiny import FAMILIES

SCHEDULES, OF_A_LANDING = 834, 20
"""Numbers of schedules per family: in the soak (over 5,000 for all families), and before each landing."""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [pytest.param(OF_A_LANDING, marks=pytest.mark.landing), SCHEDULES])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_schedule_says_what_the_naive_loop_says(family: str, count: int) -> None:
    @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(
        seed=st.integers(0, 2**32),
        methods=st.sampled_from([*[(name,) for name in (*METHODS, *FEATURE_METHODS)], METHODS, (*METHODS, "dflash")]),
        script=st.sampled_from(list(SCRIPTS)),
        quantised=st.booleans(),
        carry_over=st.booleans(),
        prefix_bytes=st.sampled_from([0, 1 << 30]),
    )
    def check(seed: int, methods: tuple[str, ...], script: str, **changes: Any) -> None:
        run_schedule(family, seed, methods=methods, script=script, longest=10, **changes)

    check()
