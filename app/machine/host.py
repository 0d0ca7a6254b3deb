"""Facts about this computer from the operating system: chip, memory pressure, memory for models, free disk space."""

import ctypes
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from app.core.messages import Pressure
from app.core.patience import patient
from app.machine.own_files import nearest_folder

ReadSetting = Callable[[str], bytes]
"""Function that reads a kernel setting by name; empty where there is none."""

CPU_INFORMATION = Path("/proc/cpuinfo")
MEMORY_STALLS = Path("/proc/pressure/memory")
WARNING_STALL_PERCENT, CRITICAL_STALL_PERCENT = 20.0, 60.0
"""Percent of the last ten seconds in which a task waited for memory; from 60 on, systemd-oomd kills programs."""
_STALLED = re.compile(r"^some avg10=([\d.]+)", re.MULTILINE)
_MODEL_NAME = re.compile(r"^model name\s*:\s*(\S.*?)\s*$", re.MULTILINE)

GIGABYTE = 10**9
MEBIBYTE = 1 << 20
WORKING_SET_SHARE = 0.9


def sysctl(name: str, library: Any = None) -> bytes:
    """Read a setting of the macOS kernel, as raw bytes; empty for an unknown name, and on other systems."""
    read = getattr(library or ctypes.CDLL(None), "sysctlbyname", None)
    size, nothing = ctypes.c_size_t(), ctypes.c_size_t(0)
    if read is None or read(name.encode(), None, ctypes.byref(size), None, nothing):
        return b""
    value = ctypes.create_string_buffer(size.value)
    failed = read(name.encode(), value, ctypes.byref(size), None, nothing)
    return b"" if failed else value.raw[: size.value]


def sysctl_number(name: str, read: ReadSetting = sysctl) -> int:
    """Read a kernel setting that is a number; 0 where there is none."""
    return int.from_bytes(read(name), sys.byteorder)


def chip_name(read: ReadSetting = sysctl, cpu_information: Path = CPU_INFORMATION) -> str:
    """Return the chip as its maker calls it ("Apple M3 Max"), else what Python knows."""
    name = read("machdep.cpu.brand_string").rstrip(b"\0").decode("utf-8", "replace")
    return name or _first(_MODEL_NAME, cpu_information) or platform.processor() or platform.machine()


def memory_pressure(read: ReadSetting = sysctl, stalls: Path = MEMORY_STALLS) -> Pressure:
    """Return the memory pressure: by the kernel's level on macOS, by the share of time spent waiting on Linux.

    Never blocks, never raises; `normal` where it is unknown.
    """
    if level := sysctl_number("kern.memorystatus_vm_pressure_level", read):
        return "critical" if level >= 4 else "warning" if level >= 2 else "normal"
    stalled_percent = float(_first(_STALLED, stalls) or 0)
    if stalled_percent >= WARNING_STALL_PERCENT:
        return "critical" if stalled_percent >= CRITICAL_STALL_PERCENT else "warning"
    return "normal"


def _first(pattern: re.Pattern[str], path: Path) -> str:
    """Return the group of the pattern's first match in a file; empty for none, and where the file cannot be read."""
    try:
        match = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""


# --- memory for models --------------------------------------------------------------------------------------------


def reserve_bytes(total_bytes: int) -> int:
    """Return the bytes reserved for the system: 4 GB, or 8 GB with at least 16 GB of RAM."""
    return 4 * GIGABYTE if total_bytes < 16 * GIGABYTE else 8 * GIGABYTE


def ceiling_from(total_bytes: int, recommended_bytes: int | None) -> int:
    """Return the maximum bytes for models: RAM minus the reserve, but at least half of RAM.

    With a GPU, it is at most `WORKING_SET_SHARE` of the working set that Metal recommends.
    """
    ceiling = max(total_bytes - reserve_bytes(total_bytes), total_bytes // 2)
    if recommended_bytes:
        ceiling = min(ceiling, int(recommended_bytes * WORKING_SET_SHARE))
    return ceiling


def wired_limit_mb(total_bytes: int, recommended_bytes: int, needs_bytes: Iterable[int]) -> int:
    """Return the `iogpu.wired_limit_mb` (MiB) that makes a model fit which does not fit now; 0 if there is none."""
    limit = max(total_bytes - reserve_bytes(total_bytes), 0) // MEBIBYTE
    now, then = ceiling_from(total_bytes, recommended_bytes), ceiling_from(total_bytes, limit * MEBIBYTE)
    return limit if any(now < needed <= then for needed in needs_bytes) else 0


@patient(otherwise=None)
def free_bytes(path: Path) -> int | None:
    """Return the free bytes on the disk of `path`, which may not exist yet; None where it cannot be read."""
    try:
        return shutil.disk_usage(nearest_folder(path)).free
    except OSError:
        return None
