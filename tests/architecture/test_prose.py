"""Docstrings and comments are plain English: the rules of CONTRIBUTING.md that a machine can check."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import chain

from tests.architecture.source import ROOT, modules, parsed

NEVER = re.compile(r"\b(?:so many|so much|whoever|whom|(?:is|are|was|were) told|tells? (?:us|of))\b", re.IGNORECASE)
"""Phrases that are not the field's English: name the quantity, the caller or the message instead."""
NO_NOUN = re.compile(r"(?:so (?:many|much|long)|how|what|of what|whose|when|where|who|of)\b", re.IGNORECASE)
"""Words with which no description may begin: a value's begins with its noun, a function's with a verb."""

NO_NAMES = {"told", "found", "each", "one", "behind"}
"""Names that say nothing about a value."""
BESIDE_THE_APP = ("tests", "bench", "campaign", "tools")
"""Folders besides the app in which values must have names of the field."""
SCRIPTS = ("app/static/*.js", "app/admin/templates/*.html", "tests/browser/*.js")
"""Files of the web pages that declare names: scripts, and templates with their loops."""
REMARK = re.compile(r"(?<!\S)//[^\n]*|\{#.*?#\}", re.DOTALL)
"""Pattern of a comment in a script or a template."""
DECLARATION = re.compile(
    r"\b(?:const|let|var|function|class)\s+([\w$]+|[\[{][^;]*?[\]}](?=\s*(?:=|of\b)))"  # a value, or several at once
    r"|\b(\w+)\s*=>|\(((?:[^()]|\([^()]*\))*)\)\s*(?:=>|\{)"  # parameters: of an arrow function, of any function
    r"|\bx-for=\"(.*?)\s+in\b|\{%-?\s*for\s+(.*?)\s+in\b"  # loops of templates
)
"""Pattern of a declaration in a script or a template; the last group that matches has its names."""
BOUND = re.compile(r"(?<![\w.\"'`-])(?:\.\.\.)?(\w+)\b(?![\"'`]|\s*:)")
"""Pattern of a name within a declaration, except the key in `{ key: name }`, which the server may have chosen."""


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name


def script_identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that a script or a template declares."""
    code = REMARK.sub(lambda remark: "\n" * remark.group().count("\n"), source)
    for declaration in DECLARATION.finditer(code):
        group = declaration.lastindex or 0
        for name in BOUND.finditer(declaration.group(group)):
            yield code.count("\n", 0, declaration.start(group) + name.start()) + 1, name.group(1)


def descriptions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, and of each string that describes a constant or a field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, after in zip([None, *node.body], node.body, strict=False):
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))) if before is None or isinstance(
                        before, ast.Assign | ast.AnnAssign
                    ):
                        yield after.lineno, text


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment, and of each string that is a statement by itself."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_docstrings_and_comments_use_no_turn_that_is_no_english() -> None:
    problems = [
        f"{name}:{line}: {match.group()}"
        for name in modules()
        for line, text in prose((ROOT / name).read_text(encoding="utf-8"))
        if (match := NEVER.search(text))
    ]
    assert not problems, "\n".join(problems)


def test_documents_use_the_terms_of_the_field() -> None:
    documents = [*ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    lines = (
        (f"{document.relative_to(ROOT)}:{number}", line)
        for document in documents
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1)
    )
    assert [place for place, line in lines if NEVER.search(line)] == []


def test_a_description_begins_with_a_noun_or_a_verb() -> None:
    problems = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name, tree in modules().items()
        for line, text in descriptions(tree)
        if NO_NOUN.match(text.strip())
    ]
    assert not problems, "\n".join(problems)


def test_values_have_names_of_the_field() -> None:
    named = [
        f"{name}:{line}: {identifier}"
        for name, tree in chain(modules().items(), *(parsed(ROOT / folder) for folder in BESIDE_THE_APP))
        for line, identifier in identifiers(tree)
        if identifier.strip("_") in NO_NAMES
    ]
    assert not named, "\n".join(named)


def test_values_of_scripts_have_names_of_the_field() -> None:
    named = [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {identifier}"
        for pattern in SCRIPTS
        for path in sorted(ROOT.glob(pattern))
        for line, identifier in script_identifiers(path.read_text(encoding="utf-8"))
        if identifier.strip("_") in NO_NAMES
    ]
    assert not named, "\n".join(named)
