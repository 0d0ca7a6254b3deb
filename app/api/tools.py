"""Tools in a request: functions, custom tools (whose only argument is a text), and tools that run elsewhere.

Models see functions only. A custom tool is shown as a function with one string parameter, `input`, and its calls are
converted back for the client.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, field_validator, model_validator

from app.api.structured import check_schema
from app.core.request import Notice
from app.serving.gate import Body

FUNCTION, CUSTOM, ALLOWED_TOOLS = "function", "custom", "allowed_tools"
INPUT = "input"
MODES = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
"""Modes of a tool choice, by the names that APIs have for them."""

INPUT_BEGINS = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})+'
)
"""Complete characters inside a JSON string; the two escapes of a surrogate pair are one character."""


class FunctionDefinition(Body):
    """A function that the model may call; `parameters` is a JSON schema, shown to the model as it is."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,300}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check_schema(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters is not None:
            check_schema(parameters)
        return parameters


class FunctionTool(Body):
    """A function."""

    type: Literal["function"]
    function: FunctionDefinition

    @property
    def name(self) -> str:
        """Name by which the model calls it."""
        return self.function.name

    def shown(self) -> dict[str, Any]:
        """Return the tool as models see it."""
        return self.model_dump(exclude_unset=True)


class CustomDefinition(Body):
    """A custom tool; `format` may hold a grammar for the input, in the format of OpenAI's chat or Responses API."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,300}$")
    description: str | None = None
    format: dict[str, Any] | None = None


class CustomTool(Body):
    """A tool that takes one text."""

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def name(self) -> str:
        """Name by which the model calls it."""
        return self.custom.name

    def shown(self) -> dict[str, Any]:
        """Return the tool as models see it: a function with one string."""
        custom = self.custom
        description = "\n\n".join(filter(None, (custom.description, _format_in_words(custom.format or {}))))
        text = {"type": "string", "description": "The whole input, as plain text."}
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        return {"type": FUNCTION, FUNCTION: {"name": custom.name, "description": description, "parameters": parameters}}


class OtherTool(Body):
    """A tool that OpenAI, Anthropic or another service runs."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"enum": [FUNCTION, CUSTOM]}})]
    name: str | None = None


def _format_in_words(format: Mapping[str, Any]) -> str:  # noqa: A002 - the API's name
    nested = format.get("grammar")
    grammar = nested if isinstance(nested, dict) else format
    definition = grammar.get("definition")
    if not isinstance(definition, str):
        return ""
    return f"Its input matches this grammar ({grammar.get('syntax', 'lark')}):\n{definition}"


def _kind_of(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return None if not isinstance(kind, str) else kind if kind in {FUNCTION, CUSTOM} else "other"


Tool = Annotated[
    Annotated[FunctionTool, Tag(FUNCTION)] | Annotated[CustomTool, Tag(CUSTOM)] | Annotated[OtherTool, Tag("other")],
    Discriminator(_kind_of, custom_error_type="tool", custom_error_message="a tool is an object with a type"),
]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether a tool must be called, and which tools may be called."""

    mode: str = "auto"
    """`none`, `auto`, `required`, or `function:NAME`."""
    allowed: frozenset[str] | None = None
    """Names of the tools that may be called; None: all."""
    other: str = ""
    """Type of a requested tool that does not run here; empty if there is none."""


def _read_choice(choice: Any) -> ToolChoice:
    kind = choice.get("type") if isinstance(choice, dict) else None
    mode = choice if isinstance(choice, str) else kind
    if choice is None or (isinstance(mode, str) and mode in MODES):
        return ToolChoice(MODES[mode or "auto"])
    if kind == ALLOWED_TOOLS:
        return _allowed_tools(choice.get(ALLOWED_TOOLS))
    if isinstance(kind, str) and kind not in (FUNCTION, CUSTOM):
        return ToolChoice(other=kind)
    if name := _name_of(choice):
        return ToolChoice(f"function:{name}")
    raise ValueError('give none, auto, required, or {"type": "function", "function": {"name": …}}')


def _allowed_tools(wanted: Any) -> ToolChoice:
    tools = wanted.get("tools") if isinstance(wanted, dict) else None
    mode = wanted.get("mode") if isinstance(wanted, dict) else None
    if mode not in ("auto", "required", None) or not isinstance(tools, list):
        raise ValueError("allowed_tools has a mode, auto or required, and tools")
    return ToolChoice(mode or "auto", frozenset(filter(None, map(_name_of, tools))))


def _name_of(tool: Any) -> str:
    """Return the name of the tool that a choice names; empty for other kinds of choices."""
    nested = tool.get(str(tool.get("type"))) if isinstance(tool, dict) else None
    name = nested.get("name") if isinstance(nested, dict) else None
    return name if isinstance(name, str) else ""


def _choice_schema(kind: dict[str, Any], **details: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": kind, **details}, "required": ["type", *details]}


NAME = {"type": "object", "properties": {"name": {"type": "string"}}}
ALLOWED = {
    "type": "object",
    "properties": {"mode": {"enum": ["auto", "required", None]}, "tools": {"type": "array"}},
    "required": ["tools"],
}
CHOICES = WithJsonSchema(
    {
        "anyOf": [
            {"enum": [*MODES, None]},
            _choice_schema({"const": FUNCTION}, function=NAME),
            _choice_schema({"const": CUSTOM}, custom=NAME),
            _choice_schema({"const": ALLOWED_TOOLS}, allowed_tools=ALLOWED),
            _choice_schema({"type": "string", "not": {"enum": [FUNCTION, CUSTOM, ALLOWED_TOOLS]}}),
        ]
    }
)


class ToolsBody(Body):
    """Fields about tools."""

    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, BeforeValidator(_read_choice), CHOICES] = ToolChoice()
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> "ToolsBody":
        choice, others = self.tool_choice, {*map(_label, self.other_tools), self.tool_choice.other}
        names = {tool.name for tool in self.offered}
        if choice.mode == "required" and not names and not any(others):
            raise ValueError("tool_choice asks for a call, but there are no tools")
        named = choice.mode.removeprefix("function:")
        if named != choice.mode and named not in names | others:
            raise ValueError("tool_choice names a function that is not among the tools")
        return self

    @property
    def offered(self) -> "list[FunctionTool | CustomTool]":
        """Tools that the model may call."""
        callable_tools = [tool for tool in self.tools or () if not isinstance(tool, OtherTool)]
        allowed = self.tool_choice.allowed
        return [tool for tool in callable_tools if allowed is None or tool.name in allowed]

    @property
    def other_tools(self) -> list[OtherTool]:
        """Tools that run neither here nor at the client."""
        return [tool for tool in self.tools or () if isinstance(tool, OtherTool)]

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the tools that take one text."""
        return frozenset(tool.name for tool in self.offered if isinstance(tool, CustomTool))

    @property
    def call_mode(self) -> str:
        """`auto`, `required` or `function:NAME`; a tool that is not offered cannot be required."""
        names = {tool.name for tool in self.offered}
        mode: str = self.tool_choice.mode
        is_possible = (mode == "required" and names) or mode.removeprefix("function:") in names
        return mode if is_possible else "auto"

    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the template shows; None if there are none."""
        return None if self.tool_choice.mode == "none" else [tool.shown() for tool in self.offered] or None

    def held_tools(self, *, has_grammar: bool) -> list[FunctionTool]:
        """Return the functions whose calls a grammar may hold to their parameters; `has_grammar`: the text has one."""
        offered = () if self.tool_choice.mode == "none" else self.offered
        functions = [tool for tool in offered if isinstance(tool, FunctionTool)]
        if self.call_mode not in MODES:
            return [tool for tool in functions if self.call_mode == f"function:{tool.name}"]
        is_held = self.call_mode == "required" or has_grammar or any(tool.function.strict for tool in functions)
        return functions if is_held else []

    def tool_notices(self) -> list[Notice]:
        """Return notices about tools and choices that cannot be honoured."""
        notices, choice = [], self.tool_choice
        if self.other_tools:
            kinds = ", ".join(dict.fromkeys(tool.type[:60] for tool in self.other_tools))
            message = f"tools of type {kinds} are left out: none of them runs here, so the model is not shown them"
            notices.append(Notice(code="left_out_tool", message=message, parameter="tools"))
        if choice.other or choice.mode not in {"none", self.call_mode}:
            message = "tool_choice is treated as auto: it asks for a tool that does not run here"
            notices.append(Notice(code="ignored_tool_choice", message=message, parameter="tool_choice"))
        return notices


def _label(tool: OtherTool) -> str:
    return tool.name or tool.type


# --- calls of custom tools --------------------------------------------------------------------------------------


def custom_arguments(text: str) -> str:
    """Return JSON arguments whose only field is `text`."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return a custom tool's text: the field `input`, else the only field, "" for {}; else the arguments unchanged."""
    try:
        value = json.loads(arguments, strict=False)
    except ValueError:
        return arguments
    texts = value if isinstance(value, dict) else {}
    only = next(iter(texts.values())) if len(texts) == 1 else "" if value == {} else None
    text = texts.get(INPUT, only)
    return text if isinstance(text, str) else arguments


class CustomInput:
    """Text of one custom tool call, while its arguments are streamed."""

    def __init__(self) -> None:
        self.decoded = ""
        self._arguments: list[str] = []
        self._undecoded = ""
        """Arguments that are not decoded yet."""
        self._is_inside = False

    def feed(self, arguments: str) -> str:
        """Add arguments; return the newly decoded text."""
        self._arguments.append(arguments)
        self._undecoded += arguments
        if not self._is_inside:
            beginning = INPUT_BEGINS.match(self._undecoded)
            if beginning is None:
                return ""
            self._undecoded, self._is_inside = self._undecoded[beginning.end() :], True
        match = CHARACTERS.match(self._undecoded)
        if match is None:
            return ""
        self._undecoded = self._undecoded[match.end() :]
        text: str = json.loads(f'"{match[0]}"', strict=False)
        self.decoded += text
        return text

    def finish(self) -> str:
        """Return the rest of the text, once the call is whole."""
        whole = custom_input("".join(self._arguments))
        rest = whole.removeprefix(self.decoded) if whole.startswith(self.decoded) else ""
        self.decoded += rest
        return rest
