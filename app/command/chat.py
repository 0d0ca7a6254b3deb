"""`chat`: a conversation in the terminal. Drafted tokens that were accepted are marked; figures follow each reply.

The server keeps nothing: this process keeps the conversation and sends all of it with each request. When the model
calls a tool, the user types the tool's result.
"""

import contextlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from app.command.loaded import share_text
from app.command.server import NoServer, Server
from app.core.errors import CommandError

with contextlib.suppress(ImportError):
    import readline  # noqa: F401 - lets `input` edit lines and remember them

EMBEDDED = "embedded"
ACCEPTED_STYLE = "green underline"
THINKING_STYLE = "dim italic"
CALL_STYLE = "cyan"
MAX_FILE_CHARACTERS = 400_000
HELP = """/help       list the commands
/file PATH  send a text file along with the next message; so does dropping it here
/thoughts   fold or unfold what the model thinks
/reset      start a new conversation
/quit       quit (or Ctrl-D)
Ctrl-C stops a reply and keeps what has arrived."""

ReadLine = Callable[[str], str]
"""Callback that shows a prompt and returns a line; it raises EOFError on Ctrl-D."""


@dataclass(slots=True)
class Reply:
    """Reply received so far."""

    text: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls, in the form in which the next request sends them back."""
    timings: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)
    stopped: bool = False


class Chat:
    """One conversation. `request_fields`: the model, and other fields of every request."""

    def __init__(
        self, server: Server, request_fields: Mapping[str, Any], console: Console, *, system: str = ""
    ) -> None:
        self._server = server
        self._request_fields = request_fields
        self._system = system
        self._console = console
        self._messages: list[dict[str, Any]] = []
        self._files: list[str] = []
        self._is_folded = False
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._files.clear()
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def send_message(self, prompt: str) -> Reply:
        """Send one message, show the reply as it arrives, and its figures at the end. Ctrl-C stops the reply."""
        reply = self._send({"role": "user", "content": "\n\n".join([prompt, *self._files])})
        self._files.clear()
        return reply

    def attach(self, path: Path) -> None:
        """Send a file along with the next message. Raises `CommandError` if it is not text, or too long."""
        try:
            text = path.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"{path} cannot be read as a text file (UTF-8): {error}") from error
        if len(text) > MAX_FILE_CHARACTERS:
            raise CommandError(f"{path} has more than {MAX_FILE_CHARACTERS} characters")
        self._files.append(f'<file name="{path.name}">\n{text}\n</file>')

    def _send(self, *messages: dict[str, Any]) -> Reply:
        before = len(self._messages)
        self._messages += messages
        reply = Reply()
        body = {**self._request_fields, "messages": list(self._messages)}
        try:
            with contextlib.closing(self._server.stream_chat(body)) as chunks:
                for chunk in chunks:
                    self._add_chunk(chunk, reply)
        except KeyboardInterrupt:
            reply.stopped = True
            reply.calls.clear()
        except CommandError:
            del self._messages[before:]
            raise
        thoughts = {"reasoning_content": "".join(reply.thoughts)} if reply.thoughts else {}
        calls = {"tool_calls": reply.calls} if reply.calls else {}
        self._messages.append({"role": "assistant", "content": "".join(reply.text), **thoughts, **calls})
        self._console.print()
        # A script that reads stdout gets only the reply.
        figures = self._console if self._console.is_terminal else Console(stderr=True, soft_wrap=True)
        figures.print(Text(summary_of(reply), style="dim"))
        return reply

    def converse(self, read_line: ReadLine) -> int:
        """Converse until Ctrl-D or /quit, and return exit code 0. Raises NoServer when the server is gone."""
        self._console.print(Text(f"{self._request_fields['model']}. /help lists the commands.", style="dim"))
        self._console.print(legend())
        while True:
            try:
                line = read_line("> ").strip()
            except EOFError:
                self._console.print()
                return 0
            except KeyboardInterrupt:
                self._console.print(Text("Ctrl-D quits.", style="dim"))
                continue
            if line in {"/quit", "/exit"}:
                return 0
            try:
                self._handle_line(line, read_line)
            except NoServer:
                raise
            except CommandError as error:
                self._console.print(Text(str(error), style="red"))

    def _handle_line(self, line: str, read_line: ReadLine) -> None:
        command, _, argument = line.partition(" ")
        if line == "/help":
            self._console.print(Text(HELP))
        elif path := typed_path(argument) if command == "/file" else dropped_file(line):
            self.attach(path)
            self._console.print(Text("Attached to the next message.", style="dim"))
        elif line == "/file":
            self._console.print(Text("/file needs the path of a file.", style="yellow"))
        elif line == "/thoughts":
            self._is_folded = not self._is_folded
            self._console.print(Text("Folded." if self._is_folded else "Unfolded.", style="dim"))
        elif line == "/reset":
            self.reset()
            self._console.print(Text("Forgotten.", style="dim"))
        elif line.startswith("/"):
            self._console.print(Text(f"{command} is no command; /help lists them.", style="yellow"))
        elif line:
            reply = self.send_message(line)
            while reply.calls:
                reply = self._send(*(_result(call, read_line) for call in reply.calls))

    def _add_chunk(self, chunk: Mapping[str, Any], reply: Reply) -> None:
        reply.timings = chunk.get("timings") or reply.timings
        reply.speculation = chunk.get("speculation") or reply.speculation
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if reasoning := delta.get("reasoning_content"):
                if not self._is_folded:
                    self._show(Text(reasoning, style=THINKING_STYLE))
                elif not reply.thoughts:
                    self._show(Text("Thinking… ", style=THINKING_STYLE))
                reply.thoughts.append(reasoning)
            for call in delta.get("tool_calls") or ():
                self._show(Text(_add_call(call, reply.calls), style=CALL_STYLE))
            if content := delta.get("content"):
                if reply.thoughts and not reply.text:
                    self._show(Text("\n\n"))
                reply.text.append(content)
                spans = delta.get("accepted_spans") or choice.get("accepted_spans") or chunk.get("accepted_spans") or ()
                self._show(mark_accepted(content, spans))

    def _show(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True)


def _add_call(delta: Mapping[str, Any], calls: list[dict[str, Any]]) -> str:
    """Append a delta of a tool call to `calls`; return the text to print."""
    function = delta.get("function") or {}
    arguments = str(function.get("arguments") or "")
    if not function.get("name"):
        calls[delta.get("index") or 0]["function"]["arguments"] += arguments
        return arguments
    whole = {"name": str(function["name"]), "arguments": arguments}
    calls.append({"id": str(delta.get("id") or ""), "type": "function", "function": whole})
    return f"\n{whole['name']} {arguments}"


def _result(call: Mapping[str, Any], read_line: ReadLine) -> dict[str, Any]:
    """Ask the user for the result of a tool; Ctrl-D or Ctrl-C means `no result`."""
    try:
        result = read_line(f"Result of {call['function']['name']}> ")
    except (EOFError, KeyboardInterrupt):
        result = "no result"
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


def typed_path(text: str) -> Path | None:
    """Parse a path as a shell does: quoted, or with backslashes before spaces."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = [text.strip()]
    return Path(" ".join(words)) if words else None


def dropped_file(line: str) -> Path | None:
    """Return the file that was dropped on the terminal, or None. The terminal types such a file's absolute path."""
    path = typed_path(line)
    try:
        return path if path is not None and path.is_absolute() and path.is_file() else None
    except (OSError, ValueError):
        return None


def output_constraints(schema: Path | None, tools: Path | None) -> dict[str, Any]:
    """Return the request fields for a JSON schema and for tools, each read from a file in OpenAI's format."""
    fields: dict[str, Any] = {}
    if schema is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _json(schema)}}
    if tools is not None:
        content = _json(tools)
        functions = content if isinstance(content, list) else [content]
        if not all(isinstance(function, dict) for function in functions):
            raise CommandError(f"{tools} does not contain a list of functions")
        fields["tools"] = [
            function if "function" in function else {"type": "function", "function": function} for function in functions
        ]
    return fields


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} is not valid JSON: {error}") from error


def legend() -> Text:
    """Explain the marks."""
    return Text.assemble(("Text like ", "dim"), ("this", ACCEPTED_STYLE), (" was drafted and accepted.", "dim"))


def mark_accepted(content: str, spans: Any) -> Text:
    """Return the text with its accepted spans marked."""
    text = Text(content)
    for start, end in spans:
        text.stylize(ACCEPTED_STYLE, start, end)
    return text


def summary_of(reply: Reply) -> str:
    """Summarise tokens per second, acceptance and tokens per step, or why nothing was drafted."""
    if reply.stopped:
        return "Stopped."
    timings, speculation = reply.timings, reply.speculation
    written = timings.get("predicted_n", 0)
    parts = [
        f"{written} {'token' if written == 1 else 'tokens'}",
        f"{float(timings.get('predicted_per_second') or 0):.1f} tokens/s",
    ]
    drafted, accepted = speculation.get("drafted") or 0, speculation.get("accepted") or 0
    method = speculation.get("method") or "off"
    if drafted:
        parts.append(f"{method}: {accepted} of {drafted} drafts accepted ({share_text(accepted, drafted)})")
        parts.append(f"{float(speculation.get('tokens_per_cycle') or 1):.2f} tokens per step")
    else:
        parts.append("no drafting")
    if reason := speculation.get("reason"):
        parts.append(str(reason))
    return " · ".join(parts)


def choose_model(server: Server, wanted: str | None) -> str:
    """Return the named model, else the only loaded one, else the user's only one, else the first embedded one with a
    drafter. Raises `CommandError` if there is no model, or if the user must choose."""
    if wanted:
        return wanted
    every = server.call("GET", "/v1/models").get("data") or ()
    models = [model for model in every if model.get("kind") != "encoder"]
    if not models:
        raise CommandError("no model found: add one to a folder in PACELINE_MODEL_DIRS, then check `paceline ls`")
    loaded = [model["id"] for model in models if model.get("state") == "loaded"]
    own = [model["id"] for model in models if model.get("source") != EMBEDDED]
    drafted = [model["id"] for model in models if model.get("draft") and not own]
    for candidates in (loaded, own, drafted[:1]):
        if len(candidates) == 1:
            return str(candidates[0])
    names = ", ".join(model["id"] for model in models)
    raise CommandError(
        f"name a model: {names}. `paceline chat MODEL`, or set a default: `paceline config set default_model MODEL`"
    )
