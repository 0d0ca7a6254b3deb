"""Thousands of random schedules over every family, run by `make soak`."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.schedules import FEATURE_METHODS, METHODS, SCRIPTS, run_schedule
from tests.tiny import FAMILIES

SCHEDULES = 834
"""Of each family: more than 5,000 in all."""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=SCHEDULES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(
    seed=st.integers(0, 2**32),
    methods=st.sampled_from([*[(name,) for name in (*METHODS, *FEATURE_METHODS)], METHODS, (*METHODS, "dflash")]),
    script=st.sampled_from(list(SCRIPTS)),
    quantised=st.booleans(),
    carry_over=st.booleans(),
    prefix=st.booleans(),
)
def test_any_schedule_says_what_the_naive_loop_says(
    family: str,
    seed: int,
    methods: tuple[str, ...],
    script: str,
    quantised: bool,
    carry_over: bool,
    prefix: bool,
) -> None:
    run_schedule(
        family,
        seed,
        methods=methods,
        script=script,
        quantised=quantised,
        carry_over=carry_over,
        prefix_bytes=(1 << 30) if prefix else 0,
        longest=10,
    )
