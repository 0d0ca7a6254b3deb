"""Where and with what something was measured: the facts without which a number means nothing."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

DISTRIBUTIONS = ("paceline", "mlx", "mlx-lm", "numpy", "transformers")


def describe_machine() -> dict[str, Any]:
    """System, processor, memory and load."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "processor": _processor_name(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
    }


def _processor_name() -> str:
    """The chip by name where Linux tells it, else what Python knows."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            named = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        named = ""
    return named.partition(":")[2].strip() or platform.processor() or platform.machine()


def describe_versions() -> dict[str, str]:
    """Installed versions of everything that is compared."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
