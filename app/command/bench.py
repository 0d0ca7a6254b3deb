"""`paceline bench MODEL`: does drafting pay for this model on this computer, and what is the best setup?

The running server measures and stores the result, as for the dashboard; without one that accepts the request, this
command starts its own for the duration.
"""

import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

from pydantic import SecretStr
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.command.server import NoKey, NoServer, Server, asked_server
from app.core.errors import CommandError
from app.serving.sweep.grid import GOVERNOR, MAIN, PLAIN, Cell
from app.serving.sweep.report import CellReport, Figures, Report, doubt_text, report_of
from app.settings import Settings

MEASUREMENTS = "/admin/api/measurements"
ASK_SECONDS = 0.5
START_SECONDS = 0.1
START = "from app.cli import main; main()"
COLUMNS = ("Setting", "Tokens/s", "Speedup", "Accepted", "Tokens\nper step")
PHASES = {"loading": "loading", "paused": "waiting for other requests", "restoring": "restoring what was loaded"}


def bench_model(
    asked: Mapping[str, Any],
    settings: Settings,
    *,
    screen: Console,
    json_file: Path | None = None,
    svg_file: Path | None = None,
    apply: bool = False,
) -> None:
    """Run the measurement that is `asked` for (`model`, `prompts`, …) and show it.

    Raises `CommandError` if that is not possible, KeyboardInterrupt after a second Ctrl-C.
    """
    model = asked["model"]
    with screen.status(f"{model}: starting") as status, _begun(asked, settings, screen) as server:
        row = measured(server, model, status.update)
        status.stop()
        show_measurement(row, screen)
        document = {**row["results"], **{name: row[name] for name in ("report", "machine", "versions")}}
        _write(json_file, json.dumps(document, indent=2) + "\n")
        _write(svg_file, as_svg(report_of(row["results"]), f"Speed by draft length: {_title(row)}"))
        if not row["report"]["advice"]["changes"]:
            screen.print("Nothing to change.")
        elif apply:
            server.call("POST", f"{MEASUREMENTS}/{row['id']}/apply", {})
            screen.print(Text(f"Stored for {row['model_id']}; a loaded model gets it as soon as it is free."))
        else:
            screen.print("--apply stores this.")


@contextmanager
def _begun(asked: Mapping[str, Any], settings: Settings, screen: Console) -> Iterator[Server]:
    """Start the measurement on the running server, or on one of this command's own, and yield the server."""
    with ExitStack() as stack:
        server = asked_server(settings)
        try:
            server.call("POST", MEASUREMENTS, asked)
        except (NoServer, NoKey) as error:
            if isinstance(error, NoKey):
                screen.print(Text(f"{error}. Benchmarking with a separate server.", style="dim"))
            server = stack.enter_context(own_server(settings))
            server.call("POST", MEASUREMENTS, asked)
        yield server


@contextmanager
def own_server(settings: Settings) -> Iterator[Server]:
    """Run a server for this command alone, on a free port. Raises CommandError with the reason if it does not start."""
    key = secrets.token_urlsafe()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for ending in (signal.SIGTERM, signal.SIGHUP):  # unwind, so that the server ends too
        signal.signal(ending, lambda *_: sys.exit(1))
    words = {"PACELINE_HOST": "127.0.0.1", "PACELINE_PORT": str(port), "PACELINE_API_KEY": key, "PACELINE_OPEN": "0"}
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-c", START, "serve"],
            env={**os.environ, **words},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,  # Ctrl-C is for this command, which then ends the child
        )
        try:
            server = Server(settings.with_command_line(host="127.0.0.1", port=port, api_key=SecretStr(key)))
            while not _is_live(server):
                if child.poll() is not None:
                    said.seek(0)
                    raise CommandError(said.read().decode(errors="replace").strip() or "the server did not start")
                time.sleep(START_SECONDS)
            yield server
        finally:
            child.terminate()
            child.wait()


def _is_live(server: Server) -> bool:
    try:
        server.call("GET", "/health/live")
    except NoServer:
        return False
    return True


def measured(server: Server, model: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Wait for the measurement and return its stored result; Ctrl-C stops it and keeps the results so far."""
    while True:
        try:
            view = server.call("GET", f"{MEASUREMENTS}?model={quote(model)}")
            if view["active"] is None:
                break
            tell(progress_text(view["active"]))
            time.sleep(ASK_SECONDS)
        except KeyboardInterrupt:
            tell("stopping")
            server.call("DELETE", f"{MEASUREMENTS}/current")
    last = view["last"]
    row = next((row for row in view["measurements"] if row["id"] == last["number"]), None)
    if row is None:
        raise CommandError(last["problem"] or f"{last['model_id']}: stopped before anything could be compared.")
    return dict(row)


def progress_text(active: Mapping[str, Any]) -> str:
    """Return one line about what is being measured."""
    ask = active["ask"]
    if active["phase"] != "measuring" or ask is None:
        return f"{active['model_id']}: {PHASES.get(active['phase'], active['phase'])}"
    return f"{ask['text']}, {active['seconds_left']} s left"


def show_measurement(row: Mapping[str, Any], screen: Console) -> None:
    """Print the table, what is missing in it, doubts, the verdict and what it would change."""
    report = report_of(row["results"])
    screen.print(measurement_table(report, f"{_title(row)} on {row['results']['options']['device']}"))
    for line in (*row["results"]["options"]["left_out"], left_out(row["results"]), *map(doubt_text, report.doubts)):
        if line:
            screen.print(Text(line, style="dim"))
    screen.print(Text(f"{row['model_id']}: {report.text}", style="bold"))
    for each in row["report"]["advice"]["changes"]:
        screen.print(Text(f"  {each['name']}: {_value(each['old'])} → {_value(each['new'])}"))


def measurement_table(report: Report, title: str) -> Table:
    """Build a table of settings, cell by cell, with the range over the rounds; the best of each cell is green."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right", no_wrap=True)
    for cell in report.cells:
        table.add_row(Text(Cell(cell.rows, cell.context).name, style="bold"))
        for each in cell.settings:
            table.add_row(*_figures(each), style="green" if each.name == cell.best else "")
        table.add_section()
    return table


def _figures(each: Figures) -> tuple[str, ...]:
    used = f": {each.used}" if each.setting == GOVERNOR and each.used else ""
    speed, slowest, fastest = (_speed(value) for value in (each.tokens_per_second, each.slowest, each.fastest))
    return (
        each.name + used,
        f"{speed} ({slowest}-{fastest})",
        "" if each.setting == PLAIN else f"{each.ratio:.2f} ({each.low:.2f}-{each.high:.2f})",
        "" if each.acceptance is None else f"{100 * each.acceptance:.0f} %",
        "" if each.tokens_per_cycle is None else f"{each.tokens_per_cycle:.2f}",
    )


def _speed(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def left_out(results: Mapping[str, Any]) -> str:
    """Return what is missing in the table, and why; "" if nothing is."""
    if results["interrupted"]:
        return "Interrupted: this is what was measured until then."
    if results["skipped"]:
        return f"No time was left for {'; '.join(results['skipped'])}: --minutes gives more."
    return ""


def _title(row: Mapping[str, Any]) -> str:
    return " + ".join([row["model_id"], *row["results"]["drafts"]])


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(value) or "none"
    return "automatic" if value is None else str(value)


def _write(file: Path | None, content: str) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")


PANEL_WIDTH, PANEL_HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 46
HEADER, LEGEND_ROW = 44, 22
TICKS = 5
STYLE = """
.paceline-plot { --back: #ffffff; --ink: #1f2328; --faint: #d8dee4; --soft: #59636e;
  --line-0: #0072b2; --line-1: #c2410c; --line-2: #067a57; --line-3: #9d4a8c; --line-4: #7a5d00; }
@media (prefers-color-scheme: dark) { .paceline-plot { --back: #0d1117; --ink: #e6edf3; --faint: #30363d;
  --soft: #9198a1; --line-0: #58b4f0; --line-1: #ff9b57; --line-2: #3fd0a0; --line-3: #e39bd2; --line-4: #d9b94a; } }
.paceline-plot text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.paceline-plot .title { font-size: 16px; font-weight: 600; } .paceline-plot .panel { font-weight: 600; }
.paceline-plot .tick { fill: var(--soft); } .paceline-plot .back { fill: var(--back); }
.paceline-plot .grid { stroke: var(--faint); } .paceline-plot .line { fill: none; stroke-width: 2; }
.paceline-plot .plain { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 7 4; }
.paceline-plot .governor { stroke: var(--soft); stroke-width: 2; stroke-dasharray: 2 4; }
"""
COLOURS = 5


@dataclass(frozen=True, slots=True)
class Scale:
    """Positions of draft lengths and rates inside a panel."""

    lengths: tuple[int, ...]
    top: float

    def x(self, length: int) -> float:
        """Return the position of a length; lengths are evenly spaced, since they grow by factors."""
        width = PANEL_WIDTH - LEFT - RIGHT
        return LEFT + width * (self.lengths.index(length) + 0.5) / len(self.lengths)

    def y(self, rate: float) -> float:
        return TOP + (PANEL_HEIGHT - TOP - BOTTOM) * (1 - rate / self.top)


def as_svg(report: Report, title: str) -> str:
    """Draw the plot, with the range of each speed; cells of other contexts, or without drafting, are left out."""
    cells = [each for each in report.cells if each.context == MAIN.context and any(map(_drafts, each.settings))]
    cells.sort(key=lambda cell: cell.rows)
    methods = sorted({each.method for cell in cells for each in cell.settings if _drafts(each)})
    columns = 1 if len(cells) < 2 else 2
    width = PANEL_WIDTH * columns
    legend = list(_legend(methods, width))
    header = HEADER + LEGEND_ROW * len(legend)
    height = header + PANEL_HEIGHT * max(1, math.ceil(len(cells) / columns))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'class="paceline-plot" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
        f'<text class="title" x="{LEFT}" y="28">{escape(_shortened(title, width - LEFT))}</text>',
    ]
    parts += [f'<g transform="translate(0 {HEADER + LEGEND_ROW * row})">{line}</g>' for row, line in enumerate(legend)]
    for number, cell in enumerate(cells):
        at = f"{PANEL_WIDTH * (number % columns)} {header + PANEL_HEIGHT * (number // columns)}"
        parts += [f'<g transform="translate({at})">', *_panel(cell, methods), "</g>"]
    if not cells:
        parts.append(f'<text x="{LEFT}" y="{header + 24}">No drafting method was measured.</text>')
    return "\n".join([*parts, "</svg>", ""])


def _drafts(figures: Figures) -> int:
    return figures.num_draft_tokens


def _panel(cell: CellReport, methods: Sequence[str]) -> Iterator[str]:
    lengths = tuple(sorted({each.num_draft_tokens for each in cell.settings if _drafts(each)}))
    highest = max(each.fastest for each in cell.settings)
    step = _nice_step(highest)
    scale = Scale(lengths, step * math.ceil(highest / step))
    yield f'<text class="panel" x="{LEFT}" y="20">{cell.rows} {"request" if cell.rows == 1 else "requests"}</text>'
    yield from _axes(scale, step)
    for setting, kind in ((PLAIN, "plain"), (GOVERNOR, "governor")):
        if (found := cell.find(setting.name)) is not None:
            yield f'<path class="{kind}" d="M{LEFT} {scale.y(found.tokens_per_second):.1f}H{PANEL_WIDTH - RIGHT}"/>'
    for number, method in enumerate(methods):
        yield from _line(sorted((each for each in cell.settings if each.method == method), key=_drafts), scale, number)


def _axes(scale: Scale, step: float) -> Iterator[str]:
    bottom = PANEL_HEIGHT - BOTTOM
    for count in range(round(scale.top / step) + 1):
        y = scale.y(count * step)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{PANEL_WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{count * step:g}</text>'
    for length in scale.lengths:
        x = scale.x(length)
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{length}</text>'
    middle = (LEFT + PANEL_WIDTH - RIGHT) / 2
    yield f'<text x="{middle:.1f}" y="{bottom + 36}" text-anchor="middle">Draft length (tokens)</text>'
    turned = (TOP + bottom) / 2
    yield f'<text transform="translate(14 {turned:.1f}) rotate(-90)" text-anchor="middle">Speed (tokens/s)</text>'


def _line(line: Sequence[Figures], scale: Scale, number: int) -> Iterator[str]:
    if not line:
        return
    colour = f"var(--line-{number % COLOURS})"
    places = [(scale.x(each.num_draft_tokens), scale.y(each.tokens_per_second)) for each in line]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline class="line" stroke="{colour}" points="{path}"/>'
    for each, (x, y) in zip(line, places, strict=True):
        yield f'<path stroke="{colour}" d="M{x:.1f} {scale.y(each.slowest):.1f}V{scale.y(each.fastest):.1f}"/>'
        yield _mark(x, y, number, colour)


def _mark(x: float, y: float, number: int, colour: str) -> str:
    """Draw a circle, square, triangle, diamond or cross, by method."""
    shapes = (
        "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
        "M-4-4h8v8h-8z",
        "M0-5l5 9h-10z",
        "M0-5l5 5l-5 5l-5-5z",
        "M-5-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z",
    )
    return f'<path d="{shapes[number % len(shapes)]}" transform="translate({x:.1f} {y:.1f})" fill="{colour}"/>'


def _legend(methods: Sequence[str], width: int) -> Iterator[str]:
    """Yield rows of entries that fit the width."""
    entries = [
        ('<path class="plain" d="M0 0H28"/>', "no drafting"),
        ('<path class="governor" d="M0 0H28"/>', "governor"),
    ]
    for number, method in enumerate(methods):
        colour = f"var(--line-{number % COLOURS})"
        line = f'<path class="line" stroke="{colour}" d="M0 0H28"/>{_mark(14, 0, number, colour)}'
        entries.append((line, method))
    row, x = "", LEFT
    for drawing, name in entries:
        size = 34 + 7 * len(name) + 20
        if row and x + size > width:
            yield row
            row, x = "", LEFT
        row += f'<g transform="translate({x} 0)">{drawing}<text x="34" y="4">{escape(name)}</text></g>'
        x += size
    yield row


def _shortened(title: str, width: int) -> str:
    """Shorten a title to the width, at nine points a letter; the SVG's own title is whole."""
    room = width // 9
    return title if len(title) <= room else f"{title[: room - 1]}…"


def _nice_step(highest: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that about five ticks reach the highest value."""
    rough = max(highest, 1e-9) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
