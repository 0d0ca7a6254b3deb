"""Builds one llguidance grammar from everything that a request enforces, and explains why one cannot be enforced.

JSON is written on one line, with `", "` and `": "` between its parts: most of its text is then forced, and a model
cannot write white space forever. Enforced calls are JSON between markers, whatever the model's own form.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.core.errors import InvalidRequest
from app.core.messages import Generate
from app.core.request import Grammar, Notice, Reasoning
from app.text.dialect import HARMONY, JSON_CALLS, Dialect
from app.text.grammar.constraint import Vocabulary
from app.text.grammar.schema import (
    Schema,
    find_unsupported,
    reason_of,
    with_guidance,
    with_patterns_as_properties,
    without_broken_patterns,
)

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_CALLS = 16
SLASH_OR_BREAK = re.compile(r"\\?([/\n])|\\.", re.DOTALL)
"""Pattern of a slash or a line break, with the backslash that may escape it, or of any other escaped character."""
ANY_SPELLING = '%llguidance {"no_forcing": true}'
"""Grammar option that lets the model choose the tokenization of forced text."""

GrammarRule = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Grammar of an answer."""

    text: str
    """llguidance's grammar, as JSON."""
    schemas: Mapping[str, Schema]
    """Schemas of the grammar, by the field of the request that holds each."""
    notices: tuple[Notice, ...] = ()
    """Notices about parts of the schemas that are not enforced."""


def calls_by_grammar(command: Generate, dialect: Dialect) -> bool:
    """Return whether a grammar makes the model write calls as JSON between markers instead of in its own form."""
    is_enforced = bool(command.tools) and (command.tool_choice != "auto" or command.grammar is not None)
    return is_enforced and not _own_calls(command, dialect)


def _own_calls(command: Generate, dialect: Dialect) -> tuple[str, ...]:
    """Return the names of tools that a model may call in its own form before the part of the answer that a grammar
    governs. Where the request names the function to call, only a call in the grammar's form counts."""
    may_call = dialect.parser == HARMONY and command.tool_choice in {"auto", "required"}
    return tuple(str(tool["function"]["name"]) for tool in command.tools or ()) if may_call else ()


def grammar_parameter(command: Generate) -> str:
    """Return the field of a request that makes its answer subject to a grammar."""
    return command.grammar.parameter if command.grammar else "tools"


def answer_grammar(command: Generate, dialect: Dialect) -> AnswerGrammar | None:
    """Build the grammar of everything that a command enforces; None if it enforces nothing."""
    tool_name = command.tool_choice.removeprefix("function:")
    tools = [tool["function"] for tool in command.tools or ()]
    if tool_name not in {"auto", "required"}:
        tools = [tool for tool in tools if tool["name"] == tool_name]
    start = _start(command, dialect, tools)
    if not start:
        return None
    arguments = [_argument_schema(tool) for tool in tools]
    schemas = {
        f'the parameters of "{tool["name"]}"': schema for tool, (schema, _) in zip(tools, arguments, strict=True)
    }
    parts = [{"name": f"arguments_{n}", "json_schema": schema} for n, (schema, _) in enumerate(arguments)]
    if "@answer" in start and command.grammar is not None:
        answer = _text_rule(command.grammar)
        parts.append({"name": "answer", **answer})
        schemas |= {command.grammar.parameter: answer["json_schema"]} if "json_schema" in answer else {}
    lark_grammar = f"{ANY_SPELLING}\n{start}\n{_call_rules(tools) if tools else ''}"
    notices = tuple(notice for _, notices in arguments for notice in notices)
    return AnswerGrammar(json.dumps({"grammars": [{"lark_grammar": lark_grammar}, *parts]}), schemas, notices)


def _start(command: Generate, dialect: Dialect, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the start rule; empty if nothing is enforced."""
    is_single = command.tool_choice not in {"auto", "required"} or not command.parallel_tool_calls
    calls = "call" if is_single else f'call ("\\n" call){{0,{MAX_CALLS - 1}}}'
    if tools and command.tool_choice != "auto":
        return f"start: {calls}"
    if command.grammar is not None:
        return f"start: {calls} | @answer" if tools else "start: @answer"
    if dialect.parser == JSON_CALLS and any(tool.get("strict") for tool in tools):
        again = "*" if command.parallel_tool_calls else "?"
        return f'start: (before call_rest){again} TEXT\nbefore[lazy]: TEXT "<tool_call>"\nTEXT: /(.|\\n)*/'
    return ""


def reasoning_of(command: Generate, dialect: Dialect, prompt_end: str) -> Reasoning | None:
    """Return the markers and the limit of the answer's reasoning; None if it has none or the prompt closed it."""
    has_no_reasoning = command.messages is None or command.continues or not dialect.closing
    if has_no_reasoning or closes_reasoning(dialect, prompt_end):
        return None
    inside = dialect.parser == HARMONY or opens_reasoning(dialect, prompt_end)
    opening = "" if dialect.parser == HARMONY else dialect.opening
    return Reasoning(
        opening=opening,
        closing=dialect.closing,
        inside=inside,
        most_tokens=command.reasoning_tokens,
        call_names=_own_calls(command, dialect),
    )


def opens_reasoning(dialect: Dialect, prompt_end: str) -> bool:
    """Return whether a prompt that ends with `prompt_end` has opened the reasoning of its answer."""
    return bool(dialect.opening) and prompt_end.rstrip().endswith(dialect.opening)


def closes_reasoning(dialect: Dialect, prompt_end: str) -> bool:
    """Return whether a prompt that ends with `prompt_end` has closed the reasoning of its answer."""
    return bool(dialect.closing) and prompt_end.rstrip().endswith(dialect.closing)


def _call_rules(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the rules `call` and `call_rest` (what follows its first marker)."""
    rules = ['call: "<tool_call>" call_rest', "call_rest: " + " | ".join(f"call_{n}" for n in range(len(tools)))]
    for index, tool in enumerate(tools):
        head = f'\n{{"name": {json.dumps(tool["name"])}, "arguments": '
        rules.append(
            f"call_{index}: {json.dumps(head)} @arguments_{index} {json.dumps('}' + chr(10) + '</tool_call>')}"
        )
    return "\n".join(rules)


def _argument_schema(tool: Mapping[str, Any]) -> tuple[Schema, Sequence[Notice]]:
    """Return the schema of a tool's arguments, and notices of dropped patterns (none if the tool is `strict`)."""
    parameters = tool.get("parameters") or NO_ARGUMENTS
    closed = {"additionalProperties": False} if "properties" in parameters else {}
    schema = with_patterns_as_properties(closed | parameters)
    if tool.get("strict"):
        return with_guidance(schema), ()
    schema, dropped = without_broken_patterns(schema)
    message_format = 'the parameters of "{}" at {}: the pattern is not enforced: {}'
    messages = [message_format.format(tool["name"], pointer, reason) for pointer, reason in dropped]
    notices = [Notice(code="pattern_not_enforced", message=message, parameter="tools") for message in messages]
    return with_guidance(schema, lenient=True), notices


def _text_rule(grammar: Grammar) -> GrammarRule:
    """Return the rule that the text must match. The API has already validated its JSON."""
    match grammar.kind:
        case "json_schema":
            return {"json_schema": with_guidance(with_patterns_as_properties(json.loads(grammar.text)))}
        case "choice":
            return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(grammar.text)))}
        case "regex":
            return {"lark_grammar": f"start: /{SLASH_OR_BREAK.sub(_in_slashes, grammar.text)}/"}
        case _:
            return {"lark_grammar": grammar.text}


def _in_slashes(match: re.Match[str]) -> str:
    """Return the matched text, escaped for an expression between slashes."""
    return {"/": "\\/", "\n": "\\n"}.get(match[1], match[0])


def check_grammar(grammar: AnswerGrammar, vocabulary: Vocabulary, parameter: str) -> None:
    """Raise InvalidRequest, with the reason, if a grammar is invalid or allows no answer."""
    if not vocabulary.stops:
        raise InvalidRequest("this model has no end token, so no grammar can be enforced", parameter=parameter)
    error = vocabulary.compile_grammar(grammar.text).first_error(vocabulary)
    if not error:
        return
    reason = reason_of(error)
    for described, schema in grammar.schemas.items():
        if unsupported := find_unsupported(schema):
            location = " at ".join(
                word for word in ("" if described == parameter else described, unsupported.pointer) if word
            )
            reason = f"{location}: {unsupported.reason}" if location else unsupported.reason
            break
    raise InvalidRequest(f"{parameter} cannot be enforced: {reason}", parameter=parameter, code="unsupported_grammar")
