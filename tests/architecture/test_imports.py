"""Imports have no cycles, and a start loads little; import-linter (`make check`) checks the layers."""

import subprocess
import sys
from graphlib import TopologicalSorter

import grimp

from tests.architecture.source import ROOT

CONCEPT_LINES = 60
"""Number of lines below which a file that only one other file imports belongs in that file."""


def test_there_is_no_import_cycle() -> None:
    graph = grimp.build_graph("app", exclude_type_checking_imports=True, cache_dir=None)
    direct = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(direct).prepare()


def test_a_small_file_serves_more_than_one() -> None:
    graph = grimp.build_graph("app", "bench", exclude_type_checking_imports=True, cache_dir=None)
    alone = {}
    for module in graph.modules:
        path = ROOT / f"{module.replace('.', '/')}.py"  # a package has no such file
        importers = graph.find_modules_that_directly_import(module)
        if path.is_file() and len(importers) == 1 and len(path.read_text("utf-8").splitlines()) < CONCEPT_LINES:
            alone[module] = importers
    assert alone == {}


def test_the_command_line_starts_light() -> None:
    """Without these modules `paceline --help` takes less than half a second."""
    code = "import sys, app.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "mlx",
        "mlx_lm",
        "transformers",
        "numpy",
        "pydantic",
        "fastapi",
        "httpx2",
        "huggingface_hub",
        "psutil",
        "rich",
    }
    assert heavy & set(loaded) == set()
