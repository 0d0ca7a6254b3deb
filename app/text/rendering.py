"""One conversation before one template: its prompt, the same up to where a message is continued, and others like it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from app.core.errors import InvalidRequest
from app.text.ladder import Rendered, climb
from app.text.messages import Messages
from app.text.repairs import Repair, repaired
from app.text.turns import Conversation

CONTINUED = "continuedhere"
"""Word behind a text that is to be continued, by which its end is found in the prompt."""

Renderer = Callable[[dict[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation before a template, with all else that it is shown, and what it always goes through."""

    render: Renderer
    variables: dict[str, Any]
    conversation: Conversation
    forms: tuple[Repair, ...]

    @property
    def messages(self) -> Messages:
        """What was sent."""
        return self.conversation.messages

    def prompt(self) -> Rendered:
        """Up to where an answer begins. Raises InvalidRequest."""
        return climb(self.conversation, self.forms, lambda shown: self._text(shown, prompted=True))

    def continued(self) -> Rendered:
        """Up to where the last message ends. Raises InvalidRequest."""
        last = self.messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise InvalidRequest("only a text of the assistant can be continued", parameter="messages")
        text = last["content"] or ""
        marked = last | {"content": text.rstrip() + CONTINUED}
        conversation = replace(self.conversation, messages=[*self.messages[:-1], marked])
        rendered = climb(conversation, self.forms, lambda shown: self._text(shown, prompted=False))
        before, found, _ = rendered.text.rpartition(CONTINUED)
        if not found:
            reason = "the chat template of this model leaves out the message that is to be continued"
            raise InvalidRequest(reason, parameter="messages")
        return replace(rendered, text=before + text[len(text.rstrip()) :])

    def variants(self, *, continues: bool) -> Iterator[tuple[Messages, bool]]:
        """List chats that begin like this one, and whether the answer begins behind them.

        With the same system part, with the same turns up to the last of the user, and the same without the answer.
        """
        messages = self.messages
        users = [place for place, message in enumerate(messages) if message["role"] == "user"]
        for place in dict.fromkeys((*users[:1], *users[-1:])):
            begun = (messages[place]["content"] or "").lstrip()[:1]
            other = {**messages[place], "content": "b" if begun == "a" else "a"}
            yield [*messages[:place], other, *messages[place + 1 :]], True
        yield messages[:-1] if continues else messages, False

    def again(self, messages: Messages, repairs: tuple[Repair, ...], *, prompted: bool) -> str:
        """The text of other messages that go through the same. Raises what the template raises."""
        return self._text(repaired(replace(self.conversation, messages=messages), repairs), prompted=prompted)

    def _text(self, shown: Conversation, *, prompted: bool) -> str:
        named = {"messages": shown.messages, "tools": shown.tools, "add_generation_prompt": prompted}
        return self.render(self.variables | named)
