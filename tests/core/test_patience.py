"""A disk that does not answer delays its readers for a moment only, and holds one thread."""

import threading
import time
from pathlib import Path

import pytest

from app.core.errors import DiskUnavailable
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


def test_who_asks_again_does_not_wait_again() -> None:
    drive = Drive()
    read = patient(otherwise=0, patience_seconds=1.0)(drive.read)
    began = time.monotonic()
    assert [read(Path("a")) for _ in range(20)] == [0] * 20
    assert time.monotonic() - began < 10
    drive.answers.set()


def test_where_nothing_can_stand_for_an_answer_the_disk_is_unavailable() -> None:
    drive = Drive()
    read = patient(otherwise=DiskUnavailable, patience_seconds=0.01)(drive.read)
    with pytest.raises(DiskUnavailable, match="does not answer"):
        read(Path("a"))
    drive.answers.set()


def test_an_error_of_a_read_reaches_its_caller() -> None:
    def fail(path: Path) -> int:
        raise ValueError(str(path))

    with pytest.raises(ValueError, match="a"):
        patient(otherwise=0)(fail)(Path("a"))
