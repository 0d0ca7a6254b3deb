"""What is searched in the tests of the pages: templates, our own scripts and styles, the code behind them."""

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
    """Our own."""
    return sorted(STATIC.glob("*.js"))


def styles() -> list[Path]:
    """Our own."""
    return sorted(STATIC.glob("*.css"))


def quoted_keys() -> set[str]:
    """Everything in quotes that looks like the key of a word."""
    paths = [*templates(), *scripts(), *APP.rglob("*.py")]
    return {key for path in paths for key in QUOTED.findall(path.read_text(encoding="utf-8"))}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a bare name in the code of the app."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in APP.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return ((node.func.id, node) for node in nodes if isinstance(node.func, ast.Name))
