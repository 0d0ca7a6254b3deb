"""Setup that must precede the import of mlx and mlx-lm, and library versions. This module imports neither.

On Linux the published mlx wheel links a reference BLAS; loading OpenBLAS with its symbols made global *before* libmlx
is loaded makes float32 matmuls some 30 times faster (measured). `PACELINE_OPENBLAS=0` turns it off.

On macOS mlx commits a Metal command buffer after 40 operations or 40 MB (50 and 50 MB on Max and Ultra), which suits
small models. A large GPU waits at each commit, so `prepare` raises the limits there (docs/speed.md).
"""

import ctypes
import importlib.util
import os
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from platform import python_version
from types import ModuleType

from app.machine.host import chip_name

OPENBLAS_LIBRARY = "libopenblas.so.0"
OPENBLAS_VARIABLE = "PACELINE_OPENBLAS"
OPENBLAS_PATIENCE = ("OPENBLAS_THREAD_TIMEOUT", "18")
"""Variable and value that let OpenBLAS threads spin 2^18 cycles (0.1 ms) for the next product before they sleep, not
2^26 (30 ms): the server, its clients and the thread that builds the next forward need those cores (docs/speed.md)."""
COMMAND_LIMITS = {
    "Max": {"MLX_MAX_OPS_PER_BUFFER": "500", "MLX_MAX_MB_PER_BUFFER": "100"},
    "Ultra": {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "400"},
}
"""Environment variables, by the last word of a chip's name, that limit the operations of a command buffer and the
megabytes of its distinct inputs. Other chips keep mlx's limits: larger command buffers hold more temporary memory and
block the display longer."""
TOKENIZER_MODULE = "mlx_lm.tokenizer_utils"
REPORTED_DISTRIBUTIONS = ("paceline", "mlx", "mlx-lm")


@dataclass(frozen=True, slots=True)
class Preparation:
    """Result of `prepare`: whether OpenBLAS serves the CPU matmuls, why or why not, and on a Mac the limits set."""

    openblas: bool
    reason: str


def prepare(
    *,
    system: str = sys.platform,
    environment: MutableMapping[str, str] = os.environ,
    library: str = OPENBLAS_LIBRARY,
    chip: str | None = None,
) -> Preparation:
    """Load OpenBLAS for mlx where that helps, and raise the limits of a large GPU's command buffers, unless the user
    has set them. Call it first thing in the worker; it never raises. `chip` is this machine's by default."""
    if not system.startswith("linux"):
        limits = COMMAND_LIMITS.get((chip or chip_name()).rpartition(" ")[2], {})
        chosen = [f"{name}={environment.setdefault(name, value)}" for name, value in limits.items()]
        return Preparation(openblas=False, reason=", ".join([f"no OpenBLAS needed on {system}", *chosen]))
    if environment.get(OPENBLAS_VARIABLE, "1") == "0":
        return Preparation(openblas=False, reason=f"turned off by {OPENBLAS_VARIABLE}=0")
    if "mlx.core" in sys.modules:
        return Preparation(openblas=False, reason="mlx was imported before prepare() was called")
    environment.setdefault(*OPENBLAS_PATIENCE)
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return Preparation(openblas=False, reason=f"{library} is not installed: float32 matmuls are slow")
    return Preparation(openblas=True, reason=f"{library} serves the CPU matmuls")


def versions() -> dict[str, str]:
    """Return versions of Python and the packages that compute, by distribution name; missing ones are left out."""
    known = {"python": python_version()}
    for name in REPORTED_DISTRIBUTIONS:
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return known


def bare_mlx_lm(*, tokenizers: bool) -> None:
    """Let `import mlx_lm.…` find its modules without running its `__init__`, which imports mlx, tokenizers and
    transformers and takes half of a worker's start. Call it before anything imports mlx-lm.

    Without `tokenizers`, mlx-lm's tokenizer module is a stub: the names that mlx-lm imports from it are `object`. With
    them, transformers reads the names in thousands of its files once instead of twice, and faster: half of the start.
    """
    _add_package("mlx_lm", _folders("mlx_lm"))
    if tokenizers:
        _add_package("transformers.models", [f"{folder}/models" for folder in _folders("transformers")])
        sys.meta_path.insert(0, _NameFinder())
    else:
        module = ModuleType(TOKENIZER_MODULE)
        module.TokenizerWrapper = module.load = object  # type: ignore[attr-defined]
        sys.modules[TOKENIZER_MODULE] = module


class _NameFinder:
    """Finder of the module with which transformers searches a file for `__all__`: it gets the lines from there only."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_patch(module: ModuleType) -> None:
                run(module)
                if names_in := getattr(module, "fetch__all__", None):
                    vars(module)["fetch__all__"] = lambda text: names_in(text[text.rfind("\n__all__") + 1 :])

            spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def _folders(package: str) -> list[str]:
    return list(importlib.util.find_spec(package).submodule_search_locations or ())  # type: ignore[union-attr]


def _add_package(name: str, folders: list[str]) -> None:
    package = ModuleType(name)
    package.__path__ = folders
    sys.modules[name] = package
