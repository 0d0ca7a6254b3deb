"""The repository as the architecture tests read it."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "app"


def parsed(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield the relative path and the syntax tree of every Python file in a folder."""
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every Python file of the app, by relative path."""
    return dict(parsed(PACKAGE))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@cache
def tracked_files() -> tuple[Path, ...]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())


def text_of(path: Path) -> str | None:
    """Return the file as text, or None if it is binary."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return None


def words(name: str) -> set[str]:
    """Return the words of a name: {"model", "manager"} for `ModelManager` and for `model_manager`."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
