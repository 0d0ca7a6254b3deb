"""The statistics of a request with several choices."""

import pytest

from app.core.statistics import Statistics


@pytest.mark.parametrize(("seconds", "first"), [((0.4, 0.2), 0.2), ((0.4, 0.0), 0.4), ((0.0, 0.0), 0.0), ((), 0.0)])
def test_the_first_token_is_the_earliest_that_there_was(seconds: tuple[float, ...], first: float) -> None:
    usages = [Statistics(first_token_seconds=moment) for moment in seconds]
    assert Statistics.combined(usages).first_token_seconds == first
