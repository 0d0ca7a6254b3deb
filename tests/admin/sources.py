"""Sources that the tests of the pages search: templates, our own scripts and styles, and the app's Python code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from app.admin.templating import FOLDER as STATIC
from app.admin.templating import TEMPLATES

APP = STATIC.parent
VENDOR = STATIC / "vendor"
QUOTED = re.compile(r"[\"'`]([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+)[\"'`]")


def templates() -> list[Path]:
    return sorted(TEMPLATES.glob("*.html"))


def scripts() -> list[Path]:
    """Return our own scripts, without vendored ones."""
    return sorted(STATIC.glob("*.js"))


def styles() -> list[Path]:
    """Return our own stylesheets, without vendored ones."""
    return sorted(STATIC.glob("*.css"))


def quoted_keys() -> set[str]:
    """Return everything in quotes that looks like the key of a catalog entry."""
    paths = [*templates(), *scripts(), *APP.rglob("*.py")]
    return {key for path in paths for key in QUOTED.findall(path.read_text(encoding="utf-8"))}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Return the name and the node of every call of a bare name in the app's code."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in APP.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return ((node.func.id, node) for node in nodes if isinstance(node.func, ast.Name))
