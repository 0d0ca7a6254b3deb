"""What `serve` says: where it listens, what it found, and two ways to try it."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from app import __version__
from app.command.listing import Row, disk_table
from app.settings import Settings


def greeting(settings: Settings, rows: Sequence[Row], address: str, setup: str = "") -> RenderableType:
    """The text that greets whoever starts the server; `setup` is where the first password is chosen."""
    address = address.rstrip("/")
    usable = [row for row in rows if not row.problem and row.kind == "main"]
    parts: list[RenderableType] = [
        Text.assemble(("Paceline ", "bold"), __version__, "  ", (f"{address}/v1", "bold green"), "  (OpenAI endpoint)"),
        Text.assemble("Dashboard ", (f"{address}/admin/", "bold green")),
        *_first_run(setup),
        Text(""),
    ]
    if not usable:
        parts.append(Text("No model found. Add one to a folder in PACELINE_MODEL_DIRS.", style="yellow"))
        return Group(*parts)
    model = next((row for row in usable if row.draft), usable[0])
    parts += [
        Padding(disk_table(rows), (0, 2)),
        Text("\nTry it:\n", style="bold"),
        _code(curl_line(address, model.id)),
        _code(python_lines(address, model.id, needs_key=settings.api_key is not None)),
        Text("Or chat in another terminal: paceline chat. Ctrl-C stops the server.", style="dim"),
    ]
    return Group(*parts)


def _first_run(setup: str) -> list[Text]:
    if not setup:
        return []
    return [
        Text("\nChoose a password for the dashboard here (valid once, for 30 minutes):", style="bold"),
        Text(setup, style="cyan", no_wrap=True, overflow="ignore"),
    ]


def curl_line(address: str, model: str) -> str:
    """One line for a shell."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Count from 1 to 20."}}]}}'
    return f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def python_lines(address: str, model: str, *, needs_key: bool) -> str:
    """The same with the official client, streamed."""
    key = 'os.environ["PACELINE_API_KEY"]' if needs_key else '"none"'
    lines = ["import os"] if needs_key else []
    lines += [
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{address}/v1", api_key={key})',
        'question = {"role": "user", "content": "Count from 1 to 20."}',
        f'for chunk in client.chat.completions.create(model="{model}", messages=[question], stream=True):',
        '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
    ]
    return "\n".join(lines)


def _code(text: str) -> Text:
    """Lines to copy: never indented, never broken by the width of the window."""
    return Text(text + "\n", style="cyan", no_wrap=True, overflow="ignore")
