"""Budgets are smoke alarms: when one goes off, split the code by meaning."""

import ast
from collections import Counter

from tests.architecture.source import ROOT, functions, modules, words

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 40
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "manager", "managers", "misc", "common"}
GOVERNOR = [f"app/scheduler/{name}.py" for name in ("governor", "costs", "estimates")]
MAX_GOVERNOR_CONSTANTS = 20
DECISIONS = {"PLAIN", "OFF"}
"""Constants that name a choice, and are no numbers to tune."""
MAY_IMPORT_LATE = {"app/cli.py", "app/cli_frame.py", "app/cli_system.py", "app/store/database.py"}
"""Files that may import inside functions: `--help` starts fast that way, and only a migration imports alembic."""


def test_files_fit_their_budget() -> None:
    lengths = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in modules()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_fit_their_budget() -> None:
    lengths = {
        f"{name}:{function.lineno} {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for name, tree in modules().items()
        for function in functions(tree)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_the_governor_has_few_numbers_to_tune() -> None:
    constants = [
        (name, node.id)
        for name in GOVERNOR
        for statement in modules()[name].body
        if isinstance(statement, ast.Assign)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
        and node.id.isupper()
        and node.id not in DECISIONS
    ]
    assert len(constants) <= MAX_GOVERNOR_CONSTANTS, constants


def test_names_say_what_things_are() -> None:
    named = {name: {part for step in name.removesuffix(".py").split("/") for part in words(step)} for name in modules()}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                named[f"{name}:{node.lineno}"] = words(node.name)
    assert {place: parts & VAGUE_WORDS for place, parts in named.items() if parts & VAGUE_WORDS} == {}


def test_no_two_classes_share_a_name() -> None:
    named = [node.name for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(named).items() if count > 1] == []


def test_only_what_begins_at_once_imports_late() -> None:
    late = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        if name not in MAY_IMPORT_LATE
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert late == []


def test_every_file_begins_with_its_contract() -> None:
    assert [name for name, tree in modules().items() if tree.body and not ast.get_docstring(tree)] == []
