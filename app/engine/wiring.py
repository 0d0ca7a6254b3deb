"""Wires the weights of the models in memory and nothing else: weights that are not wired may page at a tenth of the
speed, wiring all is behind macOS kernel panics.

mlx wires an allocation only while all that is wired stays within the limit. A limit equal to the weights, set right
after a load, holds static buffers; what rows hold at that moment may take the place of some. It is lowered before
weights are freed, else whatever comes next would be wired in their place.
Source: shared reference, metal §1.2.
"""

import platform
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import psutil

OLDEST_MACOS = 15
UNWIRED_BYTES, UNWIRED_SHARE = 8 * 10**9, 0.35
"""So much of the memory, and this share of it, is never wired."""


class WiringDevice(Protocol):
    """What mlx's allocator is asked for."""

    def settle(self) -> None:
        """End all computations under way and give freed buffers back."""

    def set_limit(self, size: int) -> None:
        """Wire at most so many bytes; only of a settled device."""


class MetalDevice:
    """The real one."""

    def settle(self) -> None:
        """Part of WiringDevice."""
        mx.synchronize()
        mx.clear_cache()

    def set_limit(self, size: int) -> None:
        """Part of WiringDevice."""
        mx.set_wired_limit(size)


@dataclass(frozen=True, slots=True)
class WirableMemory:
    """Bytes of RAM, and those that the GPU may hold resident: 0 where nothing can be wired."""

    total_bytes: int = 0
    recommended_bytes: int = 0

    def limit(self, weights_bytes: int) -> int:
        """What to wire of so many bytes of weights: nothing when the rest of the machine would be left too little."""
        wired = min(weights_bytes, self.recommended_bytes)
        left = max(UNWIRED_BYTES, int(self.total_bytes * UNWIRED_SHARE))
        return wired if self.total_bytes - wired >= left else 0


def wirable_memory() -> WirableMemory:
    """Of this machine."""
    if not mx.metal.is_available():
        return WirableMemory()
    recommended = int(mx.device_info().get("max_recommended_working_set_size", 0))
    return wirable_from(platform.mac_ver()[0], psutil.virtual_memory().total, recommended)


def wirable_from(macos_version: str, total_bytes: int, recommended_bytes: int) -> WirableMemory:
    """Of a Mac; Metal keeps nothing resident below macOS 15."""
    version = macos_version.partition(".")[0]
    new_enough = version.isdigit() and int(version) >= OLDEST_MACOS
    return WirableMemory(total_bytes, recommended_bytes) if new_enough else WirableMemory()


class Wiring:
    """Follows what is in memory. All calls come from the MLX thread; without `memory` nothing is ever wired."""

    def __init__(self, memory: WirableMemory | None = None, device: WiringDevice | None = None) -> None:
        self._memory = memory or WirableMemory()
        self._device = device or MetalDevice()
        self._limit = 0

    def hold(self, weights_bytes: int) -> None:
        """So many bytes of weights are in memory, and no others are about to leave it."""
        self._set(self._memory.limit(weights_bytes))

    def loosen(self) -> None:
        """Weights are about to be freed: wire nothing until `hold`."""
        self._set(0)

    def _set(self, limit: int) -> None:
        if limit != self._limit:
            self._device.settle()
            self._device.set_limit(limit)
            self._limit = limit
