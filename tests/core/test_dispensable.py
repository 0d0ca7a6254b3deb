"""An error in a part that a request can do without never fails the request."""

import logging

import pytest

from app.core.dispensable import Dispensable

logger = logging.getLogger("test")


def test_each_kind_of_fault_is_logged_once_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    part = Dispensable("the journal", logger)
    for error in (KeyError("a"), KeyError("b"), OSError("c")):
        with part.guarded():
            raise error
    assert [record.getMessage() for record in caplog.records] == [
        "the journal failed; requests continue without it"
    ] * 2
    assert all(record.exc_info for record in caplog.records)


def test_what_is_vital_goes_on() -> None:
    part = Dispensable("the cache", logger)
    with pytest.raises(MemoryError), part.guarded(is_vital=lambda error: isinstance(error, MemoryError)):
        raise MemoryError
    with pytest.raises(KeyboardInterrupt), part.guarded():
        raise KeyboardInterrupt


def test_what_a_fault_left_half_done_is_undone_and_that_may_fail_too() -> None:
    part, undone = Dispensable("the cache", logger), []
    with part.guarded(undo=lambda: undone.append(1)):
        pass
    assert undone == []
    with part.guarded(undo=lambda: undone.append(1)):
        raise ValueError("x")
    with part.guarded(undo=lambda: undone.append(1 // 0)):
        raise ValueError("x")
    assert undone == [1]
