"""Convert Anthropic's turns, with their blocks, to chat messages, and its tools to chat tools.

Blocks of tools that only Anthropic can run are left out, with a warning; pictures and files are refused.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

from pydantic import Field, model_validator

from app.api.chat import LEFT_OUT, TEXT_ONLY
from app.api.thinking import Effort
from app.core.errors import InvalidRequest
from app.serving.gate import Body

BILLING_HEADER = "x-anthropic-billing-header:"


class AnthropicTool(Body):
    """A tool. The client describes and runs it if `type` is absent or `custom`; other types have no description."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_described(self) -> "AnthropicTool":
        if self.is_client_tool and (self.name is None or self.input_schema is None):
            raise ValueError("a tool has a name and an input_schema")
        return self

    @property
    def is_client_tool(self) -> bool:
        """Whether the client describes the tool."""
        return self.type in (None, "custom")

    def as_chat(self) -> dict[str, Any]:
        """Convert the tool to OpenAI's format."""
        if not self.is_client_tool:
            return {"type": self.type, "name": self.name}
        examples = [json.dumps(example, ensure_ascii=False) for example in self.input_examples or ()]
        parts = (self.description, "\n".join(["Examples of its input:", *examples]) if examples else None)
        description = "\n\n".join(filter(None, parts)) or None
        described = {"name": self.name, "description": description, "parameters": self.input_schema}
        function = {name: value for name, value in (described | {"strict": self.strict}).items() if value is not None}
        return {"type": "function", "function": function}


class ToolChange(Body):
    """A tool that a conversation adds or removes: defined, or by the name of one that was defined before."""

    type: str
    name: str | None = None
    definition: AnthropicTool | None = None


class Source(Body):
    """Content of a document: its text, or its blocks."""

    type: str | None = None
    data: str | None = None
    content: "str | list[Block] | None" = None


class Block(Body):
    """One part of a message, with the fields of its type."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | str | None = None
    """Arguments of a call; a text if they were cut off."""
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[Block] | Block | None" = None
    is_error: bool | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    tool: ToolChange | None = None
    tool_changes: "list[Block] | None" = None

    @property
    def tool_change(self) -> ToolChange | None:
        """The tool that the block adds or removes; None if it does not, or if the tool runs at Anthropic."""
        if self.tool is None or self.type not in {"tool_addition", "tool_removal"}:
            return None
        return self.tool if self.tool.definition is not None or self.tool.type == "tool_reference" else None


Blocks = str | list[Block]
READABLE = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "search_result"})
UNREADABLE = frozenset({"image", "document"})
"""Types of blocks that the user wants the model to read: refused unless they hold text, never left out silently."""


class TurnOutput(Body):
    """Reasoning effort from a turn on."""

    effort: Effort | None = None


class Turn(Body):
    """One message; those of the system may set the effort from there on, or hold only until the next user's."""

    role: Literal["user", "assistant", "system"]
    content: Blocks = Field(default_factory=list)
    clear_at: str | None = None
    output_config: TurnOutput | None = None

    @model_validator(mode="after")
    def _check_said(self) -> "Turn":
        if not self.model_fields_set & {"content", "output_config"}:
            raise ValueError("content is required")
        return self


def _is_left_out(block: Block) -> bool:
    """Return whether a block shows the model nothing."""
    if block.type in {"tool_reference", "compaction"}:  # a compaction that failed has no summary
        return not (block.tool_name or block.content)
    return block.type not in READABLE | UNREADABLE


def left_out_kinds(contents: Iterable[Blocks | None]) -> list[str]:
    """Return the types of the blocks that have no effect, in order."""
    blocks = (block for content in contents for block in _nested_blocks(content) if _is_left_out(block))
    return list(
        dict.fromkeys(block.type[:60] for block in blocks if not block.tool_change and block.type != "compaction")
    )


def _nested_blocks(content: Any) -> Iterator[Block]:
    """Yield the blocks of `content`, each followed by its nested blocks unless it is left out."""
    blocks = [content] if isinstance(content, Block) else content if isinstance(content, list) else []
    for block in blocks:
        yield block
        within = block.source.content if isinstance(block.source, Source) else block.content
        yield from _nested_blocks(None if _is_left_out(block) else within)


def system_messages(system: Blocks | None) -> list[dict[str, Any]]:
    """Return the system message without Claude Code's billing header: that line differs in each session, so nothing
    after it would ever hit the prefix cache."""
    blocks = [Block(text=system)] if isinstance(system, str) else system or []
    texts = [text for block in blocks if (text := _text([block]))]
    if texts and texts[0].startswith(BILLING_HEADER):
        rest = texts.pop(0).partition("\n")[2]
        texts = [rest, *texts] if rest else texts
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def _text(blocks: Blocks) -> str:
    """Join the text of blocks. Raises InvalidRequest for pictures and other content that is not text."""
    if isinstance(blocks, str):
        return blocks
    return "\n\n".join(_block_text(block) for block in blocks if not _is_left_out(block))


def _block_text(block: Block) -> str:
    source = block.source
    if block.type == "text" and block.text is not None:
        return block.text
    if block.type == "tool_reference" and block.tool_name is not None:  # a result of a tool search
        return block.tool_name
    if block.type == "compaction" and isinstance(block.content, str):
        return block.content
    if block.type == "search_result" and isinstance(block.content, list):
        return "\n".join(
            [*filter(None, (block.title, source if isinstance(source, str) else None)), _text(block.content)]
        )
    if block.type == "document" and isinstance(source, Source):
        content = source.data if source.type == "text" else source.content if source.type == "content" else None
        if content is not None:
            return "\n".join([*filter(None, (block.title, block.context)), _text(content)])
    raise InvalidRequest(f"messages: {TEXT_ONLY}: leave out {block.type[:60]}", parameter="messages")


def _readable(block: Block) -> str:
    """Return the text of a block in a tool's result; an agent could not take back a picture that is refused."""
    try:
        return _block_text(block)
    except InvalidRequest:
        return LEFT_OUT


def _result_text(block: Block) -> str:
    """Return the text of a tool's result; where only the block says that the call failed, its text says so, too."""
    content = [block.content] if isinstance(block.content, Block) else block.content or ""
    if not isinstance(content, str):
        content = "\n\n".join(_readable(part) for part in content if not _is_left_out(part))
    if not block.is_error or "error" in content.lower():
        return content
    return f"Error: {content}" if content else "Error"


def offered_tools(tools: Iterable[AnthropicTool], turns: Iterable[Turn]) -> list[AnthropicTool]:
    """Return the tools that are offered after `turns`, which may add and remove some."""
    known = {tool.name or tool.type or "": tool for tool in tools}
    offered = dict(known)
    blocks = [block for turn in turns if not isinstance(turn.content, str) for block in turn.content]
    for change in chain.from_iterable((block, *(block.tool_changes or ())) for block in blocks):
        if (named := change.tool_change) is None:
            continue
        if change.type == "tool_removal":
            offered.pop(named.name or "", None)
        elif tool := named.definition or known.get(named.name or ""):
            name = tool.name or tool.type or ""
            known[name] = offered[name] = tool
    return list(offered.values())


def shown_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns without those of the system that held only until a later turn of the user."""
    last_user = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=-1)
    return [
        turn
        for index, turn in enumerate(turns)
        if index > last_user or turn.role != "system" or turn.clear_at != "next_user_message"
    ]


def turn_messages(turn: Turn) -> Iterable[dict[str, Any]]:
    """Convert a turn to OpenAI's messages; each tool result becomes a separate message, before the others."""
    blocks = [Block(text=turn.content)] if isinstance(turn.content, str) else turn.content
    calls, reasonings, other_blocks = [], [], []
    for block in blocks:
        match block.type:
            case "tool_result":
                yield {"role": "tool", "tool_call_id": block.tool_use_id or "-", "content": _result_text(block)}
            case "tool_use":
                given = block.input or {}
                arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
                function = {"name": block.name or "", "arguments": arguments}
                calls.append({"id": block.id or "-", "type": "function", "function": function})
            case "thinking":
                reasonings.append(block.thinking or "")
            case "redacted_thinking":
                continue
            case _:
                other_blocks.append(block)
    if all(map(_is_left_out, other_blocks)) and not calls:
        return
    message: dict[str, Any] = {"role": turn.role, "content": _text(other_blocks) if other_blocks else None}
    if calls:
        message["tool_calls"] = calls
    if reasonings:
        message["reasoning_content"] = "\n".join(reasonings)
    yield message
