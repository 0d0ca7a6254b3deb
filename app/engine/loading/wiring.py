"""Keeps loaded weights wired, so that macOS does not page them out.

Unwired weights may be paged, at a tenth of the speed; wiring all memory has caused macOS kernel panics. mlx wires
allocations in no particular order while their total is within a limit. So whenever the set of models changes, the limit
is set to all that is allocated then; if that is too much to wire, cached prompts are dropped first. The limit is
lowered before weights are freed: otherwise, later allocations would be wired in their place.
Source: `ResidencySet` in mlx (mlx/backend/metal/resident.cpp).
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import psutil

OLDEST_MACOS = 15
UNWIRED_BYTES, UNWIRED_SHARE = 8 * 10**9, 0.35
"""Minimum memory left unwired: the larger of bytes and a share of the total."""


def set_wired_limit(size_bytes: int) -> None:
    """Let mlx wire at most `size_bytes`, after waiting for running computations and returning freed buffers."""
    mx.synchronize()
    mx.clear_cache()
    mx.set_wired_limit(size_bytes)


@dataclass(frozen=True, slots=True)
class WirableMemory:
    """Bytes of RAM, and bytes that the GPU may keep resident: 0 where nothing can be wired."""

    total_bytes: int = 0
    recommended_bytes: int = 0

    def limit(self, size_bytes: int) -> int:
        """Return how many of `size_bytes` to wire, so that enough memory is left unwired."""
        left = max(UNWIRED_BYTES, int(self.total_bytes * UNWIRED_SHARE))
        return max(0, min(size_bytes, self.recommended_bytes, self.total_bytes - left))


def wirable_memory() -> WirableMemory:
    """Return the wirable memory of this machine."""
    if not mx.metal.is_available():
        return WirableMemory()
    recommended = int(mx.device_info().get("max_recommended_working_set_size", 0))
    return wirable_from(platform.mac_ver()[0], psutil.virtual_memory().total, recommended)


def wirable_from(macos_version: str, total_bytes: int, recommended_bytes: int) -> WirableMemory:
    """Return the wirable memory of a Mac; Metal keeps nothing resident before macOS 15."""
    version = macos_version.partition(".")[0]
    new_enough = version.isdigit() and int(version) >= OLDEST_MACOS
    return WirableMemory(total_bytes, recommended_bytes) if new_enough else WirableMemory()


class Wiring:
    """Keeps the weights in memory wired. Called from the MLX thread; wires nothing without `memory`."""

    def __init__(
        self,
        memory: WirableMemory | None = None,
        set_limit: Callable[[int], None] = set_wired_limit,
        active_bytes: Callable[[], int] = mx.get_active_memory,
    ) -> None:
        self._memory = memory or WirableMemory()
        self._set_wired_limit = set_limit
        self._active_bytes = active_bytes
        self._weights_bytes = self._limit = 0

    def wire(self, weights_bytes: int, drop_prefix_caches: Callable[[], None]) -> None:
        """Wire the loaded weights, `weights_bytes` in all. Do not call it while some of them are about to be freed."""
        if weights_bytes == self._weights_bytes or not self._memory.recommended_bytes:
            return
        self._weights_bytes = weights_bytes
        if weights_bytes and self._memory.limit(self._active_bytes()) < self._active_bytes():
            drop_prefix_caches()
        self._set_limit(self._memory.limit(max(weights_bytes, self._active_bytes())) if weights_bytes else 0)

    def unwire(self) -> None:
        """Wire nothing until `wire`, because weights are about to be freed."""
        self._weights_bytes = 0
        self._set_limit(0)

    def _set_limit(self, limit: int) -> None:
        if limit != self._limit:
            self._set_wired_limit(limit)
            self._limit = limit
