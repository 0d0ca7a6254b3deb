"""What is learned from the end of a worker: the cause, the pause before the next one, who is to blame.

Pure: time comes in as numbers, and the supervisor owns one of each; but for the note of what the worker is at. That is
a page of an unlinked file that both processes hold: the worker maps and writes it (a frame could still be on its way
when the process dies), the supervisor reads it once the worker has ended or hangs.
"""

import mmap
import os
import signal
import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import IO

from app.core.reason import Reason

_SIGNALS: dict[int, Reason] = {
    signal.SIGKILL: Reason("exit_killed"),
    signal.SIGABRT: Reason("exit_aborted"),
    signal.SIGSEGV: Reason("exit_segfault"),
    signal.SIGBUS: Reason("exit_bus"),
    signal.SIGILL: Reason("exit_illegal"),
    signal.SIGTERM: Reason("exit_terminated"),
}


def exit_name(code: int | None) -> str:
    """An exit code (negative: minus the signal; None: it had to be killed) by its number, or the name of the signal."""
    if code is not None and code >= 0:
        return str(code)
    number = signal.SIGKILL if code is None else -code
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def describe_exit(code: int | None) -> Reason:
    """Why a process ended, from its exit code as `exit_name` has it."""
    if code is None:
        return Reason("exit_stuck")
    if code >= 0:
        return Reason("exit_code", {"code": code}) if code else Reason("exit_clean")
    return _SIGNALS.get(-code) or Reason("exit_signal", {"name": exit_name(code)})


class Backoff:
    """Pauses between restarts in seconds: none after a steady life, then first, 2 × first … up to the limit."""

    def __init__(self, first_seconds: float, limit_seconds: float, steady_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._limit_seconds = limit_seconds
        self._steady_seconds = steady_seconds
        self._next_seconds = 0.0

    def pause_seconds(self, lived_seconds: float) -> float:
        """The pause after a life of `lived_seconds`."""
        if lived_seconds >= self._steady_seconds:
            self._next_seconds = 0.0
        pause = self._next_seconds
        self._next_seconds = min(self._limit_seconds, max(self._first_seconds, pause * 2))
        return pause


def to_blame(code: int | None, at: str, in_flight: frozenset[str]) -> str:
    """The model whose doing the end of a worker was, or nobody's (empty).

    `at` is what the worker was at. SIGKILL and SIGTERM come from outside (a person, the system that is out of memory):
    they count only against a model that had the worker to itself.
    """
    from_outside = code is not None and -code in (signal.SIGKILL, signal.SIGTERM)
    return "" if from_outside and in_flight - {at} else at


class CrashLog:
    """Counts crashes by model: `limit` of them within the window quarantine it, until it is released or time is up."""

    def __init__(self, limit: int, window_seconds: float, quarantine_seconds: float) -> None:
        self._limit = limit
        self._window_seconds = window_seconds
        self._quarantine_seconds = quarantine_seconds
        self._crashes: deque[tuple[float, str]] = deque()
        self._quarantined: dict[str, tuple[float, Reason]] = {}

    def quarantined(self, now_seconds: float) -> Mapping[str, Reason]:
        """Model id -> why it is not loaded now."""
        self._quarantined = {name: kept for name, kept in self._quarantined.items() if kept[0] > now_seconds}
        return {
            name: replace(why, values={**why.values, "again": max(1, round((until - now_seconds) / 60))})
            for name, (until, why) in self._quarantined.items()
        }

    def record(self, now_seconds: float, model_id: str, cause: Reason) -> bool:
        """One crash that was the doing of `model_id`; True when it is quarantined for it."""
        self._crashes.append((now_seconds, model_id))
        while self._crashes[0][0] < now_seconds - self._window_seconds:
            self._crashes.popleft()
        if sum(name == model_id for _, name in self._crashes) < self._limit:
            return False
        self._crashes = deque(crash for crash in self._crashes if crash[1] != model_id)
        self._quarantined[model_id] = (
            now_seconds + self._quarantine_seconds,
            Reason("quarantined", {"count": self._limit, "minutes": self._window_seconds / 60, "cause": str(cause)}),
        )
        return True

    def release(self, model_id: str) -> bool:
        """Let a model run again, with a clean record; False when it was not quarantined."""
        self._crashes = deque(crash for crash in self._crashes if crash[1] != model_id)
        return self._quarantined.pop(model_id, None) is not None


NOTE_BYTES = mmap.PAGESIZE
_LENGTH = struct.Struct(">I")


def new_note() -> IO[bytes]:
    """An empty note, whose descriptor the worker inherits. Raises OSError."""
    note = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
    note.truncate(NOTE_BYTES)
    return note


def read_note(note: IO[bytes]) -> str:
    """The id of the model that the worker was at; empty when it was at none."""
    page = os.pread(note.fileno(), NOTE_BYTES, 0)
    (length,) = _LENGTH.unpack_from(page)
    return page[_LENGTH.size : _LENGTH.size + length].decode("utf-8", "replace")


class CrashNote:
    """The worker's end of the note: the model that its MLX thread is at. Without a descriptor it notes nothing."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._page = None if descriptor is None else mmap.mmap(descriptor, NOTE_BYTES)

    @contextmanager
    def on(self, model_id: str) -> Iterator[None]:
        """Whatever happens to the process within is this model's doing."""
        self._write(model_id)
        try:
            yield
        finally:
            self._write("")

    def _write(self, model_id: str) -> None:
        if self._page is None:
            return
        name = model_id.encode()[: NOTE_BYTES - _LENGTH.size]
        self._page[_LENGTH.size : _LENGTH.size + len(name)] = name
        self._page[: _LENGTH.size] = _LENGTH.pack(len(name))  # last: a half-written name is never read
