"""What the worker is at: the model that its MLX thread loads or steps, noted where it outlives the worker.

The note is a page of an unlinked file that both processes hold: the worker maps and writes it (a frame could still be
on its way when the process dies), the supervisor reads it once the worker has ended or hangs.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

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


class AtWork:
    """The worker's end of a note; without a descriptor it notes nothing."""

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
