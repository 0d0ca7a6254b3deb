"""The drawings of `ARCHITECTURE.md` name only what the app defines.

In a drawing a word that begins with a capital and has a small letter is a class, `Class.name` a method or attribute
that this class defines, and `name()` a function; anything else is prose. A line that ends with a file of the app begins
with a name that this file defines.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.architecture.source import ROOT, functions, modules

DRAWINGS = ("The life of a request", "The life of a model", "The way of a token back")
LEAST_NAMES = 8
MOST_COLUMNS = 100
NAME = re.compile(r"\b(?:[A-Z]\w*[a-z]\w*(?:\.\w+)?|[a-z_]\w*\(\))")
FILE = re.compile(r"(?<=\s)[\w/]+\.py$")


def drawing(title: str) -> list[str]:
    """Return the lines of the first code block below a heading."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return section.partition("\n```\n")[2].partition("\n```\n")[0].splitlines()


@cache
def definitions() -> dict[str, set[str]]:
    """Return every class, `Class.name` and `name()` of the app, with the files that define it."""
    files: dict[str, set[str]] = {}
    for file, tree in modules().items():
        for function in functions(tree):
            files.setdefault(f"{function.name}()", set()).add(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for name in (node.name, *(f"{node.name}.{member}" for member in members(node))):
                    files.setdefault(name, set()).add(file)
    return files


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the methods of a class, its fields, and the attributes that its methods set."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr


def mistakes(lines: list[str]) -> list[str]:
    """Return the names that are not defined, and the lines that do not begin with a name of their file."""
    problems = []
    for line in lines:
        names = NAME.findall(line)
        problems += [name for name in names if name not in definitions()]
        if (file := FILE.search(line)) and f"app/{file.group()}" not in definitions().get((names or [""])[0], ()):
            problems.append(line.strip())
    return problems


@pytest.mark.parametrize("title", DRAWINGS)
def test_a_drawing_names_only_what_exists(title: str) -> None:
    assert mistakes(drawing(title)) == []


@pytest.mark.parametrize("title", DRAWINGS)
def test_a_drawing_names_enough_and_fits_a_terminal(title: str) -> None:
    lines = drawing(title)
    assert len({name for line in lines for name in NAME.findall(line)}) >= LEAST_NAMES
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


def test_a_name_that_is_gone_is_found() -> None:
    right = [
        "│ WorkerClient.open  a RequestStream, then answer()  supervision/client.py",
        "HTTP to the MLX thread, in JSON",
    ]
    assert mistakes(right) == []
    for wrong in (
        "Clerk",
        "WorkerClient.opens",
        "answers()",
        "Loop.post  supervision/client.py",
        "posts  worker/loop.py",
    ):
        assert mistakes([f"│ {wrong}"]) != []
