"""Chip, memory pressure and limits of a computer, from the kernel settings of macOS and the files of Linux."""

import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.machine import descriptors
from app.machine.host import (
    GIGABYTE,
    ceiling_from,
    chip_name,
    memory_pressure,
    reserve_bytes,
    sysctl,
    sysctl_number,
    wired_limit_mb,
)

GIBIBYTE = 1 << 30
NOWHERE = Path("/nowhere/at/all")


class Kernel:
    """Answers `sysctlbyname` as macOS does; refuses unknown names."""

    def __init__(self, **settings: bytes) -> None:
        self.settings = settings

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: Any, new_size: ctypes.c_size_t) -> int:
        assert (new, new_size.value) == (None, 0), "nothing is ever set"
        if (kept := self.settings.get(name.decode())) is None:
            return -1
        size._obj.value = len(kept)
        if value is not None:
            ctypes.memmove(value, kept, len(kept))
        return 0


def kernel_with(settings: Mapping[str, bytes]) -> Any:
    return lambda name: settings.get(name, b"")


def level(number: int) -> Any:
    return kernel_with({"kern.memorystatus_vm_pressure_level": number.to_bytes(4, sys.byteorder)})


def test_a_kernel_setting_is_read_in_its_own_length() -> None:
    kernel = Kernel(chip=b"Apple M4 Pro\0", files=(61440).to_bytes(4, sys.byteorder))
    assert sysctl("chip", kernel) == b"Apple M4 Pro\0"
    assert sysctl_number("files", lambda name: sysctl(name, kernel)) == 61440
    assert sysctl("unknown", kernel) == b""


def test_a_system_without_kernel_settings_has_none() -> None:
    assert sysctl("kern.maxfilesperproc", object()) == b""
    assert sys.platform == "darwin" or sysctl_number("kern.maxfilesperproc") == 0


def test_no_more_files_are_asked_for_than_the_kernel_of_a_mac_allows() -> None:
    files = kernel_with({"kern.maxfilesperproc": (300).to_bytes(4, sys.byteorder)})
    assert descriptors.attainable(files) == 300 < descriptors.attainable(kernel_with({}))


def test_the_chip_of_a_mac_has_its_makers_name() -> None:
    assert chip_name(kernel_with({"machdep.cpu.brand_string": b"Apple M3 Max\0"}), NOWHERE) == "Apple M3 Max"


def test_the_chip_of_a_linux_machine_is_named_by_its_cpu_information(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9454 \nflags\t\t: fpu\n\nmodel name\t: other\n"
    )
    assert chip_name(kernel_with({}), file) == "AMD EPYC 9454"


def test_a_chip_that_nobody_names_is_at_least_of_a_kind(tmp_path: Path) -> None:
    (tmp_path / "arm").write_text("processor\t: 0\nBogoMIPS\t: 48.00\nmodel name\t: \n")
    assert chip_name(kernel_with({}), tmp_path / "arm")
    assert chip_name(kernel_with({}), NOWHERE)


@pytest.mark.parametrize(("number", "pressure"), [(1, "normal"), (2, "warning"), (4, "critical")])
def test_a_mac_tells_its_pressure_by_a_level(number: int, pressure: str) -> None:
    assert memory_pressure(level(number), NOWHERE) == pressure


@pytest.mark.parametrize(
    ("percent", "pressure"),
    [("0.00", "normal"), ("19.99", "normal"), ("20.00", "warning"), ("59.9", "warning"), ("60.00", "critical")],
)
def test_linux_tells_how_long_something_waits_for_memory(tmp_path: Path, percent: str, pressure: str) -> None:
    stalls = tmp_path / "memory"
    stalls.write_text(
        f"some avg10={percent} avg60=99.00 avg300=99.00 total=1\nfull avg10=99.00 avg60=0 avg300=0 total=1\n"
    )
    assert memory_pressure(kernel_with({}), stalls) == pressure


def test_where_nobody_tells_of_pressure_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "odd").write_text("nothing of this kind\n")
    assert memory_pressure(kernel_with({}), tmp_path / "odd") == memory_pressure(kernel_with({}), NOWHERE) == "normal"
    assert memory_pressure(kernel_with({}), tmp_path) == "normal", "a folder is no file"


@pytest.mark.parametrize(
    ("total", "recommended", "needs", "limit"),
    [
        (64 * GIBIBYTE, 48 * GIBIBYTE, [50 * GIGABYTE], 57_906),  # ceiling 46.4 GB now, 54.6 GB raised
        (64 * GIBIBYTE, 48 * GIBIBYTE, [40 * GIGABYTE], 0),  # fits as it is
        (64 * GIBIBYTE, 48 * GIBIBYTE, [60 * GIGABYTE], 0),  # would not fit after a raise either
        (64 * GIBIBYTE, 48 * GIBIBYTE, [60 * GIGABYTE, 50 * GIGABYTE], 57_906),
        (64 * GIBIBYTE, 57_906 << 20, [50 * GIGABYTE], 0),  # the limit is raised already
        (8 * GIBIBYTE, 5 * GIBIBYTE, [int(4.8 * GIGABYTE)], 0),  # the reserve leaves no room for a raise
        (64 * GIBIBYTE, 48 * GIBIBYTE, [], 0),
    ],
)
def test_the_share_of_the_gpu_is_raised_for_models_that_fit_then_and_not_now(
    total: int, recommended: int, needs: list[int], limit: int
) -> None:
    assert wired_limit_mb(total, recommended, needs) == limit


@given(total=st.integers(1, 10**13), recommended=st.integers(1, 10**13), needed=st.integers(0, 10**13))
def test_a_raised_share_leaves_the_system_its_reserve_and_helps(total: int, recommended: int, needed: int) -> None:
    limit = wired_limit_mb(total, recommended, [needed]) << 20
    assert not limit or (limit <= total - reserve_bytes(total) and recommended < limit)
    assert not limit or ceiling_from(total, recommended) < needed <= ceiling_from(total, limit)
