"""`paceline bench MODEL`: does drafting pay for this model on this computer, and what is the best setup?

The running server measures and stores the result, as it does for the dashboard. If no server answers, or if it
refuses the key, this command starts a temporary server.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import SecretStr
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.command.server import NoKey, NoServer, Server, target_server
from app.core.errors import CommandError
from app.serving.sweep.grid import GOVERNOR, PLAIN, Cell
from app.serving.sweep.report import Doubt, Figures, Report, report_of
from app.settings import Settings

MEASUREMENTS = "/admin/api/measurements"
POLL_SECONDS = 0.5
START_POLL_SECONDS = 0.1
START = "from app.cli import main; main()"
COLUMNS = ("Setting", "Tokens/s", "Speedup", "Accepted", "Tokens\nper step")
PHASES = {"loading": "loading", "paused": "waiting for other requests", "restoring": "restoring what was loaded"}


def bench_model(
    request: Mapping[str, Any],
    settings: Settings,
    *,
    screen: Console,
    json_file: Path | None = None,
    apply: bool = False,
) -> None:
    """Run the measurement described by `request` (`model`, `prompts`, …) and show the result.

    Raises `CommandError` if that is not possible, KeyboardInterrupt for Ctrl-C before or after the measurement.
    """
    model = request["model"]
    with screen.status(f"{model}: starting") as status, _started_measurement(request, settings, screen) as server:
        row = wait_for_result(server, model, status.update)
        status.stop()
        show_measurement(row, screen)
        document = {**row["results"], **{name: row[name] for name in ("report", "machine", "versions")}}
        _write(json_file, json.dumps(document, indent=2) + "\n")
        if not row["report"]["advice"]["changes"]:
            screen.print("Nothing to change.")
        elif apply:
            server.call("POST", f"{MEASUREMENTS}/{row['id']}/apply", {})
            screen.print(Text(f"Stored for {row['model_id']}; a loaded model gets it as soon as it is free."))
        else:
            screen.print("--apply stores this.")


@contextmanager
def _started_measurement(request: Mapping[str, Any], settings: Settings, screen: Console) -> Iterator[Server]:
    """Start the measurement on the running server, or on a temporary one; yield the server."""
    with ExitStack() as stack:
        server = target_server(settings)
        try:
            server.call("POST", MEASUREMENTS, request)
        except (NoServer, NoKey) as error:
            if isinstance(error, NoKey):
                screen.print(Text(f"{error}. Benchmarking with a separate server.", style="dim"))
            server = stack.enter_context(temporary_server(settings))
            server.call("POST", MEASUREMENTS, request)
        yield server


@contextmanager
def temporary_server(settings: Settings) -> Iterator[Server]:
    """Run a server for this command alone, on a free port. Raises CommandError with the reason if it does not start."""
    key = secrets.token_urlsafe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for number in (signal.SIGTERM, signal.SIGHUP):  # unwind the stack, which ends the server
        signal.signal(number, lambda *_: sys.exit(1))
    variables = {
        "PACELINE_HOST": "127.0.0.1",
        "PACELINE_PORT": str(port),
        "PACELINE_API_KEY": key,
        "PACELINE_OPEN": "0",
    }
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-c", START, "serve"],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C reaches only this command, which then ends the child
        )
        try:
            server = Server(settings.with_command_line(host="127.0.0.1", port=port, api_key=SecretStr(key)))
            while not _is_live(server):
                if child.poll() is not None:
                    stderr.seek(0)
                    raise CommandError(stderr.read().decode(errors="replace").strip() or "the server did not start")
                time.sleep(START_POLL_SECONDS)
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


def wait_for_result(server: Server, model: str, show_progress: Callable[[str], None]) -> dict[str, Any]:
    """Wait for the measurement and return its stored result; the first Ctrl-C stops it and keeps the results so far."""
    is_stopping = False
    while True:
        try:
            view = server.call("GET", f"{MEASUREMENTS}?model={quote(model)}")
            if view["active"] is None:
                break
            show_progress(progress_text(view["active"]))
            time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            if is_stopping:
                raise
            is_stopping = True
            show_progress("stopping")
            server.call("DELETE", f"{MEASUREMENTS}/current")
    last = view["last"]
    row = next((row for row in view["measurements"] if row["id"] == last["number"]), None)
    if row is None:
        raise CommandError(last["problem"] or f"{last['model_id']}: stopped before anything could be compared.")
    return dict(row)


def progress_text(active: Mapping[str, Any]) -> str:
    """Return one line of progress."""
    ask = active["ask"]
    if active["phase"] != "measuring" or ask is None:
        return f"{active['model_id']}: {PHASES.get(active['phase'], active['phase'])}"
    return f"{ask['text']}, {active['seconds_left']} s left"


def show_measurement(row: Mapping[str, Any], screen: Console) -> None:
    """Print the table, the settings missing from it, doubts, the verdict and the recommended changes."""
    report = report_of(row["results"])
    screen.print(measurement_table(report, f"{_title(row)} on {row['results']['options']['device']}"))
    for line in (
        *row["results"]["options"]["left_out"],
        omission_text(row["results"]),
        *map(doubt_text, report.doubts),
    ):
        if line:
            screen.print(Text(line, style="dim"))
    screen.print(Text(f"{row['model_id']}: {report.text}", style="bold"))
    for change in row["report"]["advice"]["changes"]:
        screen.print(Text(f"  {change['name']}: {_value(change['old'])} → {_value(change['new'])}"))


def measurement_table(report: Report, title: str) -> Table:
    """Build a table of settings, cell by cell, with the range over the rounds; the best setting of a cell is green."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right", no_wrap=True)
    for cell in report.cells:
        table.add_row(Text(Cell(cell.rows, cell.context).name, style="bold"))
        for figures in cell.settings:
            table.add_row(*_figure_cells(figures), style="green" if figures.name == cell.best else "")
        table.add_section()
    return table


def _figure_cells(figures: Figures) -> tuple[str, ...]:
    used = f": {figures.used[0]}" if figures.setting == GOVERNOR and figures.used else ""
    speed, slowest, fastest = (_speed(value) for value in (figures.tokens_per_second, figures.slowest, figures.fastest))
    return (
        figures.name + used,
        f"{speed} ({slowest}-{fastest})",
        "" if figures.setting == PLAIN else f"{figures.ratio:.2f} ({figures.low:.2f}-{figures.high:.2f})",
        "" if figures.acceptance is None else f"{figures.acceptance:.0%}",
        "" if figures.tokens_per_cycle is None else f"{figures.tokens_per_cycle:.2f}",
    )


def _speed(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def doubt_text(doubt: Doubt) -> str:
    """Return the text of a doubt, with advice for the user."""
    return {
        "one_round": "One round only: a first impression. Measure for longer to be sure.",
        "unsteady": f"The same work without drafting varied by ±{doubt.amount:.0%} between rounds: something "
        "else kept this computer busy. Measure again when it is quiet.",
        "disturbed": f"Turns repeated because of other requests: {doubt.amount:.0f}. Measure again when idle.",
    }[doubt.kind]


def omission_text(results: Mapping[str, Any]) -> str:
    """Return why settings are missing from the table; "" if none are."""
    if results["interrupted"]:
        return "Interrupted: these are the results so far."
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
