"""The stream of an answer taken apart by the dialect of its model: what it says, what it thinks, what it calls.

Nothing here depends on how a text was cut: the same pieces come of it, token by token or at once.
"""

import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from app.core.messages import ToolCallDelta
from app.text.dialect import (
    BARE_JSON,
    HARMONY,
    HARMONY_ENDS,
    HARMONY_LAST,
    JSON_CALLS,
    NO_DIALECT,
    PYTHON_TAG,
    Dialect,
    parse_calls,
    with_json_calls,
)
from app.text.stops import StopMatcher

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_CLOSING = re.compile(r"\s*\}?\s*")
"""Between the arguments and the mark that ends a call."""
_CHANNEL = re.compile(r"(?:<\|start\|>assistant)?(?:<\|channel\|>(\w+))?(?:[^<]*?to=(?:functions\.)?([\w.:/-]+))?")

_logger = logging.getLogger("paceline.dialect")


class AnswerPart(msgspec.Struct, kw_only=True):
    """What came of a piece of text; `spans` are (start, end) in `text`."""

    text: str = ""
    marks: bytearray = msgspec.field(default_factory=bytearray)
    """Of each character of `text`: whether a draft made it."""
    reasoning: str = ""
    calls: list[ToolCallDelta] = []

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of what drafts made of `text`."""
        return spans_of(self.marks)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


def spans_of(marks: bytes | bytearray) -> tuple[tuple[int, int], ...]:
    """Where runs of 1 begin and end."""
    spans, position = [], 0
    for marked, run in groupby(marks):
        end = position + len(tuple(run))
        if marked:
            spans.append((position, end))
        position = end
    return tuple(spans)


class AnswerSplitter:
    """Takes one answer apart. `inside`: it goes on with reasoning that the prompt opened; `tools`: what it may call.

    `by_grammar`: calls are JSON between marks, whatever the model writes by itself.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        inside: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        by_grammar: bool = False,
    ) -> None:
        self._final: AnswerSplitter | None = None
        """Of harmony's last channel, where a grammar holds the calls in it."""
        if by_grammar and dialect.parser == HARMONY:
            self._final, tools = AnswerSplitter(with_json_calls(NO_DIALECT), tools=tools), ()
        elif by_grammar or not dialect.parser:
            dialect = with_json_calls(dialect)
        self._dialect = dialect
        self._tools = list(tools)
        self._held = ""
        self._marks = bytearray()
        self._opening = dialect.opening
        self._begun = False
        """Whether anything but white space came as content."""
        self._trims = False
        """Whether white space at the beginning of what follows is none of it."""
        self._call: _JsonCall | None = None
        self._read = self._content
        self.calls = 0
        """That began."""
        self.is_calling = False
        """Whether the last one is still being written."""
        if dialect.parser == HARMONY:
            self._read = self._harmony
        elif inside and self._opening:
            self._read, self._trims = self._reasoning, True

    def feed(self, text: str, spans: Sequence[tuple[int, int]] = (), *, final: bool = False) -> AnswerPart:
        """More text, of which `spans` came from drafts; `final`: there is no more."""
        self._held += text
        marks = bytearray(len(text))
        for start, end in spans:
            marks[start:end] = b"\1" * (end - start)
        self._marks += marks
        part = AnswerPart()
        while self._read(part, final):
            pass
        return part

    def _take(self, count: int) -> tuple[str, bytearray]:
        text, marks = self._held[:count], self._marks[:count]
        self._held, self._marks = self._held[count:], self._marks[count:]
        return text, marks

    def _tell(self, part: AnswerPart, count: int) -> None:
        text, marks = self._take(count)
        part.text += text
        part.marks += marks
        self._begun |= bool(text.strip())

    def _drop_space(self, final: bool) -> bool:  # noqa: FBT001
        """Whether what follows begins here: white space that is none of it is gone."""
        if self._trims:
            self._take(len(self._held) - len(self._held.lstrip()))
            self._trims = not self._held
        return not self._trims or final

    # --- each reads what is held as far as it is certain; True: there may be more to read ------------------------

    def _content(self, part: AnswerPart, final: bool) -> bool:  # noqa: FBT001
        if not self._drop_space(final):
            return False
        if not self._begun and (decided := self._beginning(final)) is not None:
            return decided
        start = self._dialect.call_start if self._tools else ""
        place = self._held.find(start) if start else -1
        if place >= 0:
            self._tell(part, len(self._held[:place].rstrip()))
            self._take(len(self._held) - len(self._held.lstrip()) if self._held.lstrip().startswith(start) else 0)
            self._take(len(start))
            self._read, self._call = self._call_text, None
            return True
        safe = StopMatcher([start]).safe_length(self._held)
        self._tell(part, len(self._held) if final else len(self._held[:safe].rstrip()) if start else safe)
        return False

    def _beginning(self, final: bool) -> bool | None:  # noqa: FBT001
        """What an answer may begin with: reasoning, or calls that have no marks. None: with neither."""
        text = self._held.lstrip()
        if self._opening and text.startswith(self._opening):
            self._take(len(self._held) - len(text) + len(self._opening))
            self._read, self._trims = self._reasoning, True
            return True
        if self._opening and not final and self._opening.startswith(text):
            return False
        bare = self._tools and self._dialect.parser == BARE_JSON
        if bare and text.startswith(("{", "[", PYTHON_TAG)):
            self._read = self._bare_calls
            return True
        return False if bare and not final and PYTHON_TAG.startswith(text) else None

    def _reasoning(self, part: AnswerPart, final: bool) -> bool:  # noqa: FBT001
        if not self._drop_space(final):
            return False
        closing = self._dialect.closing
        place = self._held.find(closing)
        if place >= 0:
            part.reasoning += self._take(place)[0].rstrip()
            self._take(len(closing))
            self._read, self._trims, self._opening = self._content, True, ""
            return True
        safe = len(self._held) if final else StopMatcher([closing]).safe_length(self._held)
        part.reasoning += self._take(len(self._held[:safe].rstrip()))[0]
        return False

    def _call_text(self, part: AnswerPart, final: bool) -> bool:  # noqa: FBT001
        """Behind the mark that begins a call."""
        if self._call is not None:
            return self._json_call(part, final)
        end = self._dialect.call_end
        place = self._held.find(end) if end else -1
        if self._dialect.parser == JSON_CALLS and (header := _HEADER.match(self._held)):
            if header.end() == len(self._held) and not final:
                return False
            if self._held[header.end() : header.end() + 1] == "{":
                self._begin_call(part, header.group(1))
                self._take(header.end())
                return True
        if place < 0 and not final:
            return False
        body = self._take(len(self._held) if place < 0 else place)[0]
        if place >= 0:
            self._take(len(end))
        self._whole(part, body, self._dialect.call_start + body + (end if place >= 0 else ""))
        self._read, self._trims = self._content, True
        return True

    def _begin_call(self, part: AnswerPart, name: str) -> None:
        part.calls.append(ToolCallDelta(index=self.calls, id=f"call_{secrets.token_hex(12)}", name=name))
        self._call, self.calls, self.is_calling = _JsonCall(), self.calls + 1, True

    def _json_call(self, part: AnswerPart, final: bool) -> bool:  # noqa: FBT001
        """Arguments as they are written, then what closes the call."""
        call = self._call or _JsonCall()
        if not call.complete:
            arguments, _ = self._take(call.scan(self._held))
            if arguments:
                part.calls.append(ToolCallDelta(index=self.calls - 1, arguments=arguments))
            if not call.complete:
                return False
            self.is_calling = False
        if self._dialect.parser == HARMONY:
            return self._after_harmony(part, final)
        end = self._dialect.call_end
        behind = _CLOSING.match(self._held)
        rest = self._held[behind.end() if behind else 0 :]
        if end.startswith(rest) and rest != end and not final:
            return False
        self._take(len(self._held) - len(rest) + (len(end) if rest.startswith(end) else 0))
        self._read, self._trims, self._call = self._content, True, None
        return True

    def _bare_calls(self, part: AnswerPart, final: bool) -> bool:  # noqa: FBT001
        if not final:
            return False
        text = self._take(len(self._held))[0]
        self._whole(part, text.strip().removeprefix(PYTHON_TAG), text)
        return False

    def _whole(self, part: AnswerPart, body: str, written: str) -> None:
        """A call that is parsed at once; what is none is told as it was written."""
        calls = parse_calls(self._dialect.parser, body, self._tools)
        if not calls:
            _logger.warning("what looks like a tool call is none, and told as text: %.200r", written)
            part.text += written
            part.marks += bytearray(len(written))
            self._begun = True
        for name, arguments in calls:
            identifier = f"call_{secrets.token_hex(12)}"
            part.calls.append(ToolCallDelta(index=self.calls, id=identifier, name=name, arguments=arguments))
            self.calls += 1

    # --- harmony: messages of channels -----------------------------------------------------------------------------

    def _harmony(self, part: AnswerPart, final: bool) -> bool:  # noqa: FBT001
        """The header of a message."""
        for mark in HARMONY_LAST:
            if self._held.startswith(mark):
                self._take(len(mark))
                return True
        mark = "<|message|>"
        place = self._held.find(mark)
        if not self._held.lstrip().startswith("<|") and not "<|".startswith(self._held.lstrip()):
            self._tell(part, len(self._held))  # no message at all
            return False
        if place < 0:
            if final:
                self._tell(part, len(self._held))
            return False
        header, _ = self._take(place)
        self._take(len(mark))
        found = _CHANNEL.match(header.strip())
        channel, recipient = found.groups() if found else (None, None)
        if recipient and self._tools:
            self._begin_call(part, recipient)
            self._read = self._call_text
        elif channel == "analysis":
            self._read = self._harmony_reasoning
        else:
            self._read = self._harmony_content
        return True

    def _harmony_reasoning(self, part: AnswerPart, final: bool) -> bool:  # noqa: FBT001
        count, ended = self._message_end(final)
        part.reasoning += self._take(count)[0]
        return ended and self._after_harmony(part, final)

    def _harmony_content(self, part: AnswerPart, final: bool) -> bool:  # noqa: FBT001
        count, ended = self._message_end(final)
        if self._final is None:
            self._tell(part, count)
        else:
            text, marks = self._take(count)
            inner = self._final.feed(text, spans_of(marks), final=final or ended)
            part.text, part.marks, part.calls = (
                part.text + inner.text,
                part.marks + inner.marks,
                part.calls + inner.calls,
            )
            self.calls = self._final.calls
        return ended and self._after_harmony(part, final)

    def _message_end(self, final: bool) -> tuple[int, bool]:  # noqa: FBT001
        """How much belongs to the message, and whether its end is there."""
        places = [place for mark in HARMONY_ENDS if (place := self._held.find(mark)) >= 0]
        if places:
            return min(places), True
        return len(self._held) if final else StopMatcher(HARMONY_ENDS).safe_length(self._held), False

    def _after_harmony(self, part: AnswerPart, final: bool) -> bool:  # noqa: ARG002, FBT001
        """Behind a message: what is written up to the next one is nothing."""
        count, ended = self._message_end(final)
        self._take(count)
        self._call = None
        self._read = self._harmony if ended else self._after_harmony
        return ended


class ReasoningCount:
    """How many tokens of an answer are reasoning, whoever drafted them: those up to the mark that ends it."""

    def __init__(self, dialect: Dialect) -> None:
        self._closing = (HARMONY_LAST[0] if dialect.parser == HARMONY else dialect.closing).encode()
        self._tail = b""
        self._ended = not self._closing
        self.tokens = 0

    def feed(self, pieces: Iterable[bytes]) -> None:
        """The bytes of each further token."""
        for piece in pieces:
            if self._ended:
                return
            self.tokens += 1
            self._tail = self._tail[1 - len(self._closing) :] + piece
            self._ended = self._closing in self._tail


class _JsonCall:
    """One JSON object that is being written: where it ends."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._in_string = self._escaped = False

    def scan(self, text: str) -> int:
        """How many characters of `text` belong to it."""
        for place, letter in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return place + 1
        return len(text)
