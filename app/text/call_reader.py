"""Reads calls in any form from a model's text: names of offered tools, and arguments as they arrive."""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import regex

from app.core.messages import ToolCallDelta
from app.text.calls import (
    Call,
    Tools,
    gemma_arguments,
    id_of,
    listed_calls,
    nested_value,
    parameter_value,
    python_calls,
)
from app.text.dialect import CallPatterns, compiled
from app.text.json_text import JsonText, as_json
from app.text.unread_text import UnreadText

MAX_ENDS = 64
"""Limit on the marks that are tried, one after another, as the end of a call."""
MAX_FAILED = 16
"""Limit on false beginnings of calls in one answer; beyond it nothing is read as a call."""
_OBJECT = compiled(r'\s*\{\s*["}]')
_BEHIND_MEMBER = compiled(r"\s*\}")
_FENCE = compiled(r"\s*```")

_logger = logging.getLogger("paceline.dialect")

Match = Any
"""Match of `regex`."""
Begun = tuple[Match, str]
"""Beginning of a call of an offered tool, and the kind of its arguments."""


class CallsEnded(Exception):
    """The rest of the answer is ignored: only one call is allowed, or a call begun for the client cannot be read."""


class CallSender:
    """Sends the calls of one answer. `begins` is called before each; `one_call`: the first one ends the answer.
    `taken`: ids that no call may have."""

    def __init__(
        self,
        begins: Callable[[], None],
        tell: Callable[[ToolCallDelta], None],
        *,
        one_call: bool,
        taken: Iterable[str] = (),
    ) -> None:
        self._begins = begins
        self._tell = tell
        self._one_call = one_call
        self._taken = set(taken)
        self.count = 0
        """Number of calls that began."""
        self.unfinished: int | None = None
        """Index of the last call while its arguments are incomplete."""

    def begin(self, name: str, written_id: str | None) -> None:
        """Send a name; arguments follow."""
        self._name(Call(name, "", written_id or ""))
        self.unfinished = self.count - 1

    def add(self, arguments: str) -> None:
        """Send more arguments."""
        if arguments:
            self._tell(ToolCallDelta(index=self.count - 1, arguments=arguments))

    def end(self) -> None:
        """Complete the arguments. Raises CallsEnded if no more calls are allowed."""
        self.unfinished = None
        if self._one_call:
            raise CallsEnded

    def tell(self, calls: Sequence[Call]) -> None:
        """Send complete calls."""
        for call in calls:
            self._name(call)
            self.end()

    def _name(self, call: Call) -> None:
        self._begins()
        call_id = id_of(call.id, self._taken)
        self._taken.add(call_id)
        self._tell(ToolCallDelta(index=self.count, id=call_id, name=call.name, arguments=call.arguments))
        self.count += 1


class CallReader:
    """Reads calls in one form. Each generator waits for more text until it can decide."""

    def __init__(self, written: UnreadText, tools: Tools, patterns: CallPatterns, calls: CallSender) -> None:
        self._written = written
        self._tools = tools
        self._patterns = patterns
        self._calls = calls
        self._marked = False
        """Whether the start mark of the form came before the calls, so that its end mark is still to come."""
        self.failed = 0
        """Number of false beginnings of calls."""

    def first(self) -> Generator[None, None, Begun | None]:
        """Return the call that begins here, behind text."""
        return self._begun(self._patterns.first)

    def read(self) -> Generator[None, None, bool]:
        """Read consecutive calls and the mark that ends them; return False, with nothing taken, if there is none."""
        begun = yield from self.first()
        self._marked = begun is not None and not self._patterns.unmarked(begun[0].group())
        has_calls = False
        while begun is not None and (yield from self._call(*begun)):
            has_calls = True
            end = (yield from self._written.match(self._patterns.end)) if self._patterns.end else None
            if end is not None:
                self._written.take(end.end())
                break
            begun = yield from self._begun(self._patterns.again)
        return has_calls

    def stream(
        self, name: str, written_id: str | None, end: "regex.Pattern[str] | None"
    ) -> Generator[None, None, bool]:
        """Send JSON arguments as they are written; `end`: the mark behind them. Return False if no object begins here.

        Raises CallsEnded if they turn out not to be an object.
        """
        if (yield from self._written.match(_OBJECT)) is None:
            return False
        self._written.take(len(self._written.text) - len(self._written.text.lstrip()))
        self._calls.begin(name, written_id)
        reader = JsonText()
        while not reader.complete:
            count, arguments = reader.read(self._written.text)
            self._written.take(count)
            self._calls.add(arguments)
            if reader.complete:
                break
            if reader.broken:
                if not reader.missing or end is None or (yield from self._written.match(end)) is None:
                    _logger.warning("the arguments of a call of %s are no JSON at %.80r", name, self._written.text)
                    raise CallsEnded
                self._calls.add(reader.missing)
                break
            if not (yield from self._written.more()):
                raise CallsEnded
        self._calls.end()
        return True

    def _begun(self, heads: Sequence[tuple["regex.Pattern[str]", str]]) -> Generator[None, None, Begun | None]:
        for pattern, kind in heads if self.failed < MAX_FAILED else ():
            head = yield from self._written.match(pattern)
            if head is not None and (kind == "value" or head["name"] in self._tools):
                return head, kind
        return None

    def _call(self, head: Match, kind: str) -> Generator[None, None, bool]:
        """Read a call and send it; return False, with nothing taken, if there is none."""
        if kind in {"json", "member"}:
            return (yield from self._streamed(head, kind))
        if kind == "value":
            read = self._value(head)
        elif self._patterns.form.opens:
            read = self._parameters(head)
        else:
            read = self._closed(head)
        end, calls = yield from read
        if not calls:
            _logger.warning(
                "text that looks like a tool call could not be parsed and is sent as text: %.200r", self._written.text
            )
            self.failed += 1
            return False
        self._written.take(end)
        self._calls.tell(calls)
        return True

    def _streamed(self, head: Match, kind: str) -> Generator[None, None, bool]:
        """Send the arguments behind a head, and take the marks around them."""
        if (yield from self._written.match(_OBJECT, head.end())) is None:
            return False
        self._written.take(head.end())
        tail = _BEHIND_MEMBER if kind == "member" else self._patterns.tail
        end = self._patterns.end if kind == "member" else self._patterns.tail or self._patterns.end
        yield from self.stream(head["name"], head.groupdict().get("id"), end)
        closing = (yield from self._written.match(tail)) if tail else None
        self._written.take(closing.end() if closing else 0)
        return True

    # --- each returns where the calls end, and the calls; none if they cannot be read -------------------------------

    def _value(self, head: Match) -> Generator[None, None, tuple[int, list[Call]]]:
        """Read an object or a list of objects that include the names."""
        reader, place = JsonText(), head.end()
        while True:
            place += reader.read(self._written.text[place:])[0]
            if reader.complete or reader.broken or not (yield from self._written.more()):
                break
        calls = listed_calls(self._written.text[head.end() : place], self._tools) if reader.complete else []
        fence = (yield from self._written.match(_FENCE, place)) if calls and "```" in head.group() else None
        return fence.end() if fence else place, calls

    def _parameters(self, head: Match) -> Generator[None, None, tuple[int, list[Call]]]:
        """Read parameters, each of them a text between marks."""
        form, name, place = self._patterns.form, head["name"], head.end()
        values: dict[str, Any] = {}
        while True:
            finished = yield from self._written.match(self._patterns.finishes, place)
            if finished is not None:
                return finished.end(), [Call(name, as_json(values))]
            opened = yield from self._written.match(self._patterns.opens, place)
            closed = (yield from self._close(opened)) if opened is not None else None
            if opened is None or closed is None:
                return 0, []
            text = self._written.text[opened.end() : closed.start()]
            key, schema = opened["key"].strip(), self._tools[name].get(opened["key"].strip())
            if form.padded:
                text = text.removeprefix("\n").removesuffix("\n")
            values[key] = (
                nested_value(text, form.nested, schema)
                if form.nested
                else parameter_value(text, schema, opened.groupdict().get("kind"))
            )
            place = closed.end()

    def _close(self, opened: Match) -> Generator[None, None, Match | None]:
        """Find the end of the parameter, past the same mark inside its text."""
        closes = self._patterns.closes(opened["key"], marked=self._marked, final=False)
        if opened.groupdict().get("quoted"):
            closes = self._patterns.closes_quoted
        closed = yield from self._written.search(closes, opened.end())
        if closed is None and self._written.final:
            closes = self._patterns.closes(opened["key"], marked=self._marked, final=True)
            closed = closes.search(self._written.text, opened.end())
        return closed

    def _closed(self, head: Match) -> Generator[None, None, tuple[int, list[Call]]]:
        """Read up to the first mark that completes a call."""
        start = place = head.end()
        for _ in range(MAX_ENDS):
            end = yield from self._written.search(self._patterns.end, place)
            calls = self._literal(head["name"], self._written.text[start : end.start() if end else None])
            if calls or end is None:
                return end.end() if end else len(self._written.text), calls
            place = end.end()
        return 0, []

    def _literal(self, name: str, text: str) -> list[Call]:
        quote = self._patterns.form.quote
        if not quote:
            return python_calls(text, self._tools)
        try:
            return [Call(name, as_json(gemma_arguments(text, quote)))]
        except (ValueError, RecursionError):
            return []
