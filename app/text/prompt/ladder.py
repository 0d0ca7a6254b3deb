"""Renders a conversation as sent or, if the template refuses it or omits a text, after repairs.

A refused conversation may need several repairs at once: they accumulate until the template accepts it, then the
needless ones are dropped. A repair for missing parts is retained only if it restores some. This costs extra renderings:
at most four for each repair of `LADDER`, and a dozen to find the message that is refused.
"""

import contextlib
import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from app.core.errors import InvalidRequest
from app.core.request import Notice
from app.text.dialect import REASONING_MARKERS
from app.text.prompt.messages import Messages
from app.text.prompt.repairs import CALLS_MISSING, LADDER, NULLS_WRITTEN, REFUSED, Repair, apply_repairs
from app.text.prompt.turns import SYSTEM, Conversation, calls_of, function_of

WRITTEN_NULLS = ("None", "null")
MIN_DISTINCT_CHARACTERS = 16
"""Length, in characters, from which a system text cannot occur in a prompt by accident."""
TOOL_DESCRIPTIONS = -1
"""Pseudo-position of a text that no message contains: the tools described as text."""
MAX_SEARCHES = 32
"""Limit on searches of the whole prompt for texts that are not at their expected position."""
MAX_NAMED_MESSAGES = 8
"""Limit on messages that one notice names."""
MAX_ERROR_CHARACTERS = 500
"""Longest quote of a template's error in a refusal, in characters."""

_REASONING_ENDS = (*(end for _, end in REASONING_MARKERS), "<channel|>", "</thinking>")
_ESCAPES = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
_NON_ALPHANUMERIC = re.compile(r"[\W_]+")
_SPELLINGS: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
"""Encodings in which templates write a text: as it is, or inside JSON."""

Render = Callable[[Conversation], str]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, the repairs that its conversation went through, and their notices."""

    text: str
    repairs: tuple[Repair, ...] = ()
    notices: tuple[Notice, ...] = ()


class _Attempt:
    """A rendering of `sent` after the repairs `required_repairs` and `added`."""

    def __init__(
        self, sent: Conversation, required_repairs: tuple[Repair, ...], added: tuple[Repair, ...], render: Render
    ) -> None:
        self.sent = sent
        self.added = added
        self.repairs = required_repairs + added
        adapted = apply_repairs(sent, required_repairs)
        self.conversation = apply_repairs(adapted, added)
        self.text = ""
        self.error: Exception | None = None
        self.missing_texts: set[int] = set()
        """Positions of the messages whose text is missing from the prompt."""
        self.missing_calls: set[int] = set()
        """Positions of the messages that have a call missing from the prompt."""
        try:
            self.text = render(self.conversation)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            self.error = error
            return
        search = _PromptSearch(self.text)
        if not search.finds(_added_text(sent.messages, adapted.messages), "system"):
            self.missing_texts.add(TOOL_DESCRIPTIONS)
        for position, message in enumerate(sent.messages):
            if not search.finds(_without_reasoning(message["content"] or ""), message["role"]):
                self.missing_texts.add(position)
            if not all(search.finds(_longest_argument(function_of(call)), "call") for call in calls_of(message)):
                self.missing_calls.add(position)
        self._check_stand_ins(render)

    def _check_stand_ins(self, render: Render) -> None:
        """Search for stand-ins of short texts, since the texts themselves could be in the prompt by accident."""
        stand_ins, stand_in_texts = _stand_ins(self.sent)
        if stand_in_texts:
            with contextlib.suppress(Exception):  # a refusal of stand-ins proves nothing
                text = render(apply_repairs(stand_ins, self.repairs))
                self.missing_texts |= {
                    position for stand_in_text, position in stand_in_texts.items() if stand_in_text not in text
                }

    @cached_property
    def nulls(self) -> int:
        """Number of "None" and "null" in the prompt; 0 if no content in the conversation is null."""
        holds = any(message["content"] is None for message in self.sent.messages)
        return sum(self.text.count(word) for word in WRITTEN_NULLS) if holds else 0

    @property
    def severity(self) -> tuple[bool, int, int, int]:
        """Severity of the rendering's flaws, as a sort key: lower is better."""
        return self.error is not None, len(self.missing_calls), len(self.missing_texts), self.nulls

    @property
    def flaws(self) -> set[str]:
        """Flaws that a repair may fix."""
        if self.error is not None:
            return {REFUSED}
        roles = {
            "system" if position == TOOL_DESCRIPTIONS else str(self.sent.messages[position]["role"])
            for position in self.missing_texts
        }
        return roles | ({CALLS_MISSING} if self.missing_calls else set()) | ({NULLS_WRITTEN} if self.nulls else set())


def render_with_repairs(sent: Conversation, required_repairs: tuple[Repair, ...], render: Render) -> Rendered:
    """Render `sent` after `required_repairs` and any others needed. Raises InvalidRequest, naming what is refused."""

    def attempt(added: tuple[Repair, ...]) -> _Attempt:
        return _Attempt(sent, required_repairs, added, render)

    first = best = attempt(())
    for repair in LADDER:
        if not repair.fixes & best.flaws or repair.apply(best.conversation) == best.conversation:
            continue
        candidate = attempt((*best.added, repair))
        if candidate.severity < best.severity or (best.error is not None and candidate.error is not None):
            best = candidate
    if best.error is not None:
        raise _refusal(first, render) from first.error
    if first.error is not None and len(best.added) > 1:
        best = _without_needless(best, attempt)
    return Rendered(best.text, best.repairs, tuple(_notices(best)))


def _without_needless(best: _Attempt, attempt: Callable[[tuple[Repair, ...]], _Attempt]) -> _Attempt:
    """Drop needless repairs: all but the last if it suffices alone, as it usually does, or else one by one."""
    alone = attempt(best.added[-1:])
    if alone.severity <= best.severity:
        return alone
    for repair in best.added if len(best.added) > 2 else ():
        fewer = attempt(tuple(retained for retained in best.added if retained is not repair))
        best = fewer if fewer.severity <= best.severity else best
    return best


# --- what is missing ----------------------------------------------------------------------------------------------


def _added_text(sent: Messages, adapted: Messages) -> str:
    """Return the text that the required repairs added to the first system message."""
    before, after = (
        "".join(message["content"] or "" for message in messages[:1] if message["role"] in SYSTEM)
        for messages in (sent, adapted)
    )
    return after.removeprefix(before).strip()


def _without_reasoning(text: str) -> str:
    return text[max(text.rfind(end) + len(end) if end in text else 0 for end in _REASONING_ENDS) :].strip()


def _longest_argument(function: Mapping[str, Any]) -> str:
    """Return the longest string in a call's arguments; empty if they are not an object."""
    arguments = function.get("arguments")
    pending, longest = [arguments] if isinstance(arguments, Mapping) else [], ""
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            longest = max(longest, value.strip(), key=len)
        elif isinstance(value, Mapping | list):
            pending += value.values() if isinstance(value, Mapping) else value
    return longest


class _PromptSearch:
    """Finds texts in a prompt, each after the previous one; the time grows with the prompt, not the text count."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._position = 0
        self._last_spelling: dict[str, Callable[[str], str]] = {}
        """Encoding of the text found last, by role."""
        self._searches_left = MAX_SEARCHES

    def finds(self, text: str, role: str) -> bool:
        """Return whether the prompt contains a text. After `MAX_SEARCHES` texts out of order, all count as found."""
        if (
            not text
            or self._searches_left == 0
            or self._find_from(self._last_spelling.get(role, str)(text), self._position)
        ):
            return True
        self._searches_left -= 1
        for spelled in _SPELLINGS:
            if self._find_from(spelled(text), 0):
                self._last_spelling[role] = spelled
                return True
        alphanumeric = _alphanumeric(text)
        return alphanumeric != "" and alphanumeric in self._alphanumeric

    def _find_from(self, text: str, start: int) -> bool:
        position = self._prompt.find(text, start)
        if position >= 0:
            self._position = position + len(text)
        return position >= 0

    @cached_property
    def _alphanumeric(self) -> str:
        return _alphanumeric(self._prompt)


def _alphanumeric(text: str) -> str:
    """Reduce a text to its letters and digits, so that line breaks, punctuation and escapes do not matter."""
    return _NON_ALPHANUMERIC.sub("", _ESCAPES.sub("", html.unescape(text)))


def _stand_ins(sent: Conversation) -> tuple[Conversation, dict[str, int]]:
    """Replace short system texts with stand-ins, except a single one at the start; map stand-ins to positions."""
    systems = [position for position, message in enumerate(sent.messages) if message["role"] in SYSTEM]
    stand_in_texts: dict[str, int] = {}
    messages = list(sent.messages)
    for position in systems if systems != [0] else ():
        if 0 < len((messages[position]["content"] or "").strip()) < MIN_DISTINCT_CHARACTERS:
            stand_in_text = f"standin{position}text"
            stand_in_texts[stand_in_text], messages[position] = (
                position,
                messages[position] | {"content": stand_in_text},
            )
    return replace(sent, messages=messages), stand_in_texts


# --- notices and refusals -----------------------------------------------------------------------------------------


def _notices(best: _Attempt) -> Iterator[Notice]:
    before = best.sent
    for repair in best.repairs:
        after = repair.apply(before)
        if repair.code and after != before:
            yield Notice(code=repair.code, message=repair.message, parameter=repair.parameter)
        before = after
    for code, what, missing in (
        ("text_missing", "the text", best.missing_texts),
        ("tool_calls_missing", "calls", best.missing_calls),
    ):
        if missing:
            message = f"This model's chat template leaves out {what} of {_listed(best.sent.messages, sorted(missing))}."
            yield Notice(code=code, message=message, parameter="messages")


def _listed(messages: Messages, positions: Sequence[int]) -> str:
    names = [
        "the tools" if position == TOOL_DESCRIPTIONS else _message_name(messages, position)
        for position in positions[:MAX_NAMED_MESSAGES]
    ]
    return ", ".join(names) + (
        f" and {len(positions) - MAX_NAMED_MESSAGES} more" if len(positions) > MAX_NAMED_MESSAGES else ""
    )


def _message_name(messages: Messages, position: int) -> str:
    return f"messages.{position} ({messages[position]['role']})"


def _refusal(first: _Attempt, render: Render) -> InvalidRequest:
    """Name the message at which the refusal begins, unless every conversation is refused like this."""
    messages, error_text = first.sent.messages, _error_text(first.error)

    def is_refused(prefix: Messages) -> bool:
        try:
            render(apply_repairs(replace(first.sent, messages=prefix), first.repairs))
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            return _error_text(error) == error_text
        return False

    subject = "the request"
    if not is_refused([{"role": "user", "content": "a"}]):
        low, high = 0, len(messages)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_refused(messages[:middle]) else (middle, high)
        subject = _message_name(messages, high - 1)
    return InvalidRequest(f"this model's chat template refuses {subject}: {error_text}", parameter="messages")


def _error_text(error: Exception | None) -> str:
    detail = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return " ".join(detail.split())[:MAX_ERROR_CHARACTERS]
