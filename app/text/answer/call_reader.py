"""Parses tool calls of any form from a model's text: names of offered tools, and arguments as they arrive."""

import logging
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import regex

from app.core.messages import ToolCallDelta
from app.text.answer.call_patterns import CallPatterns
from app.text.answer.calls import (
    Call,
    Tools,
    offered_name,
    parse_nested_value,
    parse_parameter,
    parse_python_calls,
    usable_call_id,
)
from app.text.answer.gemma_arguments import close_last_string, parse_gemma_arguments
from app.text.answer.json_calls import PYTHON_OBJECT, call_from_parts, parse_json_calls
from app.text.answer.json_text import JsonReader, parse_literal, to_json
from app.text.answer.unread_text import UnreadText
from app.text.dialect import compiled

MAX_END_MARKERS = 64
"""Limit on the number of end markers that are tried, in order, as the end of one call."""
MAX_FAILED = 16
"""Limit on the number of false call starts in one answer; beyond it nothing is parsed as a call."""
_OBJECT = compiled(r'\s*\{\s*["}]')
_AFTER_MEMBER = compiled(r'\s*(?:,\s*"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*)*\}')
"""Pattern of the end of an object after its arguments, with simple members in between, such as an id."""
_SURPLUS_CLOSE = compiled(r"(?<=.)\n</parameter[^>\s]*>?\n?\Z")
"""Pattern of a closing marker, mangled or not, that the model wrote before the right one, after a value."""
_BLANK_END = compiled(r"\s*\Z")
_SPACE = compiled(r"\s*(?=\S)")
_WRAPPED_OBJECT = compiled(r"\s*(?:```\w*\s*\[?|\[)\s*\{")
_FENCES = compiled(r"\A```\w*|```\Z")
_FENCE = compiled(r"\s*```")

logger = logging.getLogger("paceline.dialect")

Match = Any
"""Match of `regex`."""
CallStart = tuple[Match, str]
"""Match of a call's start marker and tool name, and the kind of its arguments (see `CallPatterns`)."""


class CallsEnded(Exception):
    """Ends the answer: only one call is allowed, or a call that the client has begun to receive cannot be parsed."""


class CallSender:
    """Sends the calls of one answer. `on_begin` is called before each; `one_call`: the first one ends the answer.
    `used_ids`: ids that no call may have."""

    def __init__(
        self,
        on_begin: Callable[[], None],
        send: Callable[[ToolCallDelta], None],
        *,
        one_call: bool,
        used_ids: Iterable[str] = (),
    ) -> None:
        self._on_begin = on_begin
        self._send = send
        self._one_call = one_call
        self._used_ids = set(used_ids)
        self.count = 0
        """Number of calls begun."""
        self.unfinished: int | None = None
        """Index of the last call while its arguments are incomplete."""

    def begin_call(self, name: str, written_id: str | None) -> None:
        """Send the name of a call; its arguments follow."""
        self._send_head(Call(name, "", written_id or ""))
        self.unfinished = self.count - 1

    def add_arguments(self, arguments: str) -> None:
        """Send a delta of the arguments."""
        if arguments:
            self._send(ToolCallDelta(index=self.count - 1, arguments=arguments))

    def end(self) -> None:
        """Mark the arguments as complete. Raises CallsEnded if no more calls are allowed."""
        self.unfinished = None
        if self._one_call:
            raise CallsEnded

    def send(self, calls: Sequence[Call]) -> None:
        """Send complete calls."""
        for call in calls:
            self._send_head(call)
            self.end()

    def _send_head(self, call: Call) -> None:
        self._on_begin()
        call_id = usable_call_id(call.id, self._used_ids)
        self._used_ids.add(call_id)
        self._send(ToolCallDelta(index=self.count, id=call_id, name=call.name, arguments=call.arguments))
        self.count += 1


class CallReader:
    """Parses calls of one form. Each generator waits for more text until it can decide."""

    def __init__(self, unread: UnreadText, tools: Tools, patterns: CallPatterns, calls: CallSender) -> None:
        self._unread = unread
        self._tools = tools
        self._patterns = patterns
        self._calls = calls
        self._has_start_marker = False
        """Whether the start marker of the form came before the calls, so that its end marker is still to come."""
        self.in_call = False
        """Whether the arguments of a call are being read."""
        self.failed = 0
        """Number of false call starts."""

    def call_start(self, position: int = 0) -> Generator[None, None, CallStart | None]:
        """Match a call that starts at `position`, after text; None if there is none."""
        return self._match_start(self._patterns.call_starts, position)

    def scan_calls(self) -> Generator[None, None, bool]:
        """Parse consecutive calls and their end marker; return False, with nothing consumed, if there is no call."""
        start = yield from self.call_start()
        self._has_start_marker = start is not None and not self._patterns.matches_bare_head(start[0].group())
        has_calls = False
        while start is not None and (yield from self._read_call(*start)):
            has_calls = True
            end_pattern = self._patterns.end if start[1] == "head" else self._patterns.end_after_json
            end = (yield from self._unread.match(end_pattern)) if end_pattern else None
            if end is not None:
                self._unread.take(end.end())
                break
            start = yield from self._match_start(self._patterns.following_starts)
        if has_calls:
            yield from self._skip_stray_markers()
        return has_calls

    def _skip_stray_markers(self) -> Generator[None, None, None]:
        """Skip markers that the model wrote after its calls: more end markers, or a start with nothing after it."""
        while (end := (yield from self._unread.match(self._patterns.stray_end))) is not None:
            self._unread.take(end.end())
        begun = yield from self._unread.match(compiled(rf"{self._patterns.start.pattern}(?=\S)"))
        if begun is None and self._unread.final and self._patterns.start.fullmatch(self._unread.text):
            self._unread.take(len(self._unread.text))

    def stream_arguments(
        self, name: str, written_id: str | None, end: "regex.Pattern[str] | None"
    ) -> Generator[None, None, bool]:
        """Send JSON arguments as they arrive, up to the marker `end`. Return False if no object begins here.

        Raises CallsEnded if they turn out not to be an object.
        """
        if (yield from self._unread.match(_OBJECT)) is None:
            return bool(end) and (yield from self._read_wrapped_arguments(name, end))
        self._unread.take(len(self._unread.text) - len(self._unread.text.lstrip()))
        self._calls.begin_call(name, written_id)
        reader, self.in_call = JsonReader(), True
        while not reader.complete:
            count, arguments = reader.read(self._unread.text)
            self._unread.take(count)
            self._calls.add_arguments(arguments)
            if reader.complete:
                break
            if reader.broken:
                if not reader.missing or end is None or (yield from self._unread.match(end)) is None:
                    logger.warning("the arguments of a call of %s are not valid JSON at %.80r", name, self._unread.text)
                    raise CallsEnded
                self._calls.add_arguments(reader.missing)
                break
            if not (yield from self._unread.wait_for_more()):
                if not (reader.missing and self._unread.ended):
                    raise CallsEnded
                self._calls.add_arguments(reader.missing)
                break
        self.in_call = False
        self._calls.end()
        return True

    def _read_wrapped_arguments(self, name: str, end: "regex.Pattern[str]") -> Generator[None, None, bool]:
        """Send arguments in a code fence or a list up to the marker `end`; return False if there are none."""
        if (yield from self._unread.match(_WRAPPED_OBJECT)) is None:
            return False
        marker = yield from self._unread.search(end)
        position = marker.start() if marker else len(self._unread.text)
        try:
            arguments = parse_literal(_FENCES.sub("", self._unread.text[:position].strip()))
        except ValueError:
            return False
        call = call_from_parts(name, arguments, self._tools)
        if call is not None:
            self._unread.take(position)
            self._calls.send([call])
        return call is not None

    def _match_start(
        self, patterns: Sequence[tuple["regex.Pattern[str]", str]], position: int = 0
    ) -> Generator[None, None, CallStart | None]:
        for pattern, kind in patterns if self.failed < MAX_FAILED else ():
            head = yield from self._unread.match(pattern, position)
            if head is not None and (kind == "value" or self._tool(head["name"])):
                return head, kind
        return None

    def _tool(self, written: str) -> str:
        """Return the offered tool that a head names, with or without a namespace; empty if there is none."""
        if name := offered_name(written, self._tools):
            return name
        named = self._names.fullmatch(written)
        return str(named["name"]) if named else ""

    @cached_property
    def _names(self) -> "regex.Pattern[str]":
        """Pattern of what the model may write for the names of the tools, with the longest names first."""

        def written(name: str) -> str:
            keys = "|".join(map(regex.escape, self._tools[name])) or "(?!)"
            parts = {"TOOL": f"(?P<name>{regex.escape(name)})", "KEY": f"(?:{keys})"}
            return str(regex.sub("TOOL|KEY", lambda part: parts[part[0]], self._patterns.form.naming))

        return regex.compile("|".join(map(written, sorted(self._tools, key=len, reverse=True))))

    def _read_call(self, head: Match, kind: str) -> Generator[None, None, bool]:
        """Parse a call and send it; return False, with nothing consumed, if it cannot be parsed."""
        if kind in {"json", "member"}:
            return (yield from self._stream_call(head, kind))
        if kind == "value":
            read = self._read_value(head)
        elif self._patterns.form.opens:
            read = self._read_parameters(head)
        else:
            read = self._read_literal_call(head)
        self.in_call = True
        end, calls = yield from read
        self.in_call = False
        if not calls:
            logger.warning(
                "text that looks like a tool call could not be parsed and is sent as text: %.200r", self._unread.text
            )
            self.failed += 1
            return False
        self._unread.take(end)
        self._calls.send(calls)
        return True

    def _stream_call(self, head: Match, kind: str) -> Generator[None, None, bool]:
        """Send the arguments after a head, and consume the markers around them."""
        if (yield from self._unread.match(_OBJECT, head.end())) is None:
            return False
        self._unread.take(head.end())
        tail = _AFTER_MEMBER if kind == "member" else self._patterns.tail
        end = self._patterns.end if kind == "member" else self._patterns.tail or self._patterns.end
        yield from self.stream_arguments(self._tool(head["name"]), head.groupdict().get("id"), end)
        closing = (yield from self._unread.match(tail)) if tail else None
        self._unread.take(closing.end() if closing else 0)
        return True

    # --- each returns the end position and the calls; no calls if they cannot be parsed -----------------------------

    def _read_value(self, head: Match) -> Generator[None, None, tuple[int, list[Call]]]:
        """Parse an object, or a list of objects, that includes the tool name."""
        reader, position = JsonReader(), head.end()
        while True:
            position += reader.read(self._unread.text[position:])[0]
            if reader.complete or reader.broken or not (yield from self._unread.wait_for_more()):
                break
        written, is_whole, end = self._unread.text[head.end() : position], reader.complete, self._patterns.end
        is_at_end = self._unread.ended and position == len(self._unread.text)
        if reader.broken and reader.missing and end:
            is_at_end = (yield from self._unread.match(end, position)) is not None
        if end and PYTHON_OBJECT.match(written + self._unread.text[position : position + 1]):
            closing = yield from self._unread.search(end, position)
            position = closing.start() if closing else len(self._unread.text)
            written, is_whole = self._unread.text[head.end() : position], closing is not None or self._unread.ended
        elif reader.missing and is_at_end:
            written, is_whole = written + reader.missing, True
        calls = parse_json_calls(written, self._tools) if is_whole else []
        fence = (yield from self._unread.match(_FENCE, position)) if calls and "```" in head.group() else None
        return fence.end() if fence else position, calls

    def _read_parameters(self, head: Match) -> Generator[None, None, tuple[int, list[Call]]]:
        """Parse parameters, each of them a text between markers."""
        name = self._tool(head["name"])
        position = head.end() - len(head["name"].rpartition(name)[2])  # a key that is joined to the name is read again
        written: list[tuple[Match, str]] = []
        while opened := (yield from self._unread.match(self._patterns.parameters.opens, position)):
            closed = yield from self._find_parameter_end(opened)
            if closed is None:
                return 0, []
            text = self._unread.text[opened.end() : closed.start()]
            written.append((opened, text if closed.group() else _unclosed(text)))
            position = closed.end()
        finished = yield from self._unread.match(self._patterns.parameters.finishes, position)
        if written and finished is None:
            finished = yield from self._unread.match(self._patterns.parameters.before_another, position)
            if finished is None and self._unread.ended:
                finished = _BLANK_END.match(self._unread.text, position)
        return (finished.end(), [Call(name, to_json(self._values(name, written)))]) if finished else (0, [])

    def _values(self, name: str, written: Sequence[tuple[Match, str]]) -> dict[str, Any]:
        """Parse the texts of a call's parameters."""
        schemas = self._tools[name]
        missing = schemas.keys() - {_key(opened) for opened, _ in written}
        parts = [part for opened, text in written for part in self._parts(opened, text, missing)]
        padded = self._patterns.form.padded or all(text[:1] == text[-1:] == "\n" for _, text in parts)
        values: dict[str, Any] = {}
        for opened, text in parts:
            key = _key(opened)
            values[key] = self._value(opened, self._without_padding(text) if padded else text, schemas.get(key))
        return values

    def _without_padding(self, text: str) -> str:
        form = self._patterns.form
        text = _SURPLUS_CLOSE.sub("", text) if form.padded and form.opens not in text else text
        return text.removeprefix("\n").removesuffix("\n")

    def _value(self, opened: Match, text: str, schema: Any) -> Any:
        if marker := self._patterns.form.nested:
            return parse_nested_value(text, marker, schema)
        return parse_parameter(text, schema, opened.groupdict().get("kind"))

    def _parts(self, opened: Match, text: str, missing: Container[str]) -> Iterator[tuple[Match, str]]:
        """Split a text without a closing marker where parameters that are `missing` begin: the model did not close it.
        A text that begins on a line of its own is followed by parameters that do so, too."""
        start = 0
        if not (opened.groupdict().get("quoted") or self._patterns.parameters.any_closes.search(text)):
            for head in self._patterns.parameters.inner_opens[text.startswith("\n")].finditer(text):
                if _key(head) in missing:
                    yield opened, _unclosed(text[start : head.start()])
                    opened, start = head, head.end()
        yield opened, text[start:]

    def _find_parameter_end(self, opened: Match) -> Generator[None, None, Match | None]:
        """Find the end of a parameter, skipping closing markers inside its value."""
        closes = partial(self._patterns.parameters.closes, _key(opened), has_start_marker=self._has_start_marker)
        is_quoted = bool(opened.groupdict().get("quoted"))
        closing_pattern = self._patterns.parameters.closes_quoted if is_quoted else closes()
        first = closed = yield from self._unread.search(closing_pattern, opened.end())
        depth, position = 0, opened.end()
        while closed is not None and not is_quoted:
            for edge in self._patterns.parameters.edges.finditer(self._unread.text, position, closed.start()):
                depth = depth + 1 if edge["name"] else max(0, depth - 1)
            if not depth:
                break
            if position == opened.end() and (unclosed := self._unclosed_end(opened.end(), closed.start())):
                return unclosed  # what follows is the next call, not one that the value quotes
            position = closed.end()
            closed = yield from self._unread.search(closing_pattern, position)
        closed = closed or first
        if closed is None and self._unread.final:
            closing_pattern = closes(final=True, ended=self._unread.ended)
            closed = closing_pattern.search(self._unread.text, opened.end())
            if closed is None and self._unread.ended:
                closed = self._unclosed_end(opened.end(), len(self._unread.text))
        return closed

    def _unclosed_end(self, start: int, end: int) -> Match | None:
        """Return where a call ends between these positions although its parameter is not closed."""
        text, parameters = self._unread.text, self._patterns.parameters
        unclosed = parameters.unclosed_ends[text.startswith("\n", start)].search(text, start, end)
        return unclosed if unclosed and not parameters.any_closes.search(text, start, unclosed.start()) else None

    def _read_literal_call(self, head: Match) -> Generator[None, None, tuple[int, list[Call]]]:
        """Parse up to the first place that completes a call: an end marker, or the next start marker."""
        name, start, ends = self._tool(head["name"]), head.end(), list[Match]()
        position = start
        while len(ends) < MAX_END_MARKERS:
            end = yield from self._unread.search(self._patterns.literal_end, position)
            if end is None:
                break
            written = self._unread.text[start : end.start()]
            calls, rest = self._parse_literal(name, written)
            if calls and not rest.strip():
                quoted = self._patterns.form.quote
                return end.end() if quoted else (yield from self._skip_echo(written.strip(), end.end())), calls
            ends.append(end)
            position = max(end.end(), end.start() + 1)
        if self._unread.ended:  # without an end marker
            calls, rest = self._parse_literal(name, self._unread.text[start:])
            if calls and rest.strip(" ")[:1] in {"", "\n"}:
                return len(self._unread.text) - len(rest), calls
        for end in reversed(ends) if self._patterns.form.quote else ():
            written = close_last_string(self._unread.text[start : end.start()], self._patterns.form.quote)
            calls, rest = self._parse_literal(name, written)
            if calls and not rest:
                return end.end(), calls
        return 0, []

    def _parse_literal(self, name: str, text: str) -> tuple[list[Call], str]:
        """Parse a call, or several that Python writes; return them and the rest."""
        quote = self._patterns.form.quote
        if not quote:
            return parse_python_calls(text, self._tools), ""
        try:
            arguments, rest = parse_gemma_arguments(text, quote, self._tools[name])
        except (ValueError, RecursionError):
            return [], text
        return [Call(name, to_json(arguments))], rest

    def _skip_echo(self, written: str, position: int) -> Generator[None, None, int]:
        """Return the position after a repetition of what is `written` before the end marker; LFM2 repeats calls."""
        space = yield from self._unread.match(_SPACE, position)
        echo = space.end() if space else position
        while True:
            text = self._unread.text[echo : echo + len(written)]
            if text == written or not written.startswith(text) or not (yield from self._unread.wait_for_more()):
                return echo + len(written) if text == written else position


def _key(opened: Match) -> str:
    return str(opened["key"]).strip()


def _unclosed(text: str) -> str:
    """Return a text that no closing marker follows without the newline that separates it from the next marker."""
    return text if text.startswith("\n") else text.removesuffix("\n")
