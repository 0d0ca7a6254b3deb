"""Setup before mlx is imported, library versions, and a check that only one file wires memory."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import app.engine.loading.pool
from app.engine.platform import prepare, versions

WIRING = {"set_wired_limit", "maybe_set_recommended_wired_limit", "wired_limit"}

ORDER_PROBE = """
import sys
from app.engine.platform import prepare
done = prepare(system="linux", environment={"PACELINE_OPENBLAS": "0"})
assert "mlx.core" not in sys.modules and "mlx_lm" not in sys.modules, "platform imported mlx"
assert not done.openblas and "PACELINE_OPENBLAS=0" in done.reason, done
import mlx.core
late = prepare(system="linux", environment={})
assert not late.openblas and "imported before" in late.reason, late
print("ok")
"""
OPENBLAS_PROBE = """
from app.engine.platform import prepare
own = {"OPENBLAS_THREAD_TIMEOUT": "4"}
done = prepare(environment=own)
assert own == {"OPENBLAS_THREAD_TIMEOUT": "4"}, "what the user set stays"
assert done.openblas or "not installed" in done.reason or "not needed" in done.reason, done
import mlx.core as mx
ones = mx.ones((64, 64))
assert (ones @ ones)[0, 0].item() == 64.0
print("ok")
"""


@pytest.mark.parametrize("probe", [ORDER_PROBE, OPENBLAS_PROBE])
def test_a_fresh_process_is_prepared_before_mlx(probe: str) -> None:
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout.strip(), run.returncode) == ("ok", 0), run.stderr


def test_nothing_we_import_wires_memory_at_import() -> None:
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in {"app", "mlx_lm"}}
    assert {"app.engine.loading.pool", "mlx_lm.utils", "mlx_lm.generate"} <= modules.keys()
    sources = [Path(module.__file__) for module in modules.values() if module.__file__]
    assert [path for path in sources if WIRING & set(calls_at_import(path))] == []


def test_only_the_file_that_wires_weights_uses_what_wires() -> None:
    """mlx-lm's generators wire when they run, so the engine never imports them."""
    for path in Path(app.engine.loading.pool.__file__).parents[1].rglob("*.py"):
        wiring = WIRING - {"set_wired_limit"} if path.name == "wiring.py" else WIRING
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in {"mlx_lm", "mlx_lm.generate", "mlx_lm.server"}, path
            if isinstance(node, ast.Attribute | ast.Name):
                assert (node.attr if isinstance(node, ast.Attribute) else node.id) not in wiring, path


def calls_at_import(path: Path) -> Iterator[str]:
    """Yield the name of everything that is called when the module is imported, function bodies excluded."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting.extend(node.decorator_list)
        elif not isinstance(node, ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize(
    ("system", "environment", "library", "reason"),
    [
        ("darwin", {}, "libopenblas.so.0", "no OpenBLAS needed on darwin"),
        ("linux", {"PACELINE_OPENBLAS": "0"}, "libopenblas.so.0", "turned off by PACELINE_OPENBLAS=0"),
    ],
)
def test_prepare_says_why_not(system: str, environment: dict[str, str], library: str, reason: str) -> None:
    done = prepare(system=system, environment=environment, library=library, chip="Apple M4")
    assert not done.openblas
    assert done.reason == reason


@pytest.mark.parametrize(
    ("chip", "operations", "megabytes"),
    [
        ("Apple M4", None, None),
        ("Apple M1 Pro", None, None),
        ("Apple M1 Max", "500", "100"),
        ("Apple M3 Ultra", "1000", "400"),
    ],
)
def test_large_chips_commit_larger_command_buffers(chip: str, operations: str | None, megabytes: str | None) -> None:
    environment: dict[str, str] = {}
    done = prepare(system="darwin", environment=environment, chip=chip)
    assert environment.get("MLX_MAX_OPS_PER_BUFFER") == operations
    assert environment.get("MLX_MAX_MB_PER_BUFFER") == megabytes
    assert ("MLX_MAX_MB_PER_BUFFER" in done.reason) == (megabytes is not None)


def test_a_limit_that_the_user_set_stays_and_is_told() -> None:
    environment = {"MLX_MAX_MB_PER_BUFFER": "50"}
    done = prepare(system="darwin", environment=environment, chip="Apple M3 Ultra")
    assert environment == {"MLX_MAX_MB_PER_BUFFER": "50", "MLX_MAX_OPS_PER_BUFFER": "1000"}
    assert "MLX_MAX_MB_PER_BUFFER=50" in done.reason


def test_a_missing_library_is_told_not_raised() -> None:
    code = (
        "from app.engine.platform import prepare; d = prepare(system='linux', environment={}, library='libnone.so.9');"
        "assert not d.openblas and 'libnone.so.9 is not installed' in d.reason, d"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_versions_name_what_computes() -> None:
    assert {"python", "mlx", "mlx-lm"} <= versions().keys()
