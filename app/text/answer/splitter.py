"""Splits the stream of an answer into text, reasoning and tool calls, by the dialect of its model.

Only a call that names a tool of the request counts as one; everything else is text, exactly as it was written. The
result does not depend on how the text was chunked: token by token or all at once, the content is the same.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import regex

from app.core.messages import ToolCallDelta
from app.text.answer.call_patterns import patterns
from app.text.answer.call_reader import CallReader, CallsEnded, CallSender
from app.text.answer.calls import Call, first_json_calls, parameter_schemas, parse_python_calls
from app.text.answer.stops import FlaggedText, OutgoingText, spans_of
from app.text.answer.unread_text import UnreadText
from app.text.detokenizer import TextStream
from app.text.dialect import (
    BARE_JSON,
    FORMS,
    HARMONY,
    HARMONY_ENDS,
    HARMONY_LAST,
    MAX_WHITESPACE,
    Dialect,
    compiled,
    with_json_calls,
)

_HEADER = compiled(
    r"(?=\s*(?:<\||to=))\s*(?:<\|(?:end|call|return)\|>\s*)*(?:<\|start\|>\s*assistant)?"
    r"\s*(?:to=(?:functions\.)?(?P<to>[^\s<]{1,256}))?"
    r"(?:\s*<\|channel\|>\s*(?P<channel>\w+)?(?:[^<]{0,256}?\bto=(?:functions\.)?(?P<name>[^\s<]{1,256}))?[^<]{0,256})*"
    r"[^<]{0,256}(?:<\|constrain\|>[^<]{0,256})?<\|message\|>"
)
"""Header of a harmony message. A model may write the channel twice. Without limits, time grows with the square."""
_ENDS = "|".join(map(regex.escape, HARMONY_ENDS))
_BROKEN_HEADER = compiled(r"\s*<\|channel\|>[^<]{0,256}(?=<\|(?:end|start|call|return)\|>)")
_UNENDED_HEADER = compiled(
    r"\s*(?:<\|(?:end|call|return)\|>\s*)*(?:<\|start\|>\s*assistant)?\s*<\|channel\|>\s*final"
    r"(?:\s*<\|constrain\|>\w*)+\s*(?=[^\s\w<]|<[^|])"
)
"""Header of an answer whose last marker the model left out."""
_MARKER = compiled(rf"\s*(?:{_ENDS}|<\|message\|>)")
_EMPTY = compiled(rf"\s*(?:{_ENDS})")
_BARE = (
    compiled(
        r'\s*(?:<\|python_tag\|>|<tools>|```\w*)?\s*\[?\s*\{\s*"(?:(?:name|tool_name|function)"\s*:\s*"(?P<name>[^"]*)"'
        r'|(?:arguments|parameters|function)"\s*:\s*\{|type"\s*:\s*"function")'
    ),
    compiled(r"\s*(?:<\|python_tag\|>|```\w*)?\s*\[\s*(?P<name>[\w.:/-]+)\s*\("),
)
"""Patterns of the beginning of an answer that may be nothing but calls without markers."""
_WRAPPED = regex.compile(r"(?s)\s*(?:<\|python_tag\|>|<tools>|```\w*)?(?P<body>.*?)(?:</tools>|</tool_call>|```)?\s*")
_MESSAGE_SEPARATOR = "\n\n"
"""Separator of two harmony messages that are both text, or both reasoning."""

PacedCheck = Generator[None, None, bool]
"""Generator that scans text step by step; each `yield` waits for more."""
Emit = Callable[[FlaggedText], None]


class AnswerDelta(msgspec.Struct, kw_only=True):
    """Increment of an answer, in this order: reasoning, text, tool-call deltas."""

    reasoning: str = ""
    text: str = ""
    drafted_flags: bytearray = msgspec.field(default_factory=bytearray)
    """Flags of the characters of `text`, one byte each: 1 if drafted."""
    calls: list[ToolCallDelta] = []

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Spans (start, end) of `text` that were drafted."""
        return spans_of(self.drafted_flags)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


class _StopStringMet(Exception):
    """Ends the answer at a stop string."""


class AnswerSplitter:
    """Splits one answer. `inside`: it starts inside reasoning that the prompt opened; `tools`: tools it may call.

    `by_grammar`: calls are JSON between markers, whatever the model's own form. `stop`: strings that end the text, but
    not reasoning or arguments. `one_call`: the first call ends the answer. `used_ids`: ids that no call may have.
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
        used_ids: Iterable[str] = (),
    ) -> None:
        is_harmony = dialect.parser == HARMONY
        if by_grammar or is_harmony or not dialect.parser:
            dialect = with_json_calls(dialect)
        self._opening, self._closing = dialect.opening, dialect.closing
        self._form, self._patterns = FORMS[dialect.parser], patterns(dialect.parser)
        self._make_inner_splitter = partial(
            AnswerSplitter, msgspec.structs.replace(dialect, opening="", closing=""), tools=tools
        )
        """Constructor of the splitter that scans possible calls at the end of the reasoning."""
        self._wrapper, self._silent = dialect.wrapper, self._form.silent
        self._by_grammar = by_grammar
        self._tools = parameter_schemas(tools)
        self._unread = UnreadText()
        self._outgoing = OutgoingText(stop, calls=bool(tools))
        self._reasoning_whitespace: str | None = None
        """Trailing white space of the reasoning, withheld until more reasoning follows; None before any reasoning."""
        self._deltas: list[AnswerDelta] = []
        self._calls = CallSender(self._begin_call, self._append_call, one_call=one_call, used_ids=used_ids)
        self._reader = CallReader(self._unread, self._tools, self._patterns, self._calls)
        self.ended = False
        """Whether the rest of the answer is ignored."""
        if is_harmony:
            self._scan = self._scan_messages()
        else:
            self._unread.add(FlaggedText(self._form.begun, bytes(len(self._form.begun))))
            self._scan = self._scan_answer(inside and bool(dialect.opening))

    @property
    def matched_stop(self) -> str:
        """Stop string that ended the answer; empty if none did."""
        return self._outgoing.matched_stop

    @property
    def has_text(self) -> bool:
        """Whether there was any text other than white space."""
        return self._outgoing.has_text

    @property
    def complete_calls(self) -> int:
        """Number of calls whose arguments are complete."""
        return self._calls.count - (self._calls.unfinished is not None)

    @property
    def unfinished_call(self) -> int | None:
        """Index of the last call while its arguments are incomplete, else None."""
        return self._calls.unfinished

    def feed(self, text: str, *, drafted: bool = False, final: bool = False, truncated: bool = False) -> None:
        """Add text, `drafted` or not. `final`: this is the last text; `truncated`: because the answer was cut off."""
        if self.ended:
            return
        self._unread.add(FlaggedText(text, bytes([drafted]) * len(text)))
        self._unread.final, self._unread.truncated = final, truncated
        try:
            next(self._scan, None)
        except (_StopStringMet, CallsEnded):
            self.ended = True

    def take(self) -> list[AnswerDelta]:
        """Return the deltas since the previous call, in order, and clear them."""
        deltas, self._deltas = self._deltas, []
        return deltas

    # --- output ----------------------------------------------------------------------------------------------------

    def _open_delta(self, *, accepts: Callable[[AnswerDelta], bool]) -> AnswerDelta:
        """Return the last delta if it `accepts` more content, else append a new one."""
        if not self._deltas or not accepts(self._deltas[-1]):
            self._deltas.append(AnswerDelta())
        return self._deltas[-1]

    def _append_text(self, text: FlaggedText) -> None:
        if text:
            delta = self._open_delta(accepts=lambda last: not last.calls)
            delta.text += text.text
            delta.drafted_flags += text.drafted_flags

    def _emit_text(self, text: FlaggedText) -> None:
        self._append_text(self._outgoing.add(text))
        if self._outgoing.matched_stop:
            raise _StopStringMet

    def _emit_reasoning(self, text: FlaggedText) -> None:
        combined = text.text.lstrip() if self._reasoning_whitespace is None else self._reasoning_whitespace + text.text
        visible = combined[: max(len(combined.rstrip()), len(combined) - MAX_WHITESPACE)]
        if visible:
            self._open_delta(accepts=lambda last: not last.text and not last.calls).reasoning += visible
        if visible or self._reasoning_whitespace is not None:
            self._reasoning_whitespace = combined[len(visible) :]

    def _begin_call(self) -> None:
        self._append_text(self._outgoing.begin_call())

    def _append_call(self, call: ToolCallDelta) -> None:
        self._open_delta(accepts=lambda _: True).calls.append(call)

    # --- scans: each waits for more text until it can decide -------------------------------------------------------

    def _scan_answer(self, inside: bool) -> Generator[None, None, None]:  # noqa: FBT001
        if inside or (yield from self._opens_reasoning()):
            yield from self._scan_reasoning()
            yield from self._skip_wrapper()
        if not (yield from self._is_all_calls()):
            yield from self._scan_content()
        self._append_text(self._outgoing.end())

    def _until(self, markers: "regex.Pattern[str]", emit: Emit) -> Generator[None, None, str]:
        """Pass the text before the first of `markers` to `emit`; return the marker's group name, or an empty text."""
        while True:
            match = markers.search(self._unread.text, partial=True)
            if before := self._unread.take(match.start() if match else len(self._unread.text)):
                emit(before)
            if match and not match.partial:
                return str(match.lastgroup)
            if not (yield from self._unread.wait_for_more()):
                emit(self._unread.take(len(self._unread.text)))
                return ""

    def _opens_reasoning(self) -> PacedCheck:
        """Return whether the answer begins with reasoning; a lone closing marker is skipped."""
        if not self._opening:
            return False
        marker = yield from self._unread.match(_markers(opening=self._opening, closing=self._closing))
        if marker is None:
            return False
        self._unread.take(marker.end())
        self._outgoing.trims_leading = True
        return str(marker.lastgroup) == "opening"

    def _scan_reasoning(self) -> Generator[None, None, None]:
        may_call = self._tools and not self._by_grammar
        markers = _compiled(
            {"closing": regex.escape(self._closing), "call": self._patterns.start_markers if may_call else ""}
        )
        while marker := (yield from self._until(markers, self._emit_reasoning)):
            if marker == "closing":
                self._unread.take(len(self._closing))
                self._outgoing.trims_leading = True
                return
            if (yield from self._ends_with_calls()):
                return
            self._emit_reasoning(self._unread.take(1))

    def _skip_wrapper(self) -> Generator[None, None, None]:
        """Skip the tag that begins an answer after reasoning; its end will be skipped, too."""
        tag = rf"\s*<{self._wrapper}>" if self._wrapper else "(?!)"
        if (begun := (yield from self._unread.match(compiled(tag)))) is not None:
            self._unread.take(begun.end())
            self._silent = "|".join(filter(None, (self._silent, rf"\s*</{self._wrapper}>")))

    def _ends_with_calls(self) -> PacedCheck:
        """Return whether the rest of the answer, still inside its reasoning, is nothing but complete calls, with or
        without the closing marker of the reasoning."""
        if (yield from self._reader.call_start()) is None:
            return False
        inner_splitter, fed_characters = self._make_inner_splitter(), 0
        while True:
            text, final = self._unread.text, self._unread.final
            body, _, rest = text.partition(self._closing)
            if rest.strip():  # an answer follows: the calls were only thoughts
                break
            end = len(body) if final else len(body) - _begun(self._closing, body)
            inner_splitter.feed(body[fed_characters:end], final=final, truncated=self._unread.truncated)
            if inner_splitter.has_text:
                break
            if final and inner_splitter.complete_calls and inner_splitter.unfinished_call is None:
                self._unread.take(len(text))
                self._calls.send(_assembled_calls([call for delta in inner_splitter.take() for call in delta.calls]))
                return True
            if final:
                break
            fed_characters = end
            yield
        self._reader.failed += 1
        return False

    def _is_all_calls(self) -> PacedCheck:
        """Return whether the answer is nothing but calls without markers."""
        if not self._tools or self._by_grammar:
            return False
        for pattern in _BARE:
            beginning = yield from self._unread.match(pattern)
            if beginning and (beginning["name"] is None or beginning["name"] in self._tools):
                break
        else:
            return False
        while (yield from self._unread.wait_for_more()):
            pass
        if not self._unread.final:  # too long for a call
            return False
        body = _WRAPPED.fullmatch(self._unread.text)["body"]
        calls, rest = first_json_calls(body, self._tools, ended=self._unread.ended)
        if rest and not (self._form is FORMS[BARE_JSON] and rest[0].isalnum()):
            calls, rest = parse_python_calls(body, self._tools), ""
        if not calls:
            return False
        self._unread.take(self._unread.text.rindex(rest) if rest else len(self._unread.text))
        self._calls.send(calls)
        return not rest

    def _scan_content(self, until: str = "") -> Generator[None, None, None]:
        """Scan text and calls up to a marker that matches `until`."""
        calls = self._patterns.start_markers if self._tools else ""
        silent = _compiled({"silent": self._silent})
        markers = _compiled({"until": until, "silent": self._silent, "call": calls})
        while marker := (yield from self._until(markers, self._emit_text)):
            if marker == "until":
                return
            if marker == "call" and (yield from self._reader.scan_calls()):
                continue
            match = yield from self._unread.match(silent)
            if match is not None:
                self._unread.take(match.end())
            else:
                self._emit_text(self._unread.take(1))

    # --- harmony: messages of channels -----------------------------------------------------------------------------

    def _scan_messages(self) -> Generator[None, None, None]:
        while True:
            header = yield from self._unread.match(_HEADER)
            if header is not None:
                self._unread.take(header.end())
                yield from self._scan_message(header["channel"], (header["name"] or header["to"] or "").strip())
            elif unended := (yield from self._unread.match(_UNENDED_HEADER)):
                self._unread.take(unended.end())
                yield from self._scan_message("final", "")
            elif broken := (yield from self._unread.match(_BROKEN_HEADER)):
                self._unread.take(broken.end())
            elif marker := (yield from self._unread.match(_MARKER)):
                self._unread.take(marker.end())
            elif self._unread.text:  # text outside of any message
                yield from self._scan_content(_ENDS)
            elif not (yield from self._unread.wait_for_more()):
                break
        self._append_text(self._outgoing.end())

    def _scan_message(self, channel: str | None, recipient: str) -> Generator[None, None, None]:
        """Scan the body of a message: arguments of an offered tool, reasoning, or text."""
        ends = _compiled({"until": _ENDS})
        recipient = recipient if recipient in self._tools else recipient.removesuffix("json")
        if recipient in self._tools and not self._by_grammar and (yield from self._scan_harmony_call(recipient)):
            yield from self._until(ends, lambda _: None)
        elif channel == "analysis":
            if self._reasoning_whitespace is not None:
                self._reasoning_whitespace += _MESSAGE_SEPARATOR
            yield from self._until(ends, self._emit_reasoning)
        else:
            self._outgoing.begin_segment(_MESSAGE_SEPARATOR)
            yield from self._scan_content(_ENDS)

    def _scan_harmony_call(self, name: str) -> PacedCheck:
        empty = yield from self._unread.match(_EMPTY)
        if empty is None and (yield from self._reader.stream_arguments(name, "", _EMPTY)):
            return True
        is_empty = empty is not None or (not self._unread.text.strip() and not self._unread.truncated)
        if is_empty:
            self._calls.send([Call(name, "{}")])
        return is_empty


def feed_step(stream: TextStream, splitter: AnswerSplitter, tokens: Sequence[int], accepted: int) -> int:
    """Feed the tokens of one step; return how many belong to the answer: all, or those up to its end.

    Tokens are fed one by one, so that the end does not depend on the step size. The first `accepted` were drafted.
    """
    for index, token in enumerate(tokens):
        splitter.feed(stream.feed(token), drafted=index < accepted)
        if splitter.ended:
            return index + 1
    return len(tokens)


class ReasoningCount:
    """Counts the reasoning tokens of an answer, drafted or not: those up to the closing marker, which is included."""

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


def _assembled_calls(deltas: Sequence[ToolCallDelta]) -> list[Call]:
    """Assemble calls from their deltas."""
    heads = [delta for delta in deltas if delta.name]
    arguments = {
        head.index: "".join(delta.arguments for delta in deltas if delta.index == head.index) for head in heads
    }
    return [Call(head.name, arguments[head.index], head.id) for head in heads]


def _begun(marker: str, text: str) -> int:
    """Return how many characters at the end of `text` may begin `marker`."""
    return max(length for length in range(len(marker)) if text.endswith(marker[:length]))


def _markers(**markers: str) -> "regex.Pattern[str]":
    return _compiled({name: regex.escape(marker) for name, marker in markers.items()}, space=True)


def _compiled(markers: Mapping[str, str], *, space: bool = False) -> "regex.Pattern[str]":
    """Join markers into one expression with a named group for each; without markers it never matches."""
    parts = "|".join(f"(?P<{name}>{marker})" for name, marker in markers.items() if marker)
    return compiled((r"\s*" if space else "") + f"(?:{parts or '(?!)'})")
