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
from app.text import harmony
from app.text.answer.call_patterns import patterns
from app.text.answer.call_reader import CallReader, CallsEnded, CallSender
from app.text.answer.calls import Call, offered_name, parameter_schemas
from app.text.answer.json_calls import BEGINNINGS, parse_unmarked_calls
from app.text.answer.parts import AnswerDelta, assembled_calls
from app.text.answer.stops import FlaggedText, Markdown, OutgoingText
from app.text.answer.unread_text import MatchSearch, UnreadText
from app.text.detokenizer import TextStream
from app.text.dialect import (
    BARE_JSON,
    FORMS,
    HARMONY,
    MAX_WHITESPACE,
    Dialect,
    compiled,
    with_json_calls,
)

QUOTE_SEARCH_CHARACTERS = 1024
"""Number of unread characters that are searched for marks of code."""
_FENCE = compiled(r"(?P<fence>`{3,8}|~{3,8})\w{0,32}\s*")
"""Pattern of a code fence around calls."""
_MARKS = regex.compile(r"[<\[]")
"""Pattern of the beginning of a reasoning marker that is no ordinary sentence."""
_SEPARATOR = "\n\n"
"""Separator of two sections of reasoning, or of two harmony messages that are both text."""

PacedCheck = Generator[None, None, bool]
"""Generator that scans text step by step; each `yield` waits for more."""
Emit = Callable[[FlaggedText], None]


class _StopStringMet(Exception):
    """Ends the answer at a stop string."""


class AnswerSplitter:
    """Splits one answer. `inside`: it starts inside reasoning that the prompt opened; `reasoned`: after reasoning that
    the prompt closed; `tools`: tools it may call.

    `by_grammar`: calls are JSON between markers, whatever the model's own form. `stop`: strings that end the text, but
    not reasoning or arguments. `one_call`: the first call ends the answer. `used_ids`: ids that no call may have.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        inside: bool = False,
        reasoned: bool = False,
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
        self._markdown = Markdown()
        self._reasoning_whitespace: str | None = None
        """Trailing white space of the reasoning, withheld until more follows; None at the start of a section."""
        self._reasoning_separator = ""
        self._deltas: list[AnswerDelta] = []
        self._calls = CallSender(self._begin_call, self._append_call, one_call=one_call, used_ids=used_ids)
        self._reader = CallReader(self._unread, self._tools, self._patterns, self._calls)
        self.ended = False
        """Whether the rest of the answer is ignored."""
        if is_harmony:
            self._scan = self._scan_messages()
        else:
            self._unread.add(FlaggedText(self._form.begun, bytes(len(self._form.begun))))
            self._scan = self._scan_answer(inside=inside and bool(dialect.opening), reasoned=reasoned)

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

    @property
    def is_quoting(self) -> bool:
        """Whether special tokens are text here: in the arguments of a call, or in code."""
        return self._reader.in_call or self._markdown.in_code_after(self._unread.text[:QUOTE_SEARCH_CHARACTERS])

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
        self._markdown.add(text.text)
        self._append_text(self._outgoing.add(text))
        if self._outgoing.matched_stop:
            raise _StopStringMet

    def _begin_reasoning(self) -> None:
        if self._reasoning_whitespace is not None:
            self._reasoning_whitespace, self._reasoning_separator = None, _SEPARATOR

    def _emit_reasoning(self, text: FlaggedText) -> None:
        combined = text.text.lstrip() if self._reasoning_whitespace is None else self._reasoning_whitespace + text.text
        visible = combined[: max(len(combined.rstrip()), len(combined) - MAX_WHITESPACE)]
        if visible:
            delta = self._open_delta(accepts=lambda last: not last.text and not last.calls)
            delta.reasoning += self._reasoning_separator + visible
            self._reasoning_separator = ""
        if visible or self._reasoning_whitespace is not None:
            self._reasoning_whitespace = combined[len(visible) :]

    def _begin_call(self) -> None:
        self._append_text(self._outgoing.begin_call())

    def _append_call(self, call: ToolCallDelta) -> None:
        self._open_delta(accepts=lambda _: True).calls.append(call)

    # --- scans: each waits for more text until it can decide -------------------------------------------------------

    def _scan_answer(self, *, inside: bool, reasoned: bool) -> Generator[None, None, None]:
        if inside:
            yield from self._skip(_markers(opening=self._opening))  # a model may repeat what the prompt already has
        while inside or (yield from self._opens_reasoning()):
            yield from self._scan_reasoning()
            reasoned, inside = True, False
        if reasoned:
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
        """Return whether reasoning begins here; closing markers without an opening are skipped."""
        markers = _markers(opening=self._opening, closing=self._closing)
        while (marker := (yield from self._skip(markers))) is not None:
            self._outgoing.trims_leading = True
            if marker.lastgroup == "opening":
                return True
        return False

    def _skip(self, pattern: "regex.Pattern[str]") -> MatchSearch:
        """Skip what matches a pattern here, and return the match."""
        match = yield from self._unread.match(pattern)
        self._unread.take(match.end() if match is not None else 0)
        return match

    def _scan_reasoning(self) -> Generator[None, None, None]:
        self._begin_reasoning()
        may_call = self._tools and not self._by_grammar
        markers = _compiled(
            {"closing": regex.escape(self._closing), "call": self._patterns.start_markers if may_call else ""}
        )
        while marker := (yield from self._until(markers, self._emit_reasoning)):
            if marker == "closing":
                self._unread.take(len(self._closing))
                self._outgoing.trims_leading = self._markdown.at_line_start
                return
            if (yield from self._ends_with_calls(self._closing)):
                return
            self._emit_reasoning(self._unread.take(1))

    def _skip_wrapper(self) -> Generator[None, None, None]:
        """Skip the tag that begins an answer after reasoning; its end will be skipped, too."""
        tag = rf"\s*<{self._wrapper}>" if self._wrapper else "(?!)"
        if (yield from self._skip(compiled(tag))) is not None:
            self._outgoing.trims_leading = True
            self._silent = "|".join(filter(None, (self._silent, rf"\s*</{self._wrapper}>")))

    def _ends_with_calls(self, closing: str, position: int = 0) -> PacedCheck:
        """Return whether the rest of the answer, from `position` on, is nothing but complete calls, with or without a
        `closing` marker after them. Calls in reasoning or in a code fence are only thoughts or examples otherwise."""
        if (yield from self._reader.call_start(position)) is None:
            return False
        inner_splitter, fed_characters = self._make_inner_splitter(), position
        while not inner_splitter.has_text:
            body, final = self._unread.text.rstrip(), self._unread.final
            end = max(fed_characters, len(body) - _begun(closing, body))
            inner_splitter.feed(self._unread.text[fed_characters:end], final=final, truncated=self._unread.truncated)
            is_whole = inner_splitter.complete_calls and inner_splitter.unfinished_call is None
            if final and is_whole and not inner_splitter.has_text:
                self._unread.take(len(self._unread.text))
                self._calls.send(assembled_calls([call for delta in inner_splitter.take() for call in delta.calls]))
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
        if (yield from self._unread.match(compiled(rf"\s*(?:{self._patterns.start_markers or '(?!)'})"))) is not None:
            return False
        for pattern in BEGINNINGS:
            beginning = yield from self._unread.match(pattern)
            if beginning and (beginning["name"] is None or offered_name(beginning["name"], self._tools)):
                break
        else:
            return False
        while (yield from self._unread.wait_for_more()):
            pass
        if not self._unread.final:  # too long for a call
            return False
        calls, rest = parse_unmarked_calls(
            self._unread.text,
            self._tools,
            ended=self._unread.ended,
            may_comment=self._form is FORMS[BARE_JSON],
        )
        if not calls:
            return False
        self._unread.take(self._unread.text.rindex(rest) if rest else len(self._unread.text))
        self._calls.send(calls)
        return not rest

    def _scan_content(self, until: str = "") -> Generator[None, None, None]:
        """Scan text and calls up to a marker that matches `until`."""
        calls = rf"(?:{_FENCE.pattern})?(?:{self._patterns.start_markers})" if self._tools else ""
        opening = regex.escape(self._opening) if _MARKS.match(self._opening) else ""
        markers = _compiled({"until": until, "silent": self._silent, "opening": opening, "call": calls})
        while marker := (yield from self._until(markers, self._emit_text)):
            if marker == "until":
                return
            if marker == "call" and (yield from self._scan_calls()):
                continue
            if marker == "opening" and (yield from self._reopens_reasoning()):
                yield from self._scan_reasoning()
            elif (yield from self._skip(_compiled({"silent": self._silent}))) is None:
                self._emit_text(self._unread.take(1))

    def _scan_calls(self) -> PacedCheck:
        """Scan calls that begin here, perhaps with their own code fence; return whether there are any. In a fence they
        are examples unless only its end follows, or nothing if their start marker is missing, too."""
        fence = yield from self._unread.match(_FENCE)
        if fence is not None and self._markdown.fence:  # it closes the code before the calls
            self._emit_text(self._unread.take(fence.end()))
            fence = None
        if fence is None and not self._markdown.fence:
            return (yield from self._reader.scan_calls())
        start, closing = (0, self._markdown.fence) if fence is None else (fence.end(), fence["fence"])
        is_marked = (yield from self._unread.match(self._patterns.start, start)) is not None
        if (yield from self._ends_with_calls(closing if is_marked else "", start)):
            return True
        self._emit_text(self._unread.take(start))
        return False

    def _reopens_reasoning(self) -> PacedCheck:
        """Return whether more reasoning begins here, after text or calls: on a line of its own, or before a line break,
        unlike a marker that the text mentions."""
        if self._markdown.fence:
            return False
        is_apart = self._markdown.at_line_start or self._outgoing.follows_call
        edge = "" if is_apart else r"[ \t]{0,64}(?=\n)"
        return (yield from self._skip(compiled(rf"{regex.escape(self._opening)}{edge}"))) is not None

    # --- harmony: messages of channels -----------------------------------------------------------------------------

    def _scan_messages(self) -> Generator[None, None, None]:
        while True:
            if (header := (yield from self._skip(harmony.HEADER))) is not None:
                yield from self._scan_message(harmony.read_header(header["header"], header["author"]))
            elif (yield from self._skip(harmony.UNENDED_HEADER)) is not None:
                yield from self._scan_message(harmony.Header("final", "", is_own=True))
            elif (yield from self._skip(harmony.BROKEN_HEADER)) is not None or (
                yield from self._skip(harmony.MARKER)
            ) is not None:
                continue
            elif self._unread.text:  # text outside of any message
                yield from self._scan_content(harmony.ENDS)
            elif not (yield from self._unread.wait_for_more()):
                break
        self._append_text(self._outgoing.end())

    def _scan_message(self, header: harmony.Header) -> Generator[None, None, None]:
        """Scan the body of a message: arguments of an offered tool, reasoning, or text. Invented turns are dropped."""
        ends, name = _compiled({"until": harmony.ENDS}), header.recipient
        name = name if name in self._tools else name.removesuffix("json")
        is_call = header.is_own and name in self._tools and not self._by_grammar
        if not header.is_own or (is_call and (yield from self._scan_harmony_call(name))):
            yield from self._until(ends, lambda _: None)
        elif header.channel == "analysis":
            self._begin_reasoning()
            yield from self._until(ends, self._emit_reasoning)
        else:
            self._outgoing.begin_segment(_SEPARATOR)
            yield from self._scan_content(harmony.ENDS)

    def _scan_harmony_call(self, name: str) -> PacedCheck:
        empty = yield from self._unread.match(harmony.EMPTY)
        if empty is None and (yield from self._reader.stream_arguments(name, "", harmony.EMPTY)):
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
        quoted = stream.may_be_quoted(token) and splitter.is_quoting
        splitter.feed(stream.feed(token, quoted=quoted), drafted=index < accepted)
        if splitter.ended:
            return index + 1
    return len(tokens)


def _begun(marker: str, text: str) -> int:
    """Return how many characters at the end of `text` are the marker, or may begin it."""
    return max(length for length in range(len(marker) + 1) if text.endswith(marker[:length]))


def _markers(**markers: str) -> "regex.Pattern[str]":
    return _compiled({name: regex.escape(marker) for name, marker in markers.items() if marker}, space=True)


def _compiled(markers: Mapping[str, str], *, space: bool = False) -> "regex.Pattern[str]":
    """Join markers into one expression with a named group for each; without markers it never matches."""
    parts = "|".join(f"(?P<{name}>{marker})" for name, marker in markers.items() if marker)
    return compiled(
        r"\s*" * space + f"(?:{parts})" if parts else r"(?!)"
    )  # not even the space, which would be withheld
