"""How much memory a model needs, how much there is, and what mlx holds now. All sizes in bytes.

Admission is ours (`mx.set_memory_limit` is no cap): this file counts, and bounds what mlx keeps of freed buffers. What
an estimate is made of is in `app/core/footprint.py`, what is wired in `app/engine/wiring.py`.
"""

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx
import psutil

from app.core.errors import InsufficientMemory, InvalidRequest
from app.core.footprint import Footprint, unit_footprint
from app.core.host import GIGABYTE, ceiling_from
from app.core.messages import ModelSpecification
from app.core.setting_texts import parse_size

LIMIT_VARIABLE = "PACELINE_MEMORY_LIMIT"
BUFFER_CACHE_BYTES, BUFFER_CACHE_SHARE = 4 * GIGABYTE, 0.05
"""The most that freed buffers may take, and their share of RAM; mlx would keep as much as there is."""


# --- what there is --------------------------------------------------------------------------------------------


def ceiling_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """The ceiling of this machine, or what `PACELINE_MEMORY_LIMIT` says. Raises InvalidRequest when that is no size."""
    if override := environment.get(LIMIT_VARIABLE):
        try:
            return parse_size(override)
        except ValueError as error:
            raise InvalidRequest(str(error), parameter=LIMIT_VARIABLE) from error
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return ceiling_from(psutil.virtual_memory().total, int(recommended) if recommended else None)


def device_name() -> str:
    """The device that computes, for people: for example "Apple M3 Max (gpu)"."""
    kind = "cpu" if on_cpu() else "gpu"
    return f"{mx.device_info().get('device_name', 'unknown')} ({kind})"


def gpu_architecture() -> str:
    """What mlx calls the GPU that computes ("applegpu_g16s"); empty on a CPU."""
    return "" if on_cpu() else str(mx.device_info().get("architecture", ""))


def on_cpu() -> bool:
    """Half precision is slow there, so weights become float32; on Metal and CUDA the checkpoint's dtype stays."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


# --- what mlx holds -------------------------------------------------------------------------------------------


def readings() -> tuple[int, int, int]:
    """Bytes in live arrays, in freed buffers that mlx keeps for reuse, and the most that were ever in live arrays."""
    return mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory()


def buffer_cache_from(total_bytes: int) -> int:
    """How many bytes of freed buffers mlx may keep for reuse on a machine with so much RAM."""
    return min(BUFFER_CACHE_BYTES, int(total_bytes * BUFFER_CACHE_SHARE))


def bound_buffer_cache() -> None:
    """Let mlx keep no more freed buffers than suits this machine."""
    mx.set_cache_limit(buffer_cache_from(psutil.virtual_memory().total))


def trim() -> None:
    """Give freed buffers back to the system."""
    mx.clear_cache()


def release() -> None:
    """The same once cycles that hold arrays are collected: not while somebody waits for a step."""
    gc.collect()
    trim()


_EXHAUSTED = re.compile(
    r"unable to allocate|attempting to allocate|insufficient memory|out ?of ?memory|bad_alloc|MemoryAllocation"
    r"|resource limit .* exceeded",
    re.IGNORECASE,
)
"""What Metal, CUDA and the CPU say when an allocation, or a command buffer for want of one, fails."""


def is_exhausted(error: BaseException) -> bool:
    """Whether an exception of mlx says that the device has no memory left. mlx has no class of its own for it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_EXHAUSTED.search(str(error))))


@contextmanager
def all_or_nothing(drop: Callable[[], None]) -> Iterator[None]:
    """Whatever goes wrong in it, `drop` lets go of what was computed. A device without memory is InsufficientMemory."""
    try:
        yield
    except BaseException as error:
        drop()
        if not is_exhausted(error):
            raise
        error.__traceback__ = None  # its frames hold arrays
        raise InsufficientMemory(f"the device has no memory left: {error}") from None


# --- what a model needs ---------------------------------------------------------------------------------------


def footprint(spec: ModelSpecification) -> Footprint:
    """What the unit of `spec` takes on this device; reads headers and configs only, some milliseconds.

    Raises ModelUnavailable for a broken folder.
    """
    return unit_footprint(spec, widen=on_cpu())
