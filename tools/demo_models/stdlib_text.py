"""Ordinary text and code that every Python installation carries: sources and docstrings."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

PACKAGES = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
    "zoneinfo",
    "tomllib",
    "sqlite3",
    "wsgiref",
    "curses",
)


@lru_cache(maxsize=1)
def source_texts() -> tuple[str, ...]:
    """Return the text of the standard library's readable modules, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.glob("*.py"))
    for package in PACKAGES:
        paths.extend(sorted((root / package).rglob("*.py")))
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.isascii() and 500 < len(text) < 200_000:
            texts.append(text)
    return tuple(texts)


def _docstrings_of(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) > 30:
                yield text


def iterate_docstrings() -> Iterator[str]:
    """Yield every docstring of the readable modules."""
    for source in source_texts():
        yield from _docstrings_of(source)


@lru_cache(maxsize=1)
def documents() -> tuple[str, ...]:
    """Return docstrings and single top-level functions or classes, each a document of its own."""
    pieces = list(iterate_docstrings())
    for source in source_texts():
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_source_segment(source, node)
                if text and 60 < len(text) < 6000:
                    pieces.append(text)
    return tuple(pieces)
