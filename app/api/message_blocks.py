"""Convert Anthropic's turns, with their blocks, to chat messages, and its tools to chat tools.

Blocks of tools that only Anthropic can run are left out, with a warning; pictures and files are refused.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import model_validator

from app.api.chat import LEFT_OUT, TEXT_ONLY
from app.core.errors import InvalidRequest
from app.serving.gate import Body

BILLING_HEADER = "x-anthropic-billing-header:"


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
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[Block] | Block | None" = None
    is_error: bool | None = None
    source: Source | str | None = None
    title: str | None = None


Blocks = str | list[Block]
UNREADABLE = frozenset({"image", "document"})
"""Types of blocks that the user wants the model to read: refused unless they hold text, never left out silently."""


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class AnthropicTool(Body):
    """A tool. The client describes and runs it if `type` is absent or `custom`; other types have no description."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
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
        described = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        function = {name: value for name, value in (described | {"strict": self.strict}).items() if value is not None}
        return {"type": "function", "function": function}


def is_left_out(block: Block) -> bool:
    """Return whether a model can make nothing of a block."""
    known = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference", "search_result"}
    return block.type not in known | UNREADABLE or (block.type == "tool_reference" and block.tool_name is None)


def nested_blocks(content: Any) -> Iterator[Block]:
    """Yield the blocks of `content`, each followed by its nested blocks unless it is left out."""
    blocks = [content] if isinstance(content, Block) else content if isinstance(content, list) else []
    for block in blocks:
        yield block
        within = block.source.content if isinstance(block.source, Source) else block.content
        yield from nested_blocks(None if is_left_out(block) else within)


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
    return "\n\n".join(_block_text(block) for block in blocks if not is_left_out(block))


def _block_text(block: Block) -> str:
    source = block.source
    if block.type == "text" and block.text is not None:
        return block.text
    if block.type == "tool_reference" and block.tool_name is not None:  # a result of a tool search
        return block.tool_name
    if block.type == "search_result" and isinstance(block.content, list):
        return "\n".join(
            [*filter(None, (block.title, source if isinstance(source, str) else None)), _text(block.content)]
        )
    if block.type == "document" and isinstance(source, Source):
        content = source.data if source.type == "text" else source.content if source.type == "content" else None
        if content is not None:
            return _text(content)
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
        content = "\n\n".join(_readable(part) for part in content if not is_left_out(part))
    if not block.is_error or "error" in content.lower():
        return content
    return f"Error: {content}" if content else "Error"


def turn_messages(turn: Turn) -> Iterable[dict[str, Any]]:
    """Convert a turn to OpenAI's messages; each tool result becomes a separate message, before the others."""
    blocks = [Block(text=turn.content)] if isinstance(turn.content, str) else turn.content
    calls, reasonings, other_blocks = [], [], []
    for block in blocks:
        match block.type:
            case "tool_result":
                yield {"role": "tool", "tool_call_id": block.tool_use_id or "-", "content": _result_text(block)}
            case "tool_use":
                function = {"name": block.name or "", "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
                calls.append({"id": block.id or "-", "type": "function", "function": function})
            case "thinking":
                reasonings.append(block.thinking or "")
            case "redacted_thinking":
                continue
            case _:
                other_blocks.append(block)
    if all(map(is_left_out, other_blocks)) and not calls:
        return
    message: dict[str, Any] = {"role": turn.role, "content": _text(other_blocks) if other_blocks else None}
    if calls:
        message["tool_calls"] = calls
    if reasonings:
        message["reasoning_content"] = "\n".join(reasonings)
    yield message
