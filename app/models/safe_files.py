"""Untrusted files: opened without blocking, capped in size, checked before any value is used.

Functions that read raise `ModelUnavailable` (a reason and the next action, never a path), or `DiskUnavailable` where
the file is not at fault and a retry may succeed.
"""

import contextlib
import errno
import json
import math
import os
import stat
import sys
import unicodedata
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from app.core.errors import DiskUnavailable, ModelUnavailable
from app.core.patience import patient

MAX_JSON_BYTES = 8 * 1024 * 1024
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 200_000
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EDEADLK)
_ABSENCES = (errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESTALE)
MOMENTARY = frozenset((*_SHORTAGES, *_ABSENCES))
"""Error numbers of temporary failures, which say nothing about the file: of this computer, or of a network drive."""
SF_DATALESS = 0x4000_0000
"""Flag of a file on a Mac whose content is in iCloud only (sys/stat.h)."""
RETRY_SECONDS = 2
DOWNLOAD_AGAIN = "download the model again"

DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
INTEGER_CODES = {"I32": "i", "I64": "q"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str
    offset: int = 0
    """Offset of its bytes in the file."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def printable(name: str) -> str:
    """Return `name` as one short line that is safe in JSON and on a terminal, whatever bytes it contains, and composed
    as people type it: Finder writes accents and Hangul as separate characters."""
    composed = unicodedata.normalize("NFC", name[:200])
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in composed)


def escaped(text: str) -> str:
    """Return `text` with every control character escaped, including those that change the text direction."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def check_momentary(error: OSError) -> None:
    """Raise `DiskUnavailable` for an error that says nothing about the file."""
    if error.errno in MOMENTARY:
        message = f"models cannot be read at the moment ({error.strerror}): try again soon"
        raise DiskUnavailable(message, retry_after_seconds=RETRY_SECONDS) from error


@patient(otherwise="missing")
def folder_problem(folder: Path) -> str:
    """Return why a folder cannot be listed: `missing` or `forbidden` (also by macOS's privacy settings); "" if it can.

    Temporary errors are ignored.
    """
    try:
        os.scandir(folder).close()
    except PermissionError:
        return "forbidden"
    except OSError as error:
        return "" if error.errno in MOMENTARY else "missing"
    return ""


def _open_regular(path: Path) -> BinaryIO:
    """Open a regular file without blocking; refuse a FIFO, socket or device without opening it."""
    try:
        status = path.stat()
        is_regular = stat.S_ISREG(status.st_mode)
        if getattr(status, "st_flags", 0) & SF_DATALESS:  # reading it would download all of it first
            raise ModelUnavailable(f"{printable(path.name)} is in iCloud only; in Finder, choose Download Now")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if is_regular else -1
    except OSError as error:
        check_momentary(error)
        raise ModelUnavailable(f"{printable(path.name)} cannot be read ({error.strerror}); check it") from None
    if descriptor < 0 or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        if descriptor >= 0:
            os.close(descriptor)
        raise ModelUnavailable(f"{printable(path.name)} is not a regular file; {DOWNLOAD_AGAIN}")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`."""
    try:
        with _open_regular(path) as file:
            is_larger = os.fstat(file.fileno()).st_size > max_bytes
            content = b"" if is_larger else file.read(max_bytes + 1)
    except OSError as error:
        check_momentary(error)
        raise ModelUnavailable(f"{printable(path.name)} cannot be read ({error.strerror}); check it") from None
    if is_larger or len(content) > max_bytes:
        raise ModelUnavailable(f"{printable(path.name)} is larger than {max_bytes >> 20} MiB; {DOWNLOAD_AGAIN}")
    return content


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read the JSON value in a regular file of at most `max_bytes`."""
    return _decode(read_file(path, max_bytes), Any, path.name)


def read_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in a regular file of at most `max_bytes`."""
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise ModelUnavailable(f"{printable(path.name)} is not a JSON object; {DOWNLOAD_AGAIN}")
    return value


def _decode(content: bytes | msgspec.Raw, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        if kind is Any:  # Python writes Infinity and NaN, which JSON does not know
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(bytes(content))
        raise ModelUnavailable(f"{printable(name)} is not valid; {DOWNLOAD_AGAIN}") from None


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file: an 8-byte length, JSON, then data that the tensors must cover exactly."""
    broken = f"{printable(path.name)} is truncated or corrupt; {DOWNLOAD_AGAIN}"
    with _open_regular(path) as file:
        available = os.fstat(file.fileno()).st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(available, MAX_HEADER_BYTES):
            raise ModelUnavailable(broken)
        header = file.read(length)
    entries = _decode(header, dict[str, msgspec.Raw], path.name)
    entries.pop("__metadata__", None)
    if len(entries) > MAX_TENSORS:
        raise ModelUnavailable(broken)
    tensors = {name: _decode(raw, _Entry, path.name) for name, raw in entries.items()}
    end = 0
    for entry in sorted(tensors.values(), key=lambda entry: entry.data_offsets):
        if not _is_sound(entry, end):
            raise ModelUnavailable(broken)
        end = entry.data_offsets[1]
    if end != available - length:
        raise ModelUnavailable(broken)
    return {name: _described(entry, path.name, 8 + length) for name, entry in tensors.items()}


def _described(entry: _Entry, file: str, data_begin: int) -> TensorInfo:
    begin, end = entry.data_offsets
    return TensorInfo(entry.dtype, tuple(entry.shape), end - begin, file, data_begin + begin)


def read_integers(folder: Path, tensor: TensorInfo) -> list[int]:
    """Read the values of a small I32 or I64 tensor, flattened. Raises ModelUnavailable for any other tensor."""
    broken = f"{printable(tensor.file)} is truncated or corrupt; {DOWNLOAD_AGAIN}"
    if tensor.dtype not in INTEGER_CODES or tensor.size_bytes > MAX_JSON_BYTES:
        raise ModelUnavailable(broken)
    with _open_regular(folder / tensor.file) as file:
        file.seek(tensor.offset)
        content = file.read(tensor.size_bytes)
    if len(content) != tensor.size_bytes:
        raise ModelUnavailable(broken)
    values = array(INTEGER_CODES[tensor.dtype], content)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _is_sound(entry: _Entry, expected_begin: int) -> bool:
    begin, end = entry.data_offsets
    if entry.dtype not in DTYPE_BITS or len(entry.shape) > 16 or any(size < 0 for size in entry.shape):
        return False
    return begin == expected_begin and (end - begin) * 8 == math.prod(entry.shape) * DTYPE_BITS[entry.dtype]
