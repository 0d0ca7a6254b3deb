"""Memory that a model needs, that the machine has, and that mlx holds now. All sizes are in bytes.

Paceline itself decides what fits, as `mx.set_memory_limit` is no cap. This module bounds mlx's cache of freed buffers.
Estimates are made in `app/models/footprint.py`, wiring is in `app/engine/loading/wiring.py`.
"""

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx
import psutil

from app.core.errors import InsufficientMemory, InvalidRequest
from app.core.setting_texts import parse_size
from app.core.unit import ModelSpecification
from app.machine.host import GIGABYTE, ceiling_from
from app.models.footprint import Footprint, unit_footprint

LIMIT_VARIABLE = "PACELINE_MEMORY_LIMIT"
BUFFER_CACHE_BYTES, BUFFER_CACHE_SHARE = 4 * GIGABYTE, 0.05
"""Limit on freed buffers that mlx keeps: the smaller of bytes and a share of RAM. By default mlx keeps all that fit."""


# --- capacity -------------------------------------------------------------------------------------------------


def ceiling_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the memory ceiling: `PACELINE_MEMORY_LIMIT`, else the machine's. Raises InvalidRequest for a bad size."""
    if override := environment.get(LIMIT_VARIABLE):
        try:
            return parse_size(override)
        except ValueError as error:
            raise InvalidRequest(str(error), parameter=LIMIT_VARIABLE) from error
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return ceiling_from(psutil.virtual_memory().total, int(recommended) if recommended else None)


def buffer_share_bytes() -> int:
    """Return the bytes of the ceiling for each of the buffers that Metal allows at most; 0 on other devices."""
    limit = mx.device_info().get("resource_limit")
    return ceiling_bytes() // int(limit) if limit else 0


def device_name() -> str:
    """Return a readable name of the compute device, for example "Apple M3 Max (gpu)"."""
    kind = "cpu" if on_cpu() else "gpu"
    return f"{mx.device_info().get('device_name', 'unknown')} ({kind})"


def gpu_architecture() -> str:
    """Return mlx's name of the GPU that computes ("applegpu_g16s"); empty on a CPU."""
    return "" if on_cpu() else str(mx.device_info().get("architecture", ""))


def on_cpu() -> bool:
    """Return whether mlx runs on a CPU: half precision is slow there, so weights become float32."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


# --- usage ----------------------------------------------------------------------------------------------------


def usage() -> tuple[int, int, int]:
    """Return bytes in live arrays, in freed buffers that mlx keeps for reuse, and the peak of live arrays."""
    return mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory()


def buffer_cache_from(total_bytes: int) -> int:
    """Return the bytes of freed buffers that mlx may keep for reuse on a machine with `total_bytes` of RAM."""
    return min(BUFFER_CACHE_BYTES, int(total_bytes * BUFFER_CACHE_SHARE))


def bound_buffer_cache() -> None:
    """Limit the freed buffers that mlx keeps to what suits this machine."""
    mx.set_cache_limit(buffer_cache_from(psutil.virtual_memory().total))


def trim() -> None:
    """Return freed buffers to the system."""
    mx.clear_cache()


def release() -> None:
    """Collect reference cycles that hold arrays, then trim. This is too slow to call between steps."""
    gc.collect()
    trim()


_EXHAUSTED = re.compile(
    r"unable to allocate|attempting to allocate|insufficient memory|out ?of ?memory|bad_alloc|MemoryAllocation"
    r"|resource limit .* exceeded",
    re.IGNORECASE,
)
"""Messages of Metal, CUDA and the CPU when an allocation fails, or a command buffer fails for lack of memory."""


def is_exhausted(error: BaseException) -> bool:
    """Return whether an mlx exception means that the device is out of memory. mlx has no exception class for it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_EXHAUSTED.search(str(error))))


@contextmanager
def all_or_nothing(drop: Callable[[], None]) -> Iterator[None]:
    """Call `drop` on any error, to free what was computed. Raises InsufficientMemory if the device is out of memory."""
    try:
        yield
    except BaseException as error:
        drop()
        if not is_exhausted(error):
            raise
        error.__traceback__ = None  # its frames hold arrays
        raise InsufficientMemory(f"the device has no memory left: {error}") from None


# --- estimates ------------------------------------------------------------------------------------------------


def footprint(spec: ModelSpecification) -> Footprint:
    """Estimate the memory of the unit of `spec` on this device, from headers and configs, in some milliseconds.

    Raises ModelUnavailable for a broken folder.
    """
    return unit_footprint(spec, widen=on_cpu())
