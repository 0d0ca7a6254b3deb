"""What an answer is held to, as one grammar of llguidance; and what is wrong with one that cannot be.

JSON is asked for on one line, `", "` and `": "` between its parts: so most of it is forced, and a model cannot write
white space for ever. Calls that are enforced are JSON between marks, whatever the model's own way is.
"""

import json
from collections.abc import Mapping
from typing import Any

from app.core.errors import InvalidRequest
from app.core.messages import Generate
from app.core.request import Grammar, Reasoning
from app.text.constraint import Vocabulary, first_line
from app.text.dialect import HARMONY, JSON_CALLS, Dialect

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
MOST_CALLS = 16
ANY_SPELLING = '%llguidance {"no_forcing": true}'
"""The model chooses by which tokens it writes what is forced."""

Part = dict[str, Any]


def calls_by_grammar(command: Generate) -> bool:
    """Whether calls are written as JSON between marks because something is enforced."""
    return bool(command.tools) and (command.tool_choice != "auto" or command.grammar is not None)


def answer_grammar(command: Generate, dialect: Dialect) -> str:
    """llguidance's grammar, as JSON, of everything that a command enforces; empty: nothing."""
    tools = [tool["function"] for tool in command.tools or ()]
    wanted = command.tool_choice.removeprefix("function:")
    if wanted not in {"auto", "required"}:
        tools = [tool for tool in tools if tool["name"] == wanted]
    one, more = "call", f'("\\n" call){{0,{MOST_CALLS - 1}}}'
    calls = one if wanted not in {"auto", "required"} or not command.parallel_tool_calls else f"{one} {more}"
    if command.tools and wanted != "auto":
        return _joined(f"start: {calls}", *_call_parts(tools))
    if command.grammar is None:
        if dialect.parser == JSON_CALLS and any(tool.get("strict") for tool in tools):
            again = "*" if command.parallel_tool_calls else "?"
            text = f'start: (before call_rest){again} TEXT\nbefore[lazy]: TEXT "<tool_call>"\nTEXT: /(.|\\n)*/'
            return _joined(text, *_call_parts(tools))
        return ""
    answer = _wished(command.grammar)
    if tools:
        return _joined(f"start: {calls} | @answer", *_call_parts(tools), {"name": "answer", **answer})
    return _joined("start: @answer", "", {"name": "answer", **answer})


def reasoning_of(command: Generate, dialect: Dialect, prompt_end: str) -> Reasoning | None:
    """How the answer may begin with reasoning, and how long that may take; None: it has none, or it is over."""
    if command.messages is None or not dialect.closing or prompt_end.rstrip().endswith(dialect.closing):
        return None
    inside = dialect.parser == HARMONY or thinks(dialect, prompt_end)
    opening = "" if dialect.parser == HARMONY else dialect.opening
    return Reasoning(opening=opening, closing=dialect.closing, inside=inside, most_tokens=command.reasoning_tokens)


def thinks(dialect: Dialect, prompt_end: str) -> bool:
    """Whether a prompt that ends so has opened the reasoning of its answer."""
    return bool(dialect.opening) and prompt_end.rstrip().endswith(dialect.opening)


def _joined(start: str, rules: str, *parts: Part) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"{ANY_SPELLING}\n{start}\n{rules}"}, *parts]})


def _call_parts(tools: list[Mapping[str, Any]]) -> tuple[str, *tuple[Part, ...]]:
    """The rules `call` and `call_rest` (behind its first mark), and the arguments of each tool."""
    rules = ['call: "<tool_call>" call_rest', "call_rest: " + " | ".join(f"call_{n}" for n in range(len(tools)))]
    parts = []
    for place, tool in enumerate(tools):
        head = f'\n{{"name": {json.dumps(tool["name"])}, "arguments": '
        rules.append(
            f"call_{place}: {json.dumps(head)} @arguments_{place} {json.dumps('}' + chr(10) + '</tool_call>')}"
        )
        options = {} if tool.get("strict") else {"lenient": True}
        parameters = tool.get("parameters") or NO_ARGUMENTS
        named_only = {"additionalProperties": False} if "properties" in parameters else {}
        part = _json_part(named_only | parameters, **options)
        parts.append({"name": f"arguments_{place}", **part})
    return "\n".join(rules), *parts


def _wished(wish: Grammar) -> Part:
    """What the text must match. The API checked it: JSON where JSON belongs."""
    match wish.kind:
        case "json_schema":
            return _json_part(json.loads(wish.text))
        case "choice":
            return {"lark_grammar": "start: " + " | ".join(map(json.dumps, json.loads(wish.text)))}
        case "regex":
            escaped = wish.text.replace("/", "\\/").replace("\n", "\\n")
            return {"lark_grammar": f"start: /{escaped}/"}
        case _:
            return {"lark_grammar": wish.text}


def _json_part(schema: Mapping[str, Any], **options: bool) -> Part:
    return {"json_schema": {**schema, "x-guidance": ONE_LINE | options}}


def check_grammar(text: str, vocabulary: Vocabulary, parameter: str) -> None:
    """Raises InvalidRequest that says what is wrong with a grammar, or why it can never be fulfilled."""
    if not vocabulary.stops:
        raise InvalidRequest("this model has no token that ends an answer: no grammar can hold it", parameter=parameter)
    matcher = vocabulary.matcher(text)
    if matcher.is_error():
        message = f"{parameter} cannot be enforced: {first_line(matcher.get_error())}"
        raise InvalidRequest(message, parameter=parameter, code="unsupported_grammar")
