"""A disk that does not answer delays its readers for a moment only, and holds one thread."""

import threading
from pathlib import Path

import pytest

from app.core.patience import patient


class Drive:
    """A network drive: reads of it wait while its server is away."""

    def __init__(self) -> None:
        self.value = 1
        self.answers = threading.Event()
        self.reads = 0

    def read(self, _path: Path) -> int:
        self.reads += 1
        self.answers.wait()
        return self.value


def test_an_answer_is_returned_as_it_is_now() -> None:
    drive = Drive()
    drive.answers.set()
    read = patient(otherwise=0)(drive.read)
    assert read(Path("a")) == 1
    drive.value = 2
    assert read(Path("a")) == 2


def test_a_drive_that_does_not_answer_gives_its_last_value_is_asked_once_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drive = Drive()
    drive.answers.set()
    read = patient(otherwise=0, patience_seconds=0.01)(drive.read)
    read(Path("a"))
    drive.answers.clear()
    drive.value = 2
    assert [read(Path("a")) for _ in range(5)] == [1] * 5
    assert [record.message for record in caplog.records] == [
        "the disk of a does not answer: check its drive or network"
    ]
    assert drive.reads == 2
    drive.answers.set()
    while read(Path("a")) != 2:
        pass


def test_a_drive_that_has_never_answered_gives_what_stands_for_it() -> None:
    drive = Drive()
    read = patient(otherwise=0, patience_seconds=0.01)(drive.read)
    assert read(Path("a")) == 0
    drive.answers.set()


def test_an_error_of_a_read_reaches_its_caller() -> None:
    def fail(path: Path) -> int:
        raise ValueError(str(path))

    with pytest.raises(ValueError, match="a"):
        patient(otherwise=0)(fail)(Path("a"))
