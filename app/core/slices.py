"""Long work on the MLX thread, done in slices between the steps of other rows and models."""

import time
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")

SLICE_SECONDS = 0.15
"""Time after which a slice ends, in seconds; what has begun by then is finished."""


def run_slice(work: Generator[None, None, Result]) -> Result | None:
    """Run one slice of `work`, which yields often; return its result, or None if it is not done."""
    ends = time.perf_counter() + SLICE_SECONDS
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: Result = done.value
            return result
        if time.perf_counter() >= ends:
            return None
