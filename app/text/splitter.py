"""Splits the stream of an answer into text, reasoning and tool calls, by the dialect of its model.

Only a call that names a tool of the request counts as one; everything else is text, exactly as it was written. The
result does not depend on how the text was cut: token by token or all at once, the pieces are the same.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import regex

from app.core.messages import ToolCallDelta
from app.text.call_reader import CallReader, CallsEnded, CallSender
from app.text.calls import Call, listed_calls, offered, python_calls
from app.text.detokenizer import TextStream
from app.text.dialect import (
    FORMS,
    HARMONY,
    HARMONY_ENDS,
    HARMONY_LAST,
    MAX_SPACE,
    Dialect,
    compiled,
    patterns,
    with_json_calls,
)
from app.text.stops import MarkedText, OutgoingText, spans_of
from app.text.unread_text import UnreadText

_HEADER = compiled(
    r"(?=\s*(?:<\||to=))\s*(?:<\|(?:end|call|return)\|>\s*)*(?:<\|start\|>\s*assistant)?"
    r"\s*(?:to=(?:functions\.)?(?P<to>[^\s<]+)\s*)?(?:<\|channel\|>\s*(?P<channel>\w+))?"
    r"\s*(?:to=(?:functions\.)?(?P<name>[^\s<]+))?[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
"""Header of a harmony message."""
_ENDS = "|".join(map(regex.escape, HARMONY_ENDS))
_MARK = compiled(rf"\s*(?:{_ENDS}|<\|message\|>)")
_EMPTY = compiled(rf"\s*(?:{_ENDS})")
_BARE = (
    compiled(
        r'\s*(?:<\|python_tag\|>|<tools>|```\w*)?\s*\[?\s*\{\s*"(?:(?:name|tool_name|function)"\s*:\s*"(?P<name>[^"]*)"'
        r'|(?:arguments|parameters|function)"\s*:\s*\{|type"\s*:\s*"function")'
    ),
    compiled(r"\s*(?:<\|python_tag\|>|```\w*)?\s*\[\s*(?P<name>[\w.:/-]+)\s*\("),
)
"""Beginnings of an answer that may be nothing but calls without marks."""
_WRAPPED = regex.compile(r"(?s)\s*(?:<\|python_tag\|>|<tools>|```\w*)?(?P<body>.*?)(?:</tools>|</tool_call>|```)?\s*")
_LINES = "\n\n"
"""Separator of two harmony messages that are both text, or both reasoning."""

Reading = Generator[None, None, bool]
"""Reader whose every `yield` asks for more text."""
Tell = Callable[[MarkedText], None]


class AnswerPart(msgspec.Struct, kw_only=True):
    """Piece of an answer: first reasoning, then text, then calls."""

    reasoning: str = ""
    text: str = ""
    marks: bytearray = msgspec.field(default_factory=bytearray)
    """One byte for each character of `text`: 1 if it was drafted."""
    calls: list[ToolCallDelta] = []

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Spans (start, end) of `text` that were drafted."""
        return spans_of(self.marks)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


class _Stopped(Exception):
    """A stop string was met."""


class AnswerSplitter:
    """Splits one answer. `inside`: it begins inside reasoning that the prompt opened; `tools`: the tools it may call.

    `by_grammar`: calls are JSON between marks, whatever the model's own form. `stop`: strings that end the text, but
    not reasoning or arguments. `one_call`: the first call ends the answer. `taken_ids`: ids that no call may have.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        inside: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        by_grammar: bool = False,
        stop: Sequence[str] = (),
        one_call: bool = False,
        taken_ids: Iterable[str] = (),
    ) -> None:
        is_harmony = dialect.parser == HARMONY
        if by_grammar or is_harmony or not dialect.parser:
            dialect = with_json_calls(dialect)
        self._opening, self._closing = dialect.opening, dialect.closing
        self._form, self._patterns = FORMS[dialect.parser], patterns(dialect.parser)
        self._open_inner = partial(
            AnswerSplitter, msgspec.structs.replace(dialect, opening="", closing=""), tools=tools
        )
        """Factory of the splitter that reads possible calls at the end of reasoning."""
        self._by_grammar = by_grammar
        self._tools = offered(tools)
        self._written = UnreadText()
        self._said = OutgoingText(stop, calls=bool(tools))
        self._thought: str | None = None
        """White space held back behind the reasoning; None before any reasoning."""
        self._cut = False
        self._parts: list[AnswerPart] = []
        self._calls = CallSender(self._begin_call, self._call, one_call=one_call, taken=taken_ids)
        self._reader = CallReader(self._written, self._tools, self._patterns, self._calls)
        self.ended = False
        """Whether the rest of the answer is ignored."""
        if is_harmony:
            self._reading = self._messages()
        else:
            self._written.add(MarkedText(self._form.begun, bytes(len(self._form.begun))))
            self._reading = self._answer(inside and bool(dialect.opening))

    @property
    def met(self) -> str:
        """Stop string that ended the answer; empty if none did."""
        return self._said.met

    @property
    def says_something(self) -> bool:
        """Whether there was any text other than white space."""
        return self._said.began

    @property
    def whole_calls(self) -> int:
        """Number of calls whose arguments are complete."""
        return self._calls.count - (self._calls.unfinished is not None)

    @property
    def unfinished_call(self) -> int | None:
        """Index of the last call while its arguments are incomplete, else None."""
        return self._calls.unfinished

    def feed(self, text: str, *, drafted: bool = False, final: bool = False, cut: bool = False) -> None:
        """Add text, `drafted` or not. `final`: no more will come; `cut`: because the answer was cut off."""
        if self.ended:
            return
        self._written.add(MarkedText(text, bytes([drafted]) * len(text)))
        self._written.final, self._cut = final, cut
        try:
            next(self._reading, None)
        except (_Stopped, CallsEnded):
            self.ended = True

    def take(self) -> list[AnswerPart]:
        """Return the parts since the last call, in order."""
        parts, self._parts = self._parts, []
        return parts

    # --- output ----------------------------------------------------------------------------------------------------

    def _part(self, *, fits: Callable[[AnswerPart], bool]) -> AnswerPart:
        """Return the last part if more fits behind it, or else a new one."""
        if not self._parts or not fits(self._parts[-1]):
            self._parts.append(AnswerPart())
        return self._parts[-1]

    def _tell(self, text: MarkedText) -> None:
        if text:
            part = self._part(fits=lambda last: not last.calls)
            part.text += text.text
            part.marks += text.marks

    def _say(self, text: MarkedText) -> None:
        self._tell(self._said.add(text))
        if self._said.met:
            raise _Stopped

    def _think(self, text: MarkedText) -> None:
        more = text.text.lstrip() if self._thought is None else self._thought + text.text
        bare = more[: max(len(more.rstrip()), len(more) - MAX_SPACE)]
        if bare:
            self._part(fits=lambda last: not last.text and not last.calls).reasoning += bare
        if bare or self._thought is not None:
            self._thought = more[len(bare) :]

    def _begin_call(self) -> None:
        self._tell(self._said.begin_call())

    def _call(self, piece: ToolCallDelta) -> None:
        self._part(fits=lambda _: True).calls.append(piece)

    # --- readers: each waits for more text until it can decide -----------------------------------------------------

    def _answer(self, inside: bool) -> Generator[None, None, None]:  # noqa: FBT001
        if inside or (yield from self._opens()):
            yield from self._reasoning()
        if not (yield from self._is_all_calls()):
            yield from self._content()
        self._tell(self._said.end())

    def _until(self, marks: "regex.Pattern[str]", tell: Tell) -> Generator[None, None, str]:
        """Pass the text before the first of these marks to `tell`; return the mark's group, empty if there is none."""
        while True:
            match = marks.search(self._written.text, partial=True)
            if before := self._written.take(match.start() if match else len(self._written.text)):
                tell(before)
            if match and not match.partial:
                return str(match.lastgroup)
            if not (yield from self._written.more()):
                tell(self._written.take(len(self._written.text)))
                return ""

    def _opens(self) -> Reading:
        """Return whether the answer begins with reasoning; a lone closing mark is skipped."""
        if not self._opening:
            return False
        mark = yield from self._written.match(_marks(opening=self._opening, closing=self._closing))
        if mark is None:
            return False
        self._written.take(mark.end())
        self._said.trims = True
        return str(mark.lastgroup) == "opening"

    def _reasoning(self) -> Generator[None, None, None]:
        may_call = self._tools and not self._by_grammar
        marks = _compiled({"closing": regex.escape(self._closing), "call": self._patterns.marks if may_call else ""})
        while mark := (yield from self._until(marks, self._think)):
            if mark == "closing":
                self._written.take(len(self._closing))
                self._said.trims = True
                return
            if (yield from self._ends_with_calls()):
                return
            self._think(self._written.take(1))

    def _ends_with_calls(self) -> Reading:
        """Return whether the answer ends here, inside its reasoning, with nothing but complete calls."""
        if (yield from self._reader.first()) is None:
            return False
        inner, read = self._open_inner(), 0
        while True:
            text, final = self._written.text, self._written.final
            inner.feed(text[read:], final=final, cut=self._cut)
            if inner.says_something or self._closing in text[max(0, read - len(self._closing)) :]:
                break
            if final and inner.whole_calls and inner.unfinished_call is None:
                self._written.take(len(text))
                self._calls.tell(_put_together([piece for part in inner.take() for piece in part.calls]))
                return True
            if final:
                break
            read = len(text)
            yield
        self._reader.failed += 1
        return False

    def _is_all_calls(self) -> Reading:
        """Return whether the answer is nothing but calls without marks."""
        if not self._tools or self._by_grammar:
            return False
        for pattern in _BARE:
            beginning = yield from self._written.match(pattern)
            if beginning and (beginning["name"] is None or beginning["name"] in self._tools):
                break
        else:
            return False
        while (yield from self._written.more()):
            pass
        if not self._written.final:  # too long for a call
            return False
        body = _WRAPPED.fullmatch(self._written.text)["body"]
        calls = listed_calls(body, self._tools) or python_calls(body, self._tools)
        if not calls:
            return False
        self._written.take(len(self._written.text))
        self._calls.tell(calls)
        return True

    def _content(self, until: str = "") -> Generator[None, None, None]:
        """Read text and calls up to one of the marks `until`."""
        calls = self._patterns.marks if self._tools else ""
        silent = _compiled({"silent": self._form.silent})
        marks = _compiled({"until": until, "silent": self._form.silent, "call": calls})
        while mark := (yield from self._until(marks, self._say)):
            if mark == "until":
                return
            if mark == "call" and (yield from self._reader.read()):
                continue
            match = yield from self._written.match(silent)
            if match is not None:
                self._written.take(match.end())
            else:
                self._say(self._written.take(1))

    # --- harmony: messages of channels -----------------------------------------------------------------------------

    def _messages(self) -> Generator[None, None, None]:
        while True:
            header = yield from self._written.match(_HEADER)
            if header is not None:
                self._written.take(header.end())
                yield from self._message(header["channel"], (header["name"] or header["to"] or "").strip())
            elif mark := (yield from self._written.match(_MARK)):
                self._written.take(mark.end())
            elif self._written.text:  # text outside of any message
                yield from self._content(_ENDS)
            elif not (yield from self._written.more()):
                break
        self._tell(self._said.end())

    def _message(self, channel: str | None, recipient: str) -> Generator[None, None, None]:
        """Read the body of a message: arguments of an offered tool, reasoning, or text."""
        ends = _compiled({"until": _ENDS})
        if recipient in self._tools and not self._by_grammar and (yield from self._harmony_call(recipient)):
            yield from self._until(ends, lambda _: None)
        elif channel == "analysis":
            if self._thought is not None:
                self._thought += _LINES
            yield from self._until(ends, self._think)
        else:
            self._said.begin_part(_LINES)
            yield from self._content(_ENDS)

    def _harmony_call(self, name: str) -> Reading:
        empty = yield from self._written.match(_EMPTY)
        if empty is None and (yield from self._reader.stream(name, "", _EMPTY)):
            return True
        nothing = empty is not None or (not self._written.text.strip() and not self._cut)
        if nothing:
            self._calls.tell([Call(name, "{}")])
        return nothing


def feed_step(stream: TextStream, splitter: AnswerSplitter, tokens: Sequence[int], accepted: int) -> int:
    """Feed the tokens of one step and return how many count: all, or those up to the one that ends the answer.

    They are fed one by one, so that the end does not depend on the step. The first `accepted` were drafted.
    """
    for place, token in enumerate(tokens):
        splitter.feed(stream.feed(token), drafted=place < accepted)
        if splitter.ended:
            return place + 1
    return len(tokens)


class ReasoningCount:
    """Counts the reasoning tokens of an answer, drafted or not: those up to the closing mark, which is included."""

    def __init__(self, dialect: Dialect) -> None:
        self._closing = (HARMONY_LAST[0] if dialect.parser == HARMONY else dialect.closing).encode()
        self._tail = b""
        self._ended = not self._closing
        self.tokens = 0

    def feed(self, pieces: Iterable[bytes]) -> None:
        """Count further tokens, given the bytes of each."""
        for piece in pieces:
            if self._ended:
                return
            self.tokens += 1
            self._tail = self._tail[1 - len(self._closing) :] + piece
            self._ended = self._closing in self._tail


def _put_together(pieces: Sequence[ToolCallDelta]) -> list[Call]:
    """Assemble calls from their pieces."""
    heads = [piece for piece in pieces if piece.name]
    arguments = {
        head.index: "".join(piece.arguments for piece in pieces if piece.index == head.index) for head in heads
    }
    return [Call(head.name, arguments[head.index], head.id) for head in heads]


def _marks(**marks: str) -> "regex.Pattern[str]":
    return _compiled({name: regex.escape(mark) for name, mark in marks.items()}, space=True)


def _compiled(marks: Mapping[str, str], *, space: bool = False) -> "regex.Pattern[str]":
    """Join marks into one expression with a named group for each; without marks it never matches."""
    parts = "|".join(f"(?P<{name}>{mark})" for name, mark in marks.items() if mark)
    return compiled((r"\s*" if space else "") + f"(?:{parts or '(?!)'})")
