"""Disk tier of the prefix cache: one file per block, so that conversations survive a restart, unload or eviction.

Each block is a safetensors file whose header identifies it and holds a checksum of the whole file, so a damaged file is
never used. A background thread writes one file at a time under a temporary name and then renames it: a kill leaves no
partial block. That thread never calls mlx: it gets the memory of evaluated arrays, which the MLX thread releases once
it is written. Folders are private to the user. Files unused for too long, or over the size limit, are removed.
"""

import contextlib
import logging
import math
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from app.core.clock import Clock, steady_unix_time
from app.engine.platform import versions
from app.engine.prefix.index import BLOCK_OVERHEAD_BYTES, BlockStore, CacheBlock, Name
from app.machine.own_files import make_cache_folder, open_regular_file
from app.machine.prefix_files import PREFIX_FILE_NAME, PREFIX_PARTIAL_NAME, prefix_files

FORMAT = "paceline prefix 1"
SUFFIX, PARTIAL = ".safetensors", ".part"
PENDING_BYTES = 4 << 30
"""Limit on bytes queued for writing. Queued blocks take extra memory only if the memory tier has dropped them."""
FREE_BYTES = 1 << 30
"""Disk space to leave free, in bytes."""
RETRY_SECONDS = 60.0
"""Pause in writing after an error, in seconds."""
DAY_SECONDS = 86_400.0
BEGIN = b'{"__metadata__":{"sha256":"'
DIGEST = slice(8 + len(BEGIN), 8 + len(BEGIN) + 64)
MAX_HEADER_BYTES = 1 << 20

READERS = 2
"""Number of threads that read files ahead."""
STALL_SECONDS = 2.0
"""Longest wait, in seconds, for the next file that is read ahead: to prefill its few tokens would be quicker."""

Arrays = Mapping[str, mx.array]
FileContent = Future[bytes]
"""A whole file's bytes, empty if it is damaged; or the OSError of reading it."""
_NAMES = {
    mx.float32: ("F32", np.float32),
    mx.float16: ("F16", np.float16),
    mx.bfloat16: ("BF16", np.uint16),
    mx.float64: ("F64", np.float64),
    mx.complex64: ("C64", np.complex64),
    mx.uint64: ("U64", np.uint64),
    mx.int64: ("I64", np.int64),
    mx.uint32: ("U32", np.uint32),
    mx.int32: ("I32", np.int32),
    mx.uint16: ("U16", np.uint16),
    mx.int16: ("I16", np.int16),
    mx.uint8: ("U8", np.uint8),
    mx.int8: ("I8", np.int8),
    mx.bool_: ("BOOL", np.bool_),
}
_TYPES = {name: (dtype, raw) for dtype, (name, raw) in _NAMES.items()}
logger = logging.getLogger("paceline.prefixes")


@dataclass(slots=True)
class DiskFile:
    """File of a block, and when it was last used (Unix seconds)."""

    path: Path
    used_at: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Written:
    """Result of writing a file; `error` is empty on success."""

    block: CacheBlock
    path: Path
    nbytes: int
    error: str = ""


class ReadAhead:
    """The files of a request's prefix, which are being read."""

    def __init__(self, request_id: str, contents: dict[CacheBlock, FileContent]) -> None:
        self.request_id = request_id
        self.contents = contents
        self.unread = len(contents)
        """Number of files that were not read at the end of the last `wait`."""
        self._progressed_at = time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether the wait is over: all is read, or the disk is too slow."""
        unread = len(wait(self.contents.values(), seconds).not_done)
        if unread < self.unread:
            self.unread, self._progressed_at = unread, time.monotonic()
        return not unread or time.monotonic() - self._progressed_at >= STALL_SECONDS

    def take_read(self) -> dict[CacheBlock, FileContent]:
        """Return what has been read and stop reading the rest."""
        read = {block: content for block, content in self.contents.items() if not content.cancel() and content.done()}
        self.contents = {}
        return read


class Disk:
    """All blocks of all models below `folder`. Called from the MLX thread; disk errors are never raised.

    `limit_bytes` 0 keeps nothing. Files unused for `max_days` are removed.
    """

    def __init__(
        self, folder: Path | None, limit_bytes: int, *, max_days: float = math.inf, clock: Clock | None = None
    ) -> None:
        self._folder = folder
        self._max_age_seconds = max_days * DAY_SECONDS
        self._clock = clock or steady_unix_time()
        self._bytes_by_model: Counter[str] = Counter()
        """Bytes by model folder."""
        self.blocks: BlockStore[DiskFile] = BlockStore(limit_bytes if folder else 0, self._delete)
        self.write_error = ""
        """Reason why writing is paused; empty if it is not."""
        self._paused_until = 0.0
        self._pending: dict[Name, tuple[Path, list[memoryview]]] = {}
        """Files to be written and their memory: the writer thread drops it first, so that the MLX thread frees it."""
        self._pending_bytes = 0
        self._cleared: set[Name] = set()
        self._done: deque[_Written] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefix-writer")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="prefix-reader")
        if folder is not None:
            self._open(folder)

    @property
    def pending(self) -> int:
        """Number of files not written yet."""
        return len(self._pending)

    # --- reading ----------------------------------------------------------------------------------------------

    def _open(self, folder: Path) -> None:
        """Index the existing files, least recently used first; remove partial files that another process left."""
        try:
            for path, _ in prefix_files(folder, PREFIX_PARTIAL_NAME):
                if not path.name.endswith(f".{os.getpid()}{PARTIAL}"):
                    path.unlink(missing_ok=True)
            files = sorted(prefix_files(folder, PREFIX_FILE_NAME), key=lambda entry: entry[1].st_mtime)
        except OSError as error:
            self._pause(error.strerror or str(error))
            return
        for path, status in files:
            block = _block_of(path)
            if block is None:
                self._enqueue(partial(path.unlink, missing_ok=True))
            else:
                self._add(block, DiskFile(path, status.st_mtime, status.st_size))
        self._evict()

    def read_ahead(self, block: CacheBlock) -> FileContent | None:
        """Start reading and checking a block's file in another thread, for `read`. Return None if there is no file."""
        file = self.blocks.get(block.name)
        return self._readers.submit(_whole, file.path) if file is not None else None

    def read(self, block: CacheBlock, content: FileContent | None = None) -> dict[str, mx.array] | None:
        """Return a block's arrays exactly as written; None, forgetting the block, if its file is missing or damaged.
        `content` is what `read_ahead` returned for it; without it, the file is read here."""
        file = self.blocks.get(block.name)
        if file is None:
            return None
        try:
            content_bytes = content.result() if content is not None else _whole(file.path)
            arrays = decoded(content_bytes, block)
            if arrays is None:
                logger.warning("removed a damaged prefix cache file")
        except OSError as error:
            logger.info("a prefix cache file is missing (%s)", error.strerror)
            arrays = None
        if arrays is None:
            self.blocks.remove(block.name)
        return arrays

    def used(self, names: Sequence[Name]) -> None:
        """Mark blocks as used now. Pass the last block of a chain first."""
        now = self._clock()
        for index, name in enumerate(names):
            self.blocks.touch(name)
            if (file := self.blocks.get(name)) is not None:
                file.used_at = now + index * 1e-6
                self._enqueue(partial(os.utime, file.path, (file.used_at, file.used_at)))

    # --- writing ----------------------------------------------------------------------------------------------

    def write(self, model: str, block: CacheBlock, arrays: Arrays) -> None:
        """Queue a block for writing; `arrays` must be evaluated, contiguous in memory, and never change."""
        nbytes = sum(array.nbytes for array in arrays.values())
        if (
            self._folder is None
            or nbytes + BLOCK_OVERHEAD_BYTES > self.blocks.limit_bytes
            or self._clock() < self._paused_until
        ):
            return
        if block.name in self.blocks or block.name in self._pending:
            return
        if self._pending_bytes + nbytes > PENDING_BYTES:
            return  # offered again with the next use
        header, buffers = encoded(block, arrays)
        path = self._folder / model / f"{block.kind}-{block.key.hex()}{SUFFIX}"
        self._pending[block.name] = path, buffers
        self._pending_bytes += nbytes
        self._enqueue(partial(_write, block, path, header, buffers))

    def collect(self) -> bool:
        """Index the files written since the last call, and release their arrays; return whether there were any."""
        has_written = bool(self._done)
        while self._done:
            written = self._done.popleft()
            name = written.block.name
            _, buffers = self._pending.pop(name)
            self._pending_bytes -= sum(buffer.nbytes for buffer in buffers)
            if name in self._cleared:
                self._cleared.discard(name)
            elif written.error:
                self._pause(written.error)
            else:
                self.write_error = ""
                self._add(written.block, DiskFile(written.path, self._clock(), written.nbytes))
        self._evict()
        return has_written

    def flush(self, seconds: float) -> None:
        """Wait for pending writes, at most `seconds`."""
        wait([self._writer.submit(int)], seconds)
        self.collect()

    def clear(self) -> None:
        """Remove everything, including other models' blocks."""
        self.collect()
        for path, _ in self._pending.values():  # runs after the pending write
            self._enqueue(partial(path.unlink, missing_ok=True))
        self._cleared |= self._pending.keys()
        self.blocks.clear()

    def _evict(self) -> None:
        self.blocks.make_room(0)
        while (oldest := self.blocks.oldest()) and self._clock() - oldest[1].used_at > self._max_age_seconds:
            self.blocks.remove(oldest[0].name)

    def _pause(self, error: str) -> None:
        """Pause writing for `RETRY_SECONDS`."""
        if not self.write_error:
            logger.warning("writing the prefix cache to disk is paused: %s", error)
        self.write_error, self._paused_until = error, self._clock() + RETRY_SECONDS

    def bytes_of(self, model: str) -> int:
        """Return the bytes of one model's folder."""
        return self._bytes_by_model[model]

    def _add(self, block: CacheBlock, file: DiskFile) -> None:
        self._bytes_by_model[file.path.parent.name] += file.nbytes
        self.blocks.add(block, file, BLOCK_OVERHEAD_BYTES + file.nbytes)

    def _delete(self, _block: CacheBlock, file: DiskFile) -> None:
        self._bytes_by_model[file.path.parent.name] -= file.nbytes
        self._enqueue(partial(file.path.unlink, missing_ok=True))

    def _enqueue(self, work: Callable[[], _Written | None]) -> None:
        """Queue work for the writer thread, which runs it in order."""
        self._writer.submit(_run, [work], self._done)


def _run(works: list[Callable[[], _Written | None]], done: deque[_Written]) -> None:
    """Run the one item of `works`, and release the memory that it writes before its result can be collected."""
    written = None
    try:
        written = works.pop()()
    except OSError as error:
        logger.info("a prefix cache file cannot be touched or deleted: %s", error.strerror)
    except Exception:  # nobody reads the future of this call
        logger.exception("the prefix cache's writer failed; it continues with the next file")
    if written is not None:
        done.append(written)


NO_DISK = Disk(None, 0)


def identity_of(folder: Path, *more: str) -> str:
    """Return the identity of what a model's caches depend on: files (names, sizes, times), library versions, `more`."""
    stamps = sorted(
        (path.name, status.st_size, status.st_mtime_ns)
        for path in folder.iterdir()
        if path.suffix in {".json", SUFFIX} and (status := path.stat())
    )
    return f"{FORMAT} {versions()} {more} {stamps}"


def encoded(block: CacheBlock, arrays: Arrays) -> tuple[bytes, list[memoryview]]:
    """Return a file's header, with a zeroed checksum, and the memory of its arrays, which must not change."""
    metadata = {
        "sha256": "0" * 64,
        "format": FORMAT,
        "kind": block.kind,
        "parent": block.parent.hex(),
        "tokens": " ".join(map(str, block.tokens)),
    }
    entries: dict[str, Any] = {"__metadata__": metadata}
    buffers, end = [], 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        entries[name] = {"dtype": _NAMES[array.dtype][0], "shape": array.shape, "data_offsets": [begin, end]}
        if array.nbytes:
            buffers.append(memoryview(array).cast("B"))  # type: ignore[arg-type]
    header = msgspec.json.encode(entries)
    return len(header).to_bytes(8, "little") + header, buffers


def _whole(path: Path) -> bytes:
    """Read a file and check its checksum; return its bytes, empty if it is damaged. Raises OSError."""
    with os.fdopen(open_regular_file(path), "rb") as file:
        content = file.read()
    is_intact = content.startswith(BEGIN, 8) and _digest([content]) == content[DIGEST]
    return content if is_intact else b""


def decoded(content: bytes, block: CacheBlock) -> dict[str, mx.array] | None:
    """Return the arrays in a file's `content`; None if that is empty (damaged) or of another block."""
    if not content:
        return None
    size = 8 + int.from_bytes(content[:8], "little")
    entries = msgspec.json.decode(content[8:size])
    metadata = entries.pop("__metadata__")
    if _parsed_block(metadata) != block:
        return None
    arrays = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        dtype, raw = _TYPES[entry["dtype"]]
        values = mx.array(np.frombuffer(content[size + begin : size + end], raw).reshape(entry["shape"]))
        arrays[name] = values.view(dtype) if values.dtype != dtype else values
    return arrays


def _digest(parts: Sequence[bytes | memoryview]) -> bytes:
    """Return the hash of a file's bytes with its checksum field zeroed."""
    first, *rest = parts
    digest = sha256(first[: DIGEST.start])
    digest.update(b"0" * 64)
    digest.update(memoryview(first)[DIGEST.stop :])
    for part in rest:
        digest.update(part)
    return digest.hexdigest().encode()


def _write(block: CacheBlock, path: Path, header: bytes, buffers: Sequence[memoryview]) -> _Written:
    """Write one file, on the writer thread."""
    nbytes = len(header) + sum(buffer.nbytes for buffer in buffers)
    partial_path = path.with_suffix(f".{os.getpid()}{PARTIAL}")
    try:
        for folder in (path.parent.parent, path.parent):
            make_cache_folder(folder)
        if shutil.disk_usage(path.parent).free - nbytes < FREE_BYTES:
            return _Written(block, path, nbytes, "the disk is nearly full")
        parts: list[bytes | memoryview] = [header[: DIGEST.start], _digest([header, *buffers]), header[DIGEST.stop :]]
        with os.fdopen(open_regular_file(partial_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            for part in (*parts, *buffers):
                file.write(part)
        partial_path.replace(path)
    except (OSError, MemoryError) as error:
        with contextlib.suppress(OSError):
            partial_path.unlink()
        return _Written(block, path, nbytes, getattr(error, "strerror", None) or str(error))
    return _Written(block, path, nbytes)


def _block_of(path: Path) -> CacheBlock | None:
    """Return the block of a file; None unless its header is valid and agrees with its name."""
    try:
        with os.fdopen(open_regular_file(path), "rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES))
        block = _parsed_block(msgspec.json.decode(header)["__metadata__"])
    except (OSError, OverflowError, MemoryError, KeyError, TypeError, ValueError, msgspec.MsgspecError):
        return None
    return block if block is not None and path.name == f"{block.kind}-{block.key.hex()}{SUFFIX}" else None


def _parsed_block(metadata: Mapping[str, str]) -> CacheBlock | None:
    if metadata.get("format") != FORMAT:
        return None
    tokens = [int(token) for token in metadata["tokens"].split()]
    return CacheBlock.of(metadata["kind"], bytes.fromhex(metadata["parent"]), tokens)
