"""One conversation rendered by one template: its prompt, the prompt that continues a message, and variants of both."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from app.core.errors import InvalidRequest
from app.text.dialect import Dialect
from app.text.prompt.ladder import Rendered, render_with_repairs
from app.text.prompt.messages import Messages, mapped_arguments
from app.text.prompt.repairs import Repair, apply_repairs, required_repairs
from app.text.prompt.turns import Conversation

CONTINUATION_MARKER = "continuedhere"
"""Marker appended to the text to continue, to find its end in the prompt."""

STAND_IN = "toolstandin"
"""Placeholder in tools and calls, to test whether a template shows them."""

RenderTemplate = Callable[[dict[str, Any]], str]


class Template:
    """One of a model's chat templates, with its source and dialect."""

    def __init__(self, render: RenderTemplate, source: str, dialect: Dialect) -> None:
        self.render = render
        self._source = source
        self._dialect = dialect

    @cached_property
    def required_repairs(self) -> tuple[Repair, ...]:
        """Repairs that every conversation with this template needs."""
        return required_repairs(self._source, self._dialect, self)

    def shows_tools(self) -> bool:
        """Return whether tools appear in its prompts; True if the template refuses the probe."""
        return self._renders(STAND_IN, [], STAND_IN, default=True)

    def shows_calls(self, content: str | None, number: int) -> bool:
        """Return whether `number` parallel calls appear next to `content`. If the template refuses the probe, a
        single call is assumed to appear if the source mentions `tool_calls`."""
        called = _called(content, ["a"] * (number - 1) + [STAND_IN], "abcdefgh")
        return self._renders("a", called, STAND_IN, default=number == 1 and "tool_calls" in self._source)

    def numbers_calls(self) -> bool:
        """Return whether call ids must consist of function and number: the template writes such ids for calls but the
        sent ids for results, or it is Kimi's and shows a call's id but not its function's name."""
        called = _called("", ["a"], STAND_IN)
        if self._renders("a", called, "functions.a:0", f"{STAND_IN}0", default=False):
            return True
        has_names = self._renders("a", _called("", ["a"], "abcdefgh", name=STAND_IN), STAND_IN, default=True)
        return self._dialect.parser == "kimi_k2" and not has_names

    def _renders(self, tool: str, messages: Messages, *expected: str, default: bool) -> bool:
        parameters = {"type": "object", "properties": {}}
        tools = [{"type": "function", "function": {"name": tool, "description": "a", "parameters": parameters}}]
        variables = {
            "messages": [{"role": "user", "content": "a"}, *messages],
            "tools": tools,
            "add_generation_prompt": True,
        }
        try:
            text = self.render({"bos_token": "", "eos_token": "", "documents": None} | variables)
        except Exception:  # noqa: BLE001 - a template may raise anything
            return default
        return all(word in text for word in expected)


def _called(content: str | None, words: Sequence[str], identifier: str, name: str = "a") -> Messages:
    """Return parallel calls of a function, one for each word, and their results."""
    functions = [{"name": name, "arguments": mapped_arguments(json.dumps({"a": word}))} for word in words]
    calls = [
        {"id": f"{identifier}{n}", "type": "function", "function": function} for n, function in enumerate(functions)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "a"} for call in calls]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation with the template that renders it and the template's other variables."""

    template: Template
    variables: dict[str, Any]
    conversation: Conversation

    @property
    def messages(self) -> Messages:
        """Messages as they were sent."""
        return self.conversation.messages

    def prompt(self) -> Rendered:
        """Render the prompt up to where the answer begins. Raises InvalidRequest."""
        return render_with_repairs(
            self.conversation,
            self.template.required_repairs,
            lambda conversation: self._render(conversation, opens_answer=True),
        )

    def continued(self) -> Rendered:
        """Render the prompt up to where the last message ends. Raises InvalidRequest."""
        last = self.messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise InvalidRequest("only an assistant message with text can be continued", parameter="messages")
        text = last["content"] or ""
        marked = last | {"content": text.rstrip() + CONTINUATION_MARKER}
        conversation = replace(self.conversation, messages=[*self.messages[:-1], marked])
        rendered = render_with_repairs(
            conversation,
            self.template.required_repairs,
            lambda conversation: self._render(conversation, opens_answer=False),
        )
        before, marker, _ = rendered.text.rpartition(CONTINUATION_MARKER)
        if not marker:
            reason = "this model's chat template leaves out the message to be continued"
            raise InvalidRequest(reason, parameter="messages")
        return replace(rendered, text=before + text[len(text.rstrip()) :])

    def variants(self, *, continues: bool) -> Iterator[tuple[Messages, bool]]:
        """Yield chats that begin like this one, each with a flag: whether its prompt opens an answer.

        They share with this chat the system part, the turns before the last user turn, or everything but the answer.
        """
        messages = self.messages
        users = [position for position, message in enumerate(messages) if message["role"] == "user"]
        for position in dict.fromkeys((*users[:1], *users[-1:])):
            first_character = (messages[position]["content"] or "").lstrip()[:1]
            other = {**messages[position], "content": "b" if first_character == "a" else "a"}
            yield [*messages[:position], other, *messages[position + 1 :]], True
        yield messages[:-1] if continues else messages, False

    def render_variant(self, messages: Messages, repairs: tuple[Repair, ...], *, opens_answer: bool) -> str:
        """Render other messages with the same repairs. Raises whatever the template raises."""
        return self._render(
            apply_repairs(replace(self.conversation, messages=messages), repairs), opens_answer=opens_answer
        )

    def _render(self, conversation: Conversation, *, opens_answer: bool) -> str:
        named = {"messages": conversation.messages, "tools": conversation.tools, "add_generation_prompt": opens_answer}
        return self.template.render(self.variables | named)
