"""`chat`: a conversation at the prompt. Tokens that the drafter guessed are marked; numbers follow each reply.

The server keeps nothing: the conversation lives here and goes along with each request.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
HELP = """/help   list the commands
/reset  start a new conversation
/quit   quit (or Ctrl-D)
Ctrl-C stops a reply and keeps what has arrived."""

ReadLine = Callable[[str], str]
"""Shows a prompt and returns a line; raises EOFError on Ctrl-D."""


@dataclass(slots=True)
class Reply:
    """What came back so far."""

    text: list[str] = field(default_factory=list)
    timings: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)
    stopped: bool = False


class Chat:
    """One conversation. `asked`: the model, and what else goes along with every request."""

    def __init__(self, server: Server, asked: Mapping[str, Any], console: Console, *, system: str = "") -> None:
        self._server = server
        self._asked = asked
        self._system = system
        self._console = console
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, prompt: str) -> Reply:
        """Send one message, show the reply while it comes, and its numbers at the end. Ctrl-C stops the reply."""
        self._messages.append({"role": "user", "content": prompt})
        reply = Reply()
        body = {**self._asked, "messages": list(self._messages)}
        try:
            with contextlib.closing(self._server.stream_chat(body)) as chunks:
                for chunk in chunks:
                    self._take(chunk, reply)
        except KeyboardInterrupt:
            reply.stopped = True
        except CommandError:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": "".join(reply.text)})
        self._console.print()
        self._console.print(Text(summary_of(reply), style="dim"))
        return reply

    def converse(self, read_line: ReadLine) -> int:
        """Talk until Ctrl-D or /quit. The answer is the exit code: 1 when the server went away."""
        self._console.print(Text(f"{self._asked['model']}. /help lists the commands.", style="dim"))
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
                self._answer(line)
            except NoServer:
                raise
            except CommandError as error:
                self._console.print(Text(str(error), style="red"))

    def _answer(self, line: str) -> None:
        if line == "/help":
            self._console.print(Text(HELP))
        elif line == "/reset":
            self.reset()
            self._console.print(Text("Forgotten.", style="dim"))
        elif line.startswith("/"):
            self._console.print(Text(f"{line.split(maxsplit=1)[0]} is no command; /help lists them.", style="yellow"))
        elif line:
            self.say(line)

    def _take(self, chunk: Mapping[str, Any], reply: Reply) -> None:
        reply.timings = chunk.get("timings") or reply.timings
        reply.speculation = chunk.get("speculation") or reply.speculation
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content"):
                self._show(Text(thought, style=THINKING_STYLE))
            if said := delta.get("content"):
                reply.text.append(said)
                spans = delta.get("accepted_spans") or choice.get("accepted_spans") or chunk.get("accepted_spans") or ()
                self._show(marked(said, spans))

    def _show(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True)


def legend() -> Text:
    """What the marks mean."""
    return Text.assemble(("Text like ", "dim"), ("this", ACCEPTED_STYLE), (" was drafted and accepted.", "dim"))


def marked(said: str, spans: Any) -> Text:
    """The text with its accepted spans marked."""
    text = Text(said)
    for start, end in spans:
        text.stylize(ACCEPTED_STYLE, start, end)
    return text


def summary_of(reply: Reply) -> str:
    """Tokens per second, acceptance and tokens per step, or why nothing was drafted."""
    if reply.stopped:
        return "Stopped."
    timings, speculation = reply.timings, reply.speculation
    parts = [
        f"{timings.get('predicted_n', 0)} tokens",
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
    """The model that was named, else the one that is loaded, else the only one of the user, else the embedded one that
    has a drafter. Raises `CommandError` where there is a choice to make."""
    if wanted:
        return wanted
    models = server.call("GET", "/v1/models").get("data")
    if not models:
        raise CommandError("no model found: add one to a folder in PACELINE_MODEL_DIRS, then check `paceline ls`")
    loaded = [model["id"] for model in models if model.get("state") == "loaded"]
    own = [model["id"] for model in models if model.get("source") != EMBEDDED]
    drafted = [model["id"] for model in models if model.get("draft") and not own]
    for candidates in (loaded, own, drafted[:1]):
        if len(candidates) == 1:
            return str(candidates[0])
    names = ", ".join(loaded or own or [model["id"] for model in models])
    raise CommandError(
        f"name a model: {names}. `paceline chat MODEL`, or set a default: `paceline config set default_model MODEL`"
    )
