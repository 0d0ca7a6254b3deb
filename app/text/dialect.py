"""How a model writes what it thinks and the tools it calls.

What the template of a model says decides, as mlx-lm reads it; the syntax of calls is parsed by mlx-lm's own parsers.
"""

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from mlx_lm import tokenizer_utils, tool_parsers

HARMONY = "harmony"
JSON_CALLS = "json_tools"
"""Calls as `{"name": …, "arguments": {…}}` between marks, written while they are streamed; what a grammar enforces."""
BARE_JSON = "bare_json"
"""The same without marks, as an answer of its own; Llama's."""
DEEPSEEK = "deepseek"
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
PYTHON_TAG = "<|python_tag|>"
"""Llama's word before calls."""
MAX_CALL_CHARACTERS = 256 * 1024
"""Of a call that is parsed whole; beyond it is text."""
HARMONY_LAST = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_ENDS = (*HARMONY_LAST, "<|start|>", "<|channel|>")
HARMONY_MARKS = (*HARMONY_ENDS, "<|message|>", "<|constrain|>")


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model. Marks are text; an empty one is none."""

    opening: str = ""
    closing: str = ""
    """Around reasoning."""
    parser: str = ""
    """Which of mlx-lm's reads calls, or one of ours; empty: the model was not taught to call."""
    call_start: str = ""
    call_end: str = ""


def with_json_calls(dialect: Dialect) -> Dialect:
    """The same with calls as JSON between marks: what a grammar enforces, and what a model is told that knows none."""
    return msgspec.structs.replace(dialect, parser=JSON_CALLS, call_start="<tool_call>", call_end="</tool_call>")


def visible_marks(dialect: Dialect) -> str:
    """Text with every special token in it that the pieces of an answer are told apart by."""
    own = {HARMONY: HARMONY_MARKS, DEEPSEEK: (*_DEEPSEEK_CALLS, *_DEEPSEEK_CALL)}.get(dialect.parser, ())
    marks = "\0".join((dialect.opening, dialect.closing, *own))
    if dialect.parser in {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}:
        module = importlib.import_module(f"{tool_parsers.__name__}.{dialect.parser}")
        marks += inspect.getsource(module).replace("\\", "")  # as its expressions look for them
    return marks


def read_dialect(tokenizer: Any) -> Dialect:
    """The dialect of `tokenizer`, one of transformers with its chat template."""
    found = tokenizer.chat_template
    template = "\n".join(map(str, found.values())) if isinstance(found, dict) else str(found or "")
    if "<|channel|>" in template and "<|message|>" in template:
        return Dialect(opening="<|channel|>analysis", closing="<|channel|>final<|message|>", parser=HARMONY)
    opening, closing, *_ = tokenizer_utils._infer_thinking(tokenizer)  # noqa: SLF001 - how mlx-lm does it
    if not opening and "<think>" in template and "</think>" in template:
        opening, closing = "<think>", "</think>"
    kind = tokenizer.init_kwargs.get("tool_parser_type") or tokenizer_utils._infer_tool_parser(tokenizer)  # noqa: SLF001
    if kind in {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}:
        module = importlib.import_module(f"{tool_parsers.__name__}.{kind}")
        start, end = module.tool_call_start, module.tool_call_end or ""
        return Dialect(opening=opening or "", closing=closing or "", parser=kind, call_start=start, call_end=end)
    if _DEEPSEEK_CALLS[0] in template:
        start, end = _DEEPSEEK_CALLS
        return Dialect(opening=opening or "", closing=closing or "", parser=DEEPSEEK, call_start=start, call_end=end)
    knows_tools = re.search(r"\btools\b", template) is not None
    return Dialect(opening=opening or "", closing=closing or "", parser=BARE_JSON if knows_tools else "")


NO_DIALECT = Dialect()


def parse_calls(parser: str, body: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Name and arguments, as JSON, of each call in `body`; none when it is malformed."""
    if len(body) > MAX_CALL_CHARACTERS:
        return []
    try:
        if parser in {BARE_JSON, DEEPSEEK}:
            found = _bare(body) if parser == BARE_JSON else _deepseek(body)
        else:
            module = importlib.import_module(f"{tool_parsers.__name__}.{parser}")
            found = module.parse_tool_call(body, list(tools))
        return [_call(each) for each in (found if isinstance(found, list) else [found])]
    except Exception:  # noqa: BLE001 - parsers fail in any way they like
        return []


def _bare(body: str) -> list[Any]:
    """JSON objects one after another, or a list of them."""
    decoder, found, place = json.JSONDecoder(), [], 0
    while place < len(body):
        value, end = decoder.raw_decode(body, place)
        found += value if isinstance(value, list) else [value]
        place = end + len(body[end:]) - len(body[end:].lstrip(" \n\t;,"))
    return found


def _deepseek(body: str) -> list[Any]:
    """V3: `function`, the name and fenced JSON; since V3.1: the name and JSON."""
    begin, separator, end = _DEEPSEEK_CALL
    found = []
    for call in body.split(begin)[1:]:
        name, _, arguments = call.partition(end)[0].removeprefix(f"function{separator}").partition(separator)
        if not arguments:
            name, _, arguments = name.partition("\n```json\n")
        found.append({"name": name.strip(), "arguments": arguments.strip().removesuffix("```")})
    return found


def _call(found: Any) -> tuple[str, str]:
    """Raises where it is none."""
    found = found.get("function", found) if isinstance(found.get("function"), dict) else found
    name, arguments = found["name"], found.get("arguments", found.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("a call has a name")
    arguments = json.loads(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise TypeError("arguments are an object")
    return name, json.dumps(arguments, ensure_ascii=False)
