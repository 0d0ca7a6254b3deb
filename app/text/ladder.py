"""Renders a conversation as it was sent or, if the template refuses it or leaves out a text, repaired.

A refused conversation may need several repairs at once: they add up until the template accepts it, then the needless
ones are dropped. A repair for missing parts is kept only if it brings some back. So a template renders a few more
times: at most four for each repair of `LADDER`, and a dozen to find what it refuses.
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
from app.text.messages import Messages
from app.text.repairs import CALLS_MISSING, LADDER, NULLS_WRITTEN, REFUSED, Repair, repaired
from app.text.turns import SYSTEM, Conversation, calls_of, function_of

WRITTEN_NULLS = ("None", "null")
SURE_CHARACTERS = 16
"""Shortest system text, in characters, that is not found in a prompt by accident."""
OURS = -1
"""Place, among those of the messages that were sent, of a text that was not: the tools in words."""
MOST_SEARCHES = 32
"""Limit on searches of a whole prompt for texts that are not where they were expected."""
MOST_NAMED = 8
"""Limit on messages that one notice names."""
MOST_WORDS = 500
"""Longest quote of a template's error in a refusal, in characters."""

_ENDS_OF_THOUGHTS = ("</think>", "[/THINK]", "</seed:think>", "<channel|>", "<|END_THINKING|>", "</thinking>")
_ESCAPES = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
_NO_LETTERS = re.compile(r"[\W_]+")
_SPELLINGS: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
"""Ways in which templates write a text: as it is, or inside JSON."""

Render = Callable[[Conversation], str]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, the repairs that its conversation went through, and their notices."""

    text: str
    repairs: tuple[Repair, ...] = ()
    notices: tuple[Notice, ...] = ()


class _Attempt:
    """A rendering of `sent` after the repairs `forms` and `added`."""

    def __init__(
        self, sent: Conversation, forms: tuple[Repair, ...], added: tuple[Repair, ...], render: Render
    ) -> None:
        self.sent = sent
        self.added = added
        self.repairs = forms + added
        formed = repaired(sent, forms)
        self.conversation = repaired(formed, added)
        self.text = ""
        self.error: Exception | None = None
        self.unseen: set[int] = set()
        """Places of the messages whose text is missing."""
        self.uncalled: set[int] = set()
        """Places of the messages that lack a call."""
        try:
            self.text = render(self.conversation)
        except Exception as error:  # noqa: BLE001 - templates fail in any way they like
            self.error = error
            return
        search = _TextSearch(self.text)
        if not search.finds(_own_text(sent.messages, formed.messages), "system"):
            self.unseen.add(OURS)
        for place, message in enumerate(sent.messages):
            if not search.finds(_behind_thoughts(message["content"] or ""), message["role"]):
                self.unseen.add(place)
            if not all(search.finds(_longest(function_of(call)), "call") for call in calls_of(message)):
                self.uncalled.add(place)
        self._doubt(render)

    def _doubt(self, render: Render) -> None:
        """Look for stand-ins of short texts, since these could be in the prompt by accident."""
        stand_ins, marks = _stand_ins(self.sent)
        if marks:
            with contextlib.suppress(Exception):  # a refusal of stand-ins says nothing
                text = render(repaired(stand_ins, self.repairs))
                self.unseen |= {place for mark, place in marks.items() if mark not in text}

    @cached_property
    def nulls(self) -> int:
        """Number of "None" and "null" in the prompt; 0 if no content in the conversation is null."""
        holds = any(message["content"] is None for message in self.sent.messages)
        return sum(self.text.count(word) for word in WRITTEN_NULLS) if holds else 0

    @property
    def faults(self) -> tuple[bool, int, int, int]:
        """Rank of the rendering: lower is better."""
        return self.error is not None, len(self.uncalled), len(self.unseen), self.nulls

    @property
    def flaws(self) -> set[str]:
        """Flaws that a repair may mend."""
        if self.error is not None:
            return {REFUSED}
        roles = {"system" if place == OURS else str(self.sent.messages[place]["role"]) for place in self.unseen}
        return roles | ({CALLS_MISSING} if self.uncalled else set()) | ({NULLS_WRITTEN} if self.nulls else set())


def climb(sent: Conversation, forms: tuple[Repair, ...], render: Render) -> Rendered:
    """Render `sent` after `forms` and the repairs it needs. Raises InvalidRequest, which names what is refused."""

    def attempt(added: tuple[Repair, ...]) -> _Attempt:
        return _Attempt(sent, forms, added, render)

    first = best = attempt(())
    for repair in LADDER:
        if not repair.mends & best.flaws or repair.apply(best.conversation) == best.conversation:
            continue
        tried = attempt((*best.added, repair))
        if tried.faults < best.faults or (best.error is not None and tried.error is not None):
            best = tried
    if best.error is not None:
        raise _refusal(first, render) from first.error
    if first.error is not None and len(best.added) > 1:
        best = _without_needless(best, attempt)
    return Rendered(best.text, best.repairs, tuple(_notices(best)))


def _without_needless(best: _Attempt, attempt: Callable[[tuple[Repair, ...]], _Attempt]) -> _Attempt:
    """Drop repairs without which nothing is lost: all but the last, which usually suffices, or else one by one."""
    alone = attempt(best.added[-1:])
    if alone.faults <= best.faults:
        return alone
    for repair in best.added if len(best.added) > 2 else ():
        fewer = attempt(tuple(kept for kept in best.added if kept is not repair))
        best = fewer if fewer.faults <= best.faults else best
    return best


# --- what is missing ----------------------------------------------------------------------------------------------


def _own_text(sent: Messages, formed: Messages) -> str:
    """Return what the forms added to the first system message, without the text sent."""
    was, now = (
        "".join(message["content"] or "" for message in some[:1] if message["role"] in SYSTEM)
        for some in (sent, formed)
    )
    return now.removeprefix(was).strip()


def _behind_thoughts(text: str) -> str:
    return text[max(text.rfind(end) + len(end) if end in text else 0 for end in _ENDS_OF_THOUGHTS) :].strip()


def _longest(called: Mapping[str, Any]) -> str:
    """Return the longest string in a call's arguments; empty if they are not an object."""
    arguments = called.get("arguments")
    waiting, longest = [arguments] if isinstance(arguments, Mapping) else [], ""
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            longest = max(longest, value.strip(), key=len)
        elif isinstance(value, Mapping | list):
            waiting += value.values() if isinstance(value, Mapping) else value
    return longest


class _TextSearch:
    """Finds texts in a prompt, each behind the previous one; time grows with the prompt, not with their number."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._place = 0
        self._usual: dict[str, Callable[[str], str]] = {}
        """Spelling of the last text of each role."""
        self._left = MOST_SEARCHES

    def finds(self, text: str, role: str) -> bool:
        """Return whether a text is there. After `MOST_SEARCHES` texts out of order, all others count as found."""
        if not text or self._left == 0 or self._goes_to(self._usual.get(role, str)(text), self._place):
            return True
        self._left -= 1
        for spelled in _SPELLINGS:
            if self._goes_to(spelled(text), 0):
                self._usual[role] = spelled
                return True
        letters = _letters(text)
        return letters != "" and letters in self._letters

    def _goes_to(self, text: str, start: int) -> bool:
        place = self._prompt.find(text, start)
        if place >= 0:
            self._place = place + len(text)
        return place >= 0

    @cached_property
    def _letters(self) -> str:
        return _letters(self._prompt)


def _letters(text: str) -> str:
    """Reduce a text to its letters and digits, the same however its lines, marks and escapes are written."""
    return _NO_LETTERS.sub("", _ESCAPES.sub("", html.unescape(text)))


def _stand_ins(sent: Conversation) -> tuple[Conversation, dict[str, int]]:
    """Replace short system texts with marks, except one that is first and alone; map each mark to its place."""
    systems = [place for place, message in enumerate(sent.messages) if message["role"] in SYSTEM]
    marks: dict[str, int] = {}
    messages = list(sent.messages)
    for place in systems if systems != [0] else ():
        if 0 < len((messages[place]["content"] or "").strip()) < SURE_CHARACTERS:
            mark = f"standin{place}text"
            marks[mark], messages[place] = place, messages[place] | {"content": mark}
    return replace(sent, messages=messages), marks


# --- notices and refusals -----------------------------------------------------------------------------------------


def _notices(best: _Attempt) -> Iterator[Notice]:
    before = best.sent
    for repair in best.repairs:
        after = repair.apply(before)
        if repair.code and after != before:
            yield Notice(code=repair.code, message=repair.message, parameter=repair.parameter)
        before = after
    for code, what, places in (
        ("text_missing", "the text", best.unseen),
        ("tool_calls_missing", "calls", best.uncalled),
    ):
        if places:
            message = (
                f"The chat template of this model leaves out {what} of {_named(best.sent.messages, sorted(places))}."
            )
            yield Notice(code=code, message=message, parameter="messages")


def _named(messages: Messages, places: Sequence[int]) -> str:
    named = ["the tools" if place == OURS else _name(messages, place) for place in places[:MOST_NAMED]]
    return ", ".join(named) + (f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else "")


def _name(messages: Messages, place: int) -> str:
    return f"messages.{place} ({messages[place]['role']})"


def _refusal(first: _Attempt, render: Render) -> InvalidRequest:
    """Name the message at which the refusal begins, unless every conversation is refused like this."""
    messages, words = first.sent.messages, _words(first.error)

    def is_refused(begun: Messages) -> bool:
        try:
            render(repaired(replace(first.sent, messages=begun), first.repairs))
        except Exception as error:  # noqa: BLE001 - the template's again
            return _words(error) == words
        return False

    named = "the request"
    if not is_refused([{"role": "user", "content": "a"}]):
        low, high = 0, len(messages)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_refused(messages[:middle]) else (middle, high)
        named = _name(messages, high - 1)
    return InvalidRequest(f"the chat template of this model refuses {named}: {words}", parameter="messages")


def _words(error: Exception | None) -> str:
    detail = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return " ".join(detail.split())[:MOST_WORDS]
