"""What `paceline bench MODEL` leaves behind: a table for people, a JSON document for machines."""

from typing import Any

from rich.table import Table
from rich.text import Text

from app.serving.sweep.grid import GOVERNOR, PLAIN, Cell
from app.serving.sweep.machine import describe_machine, describe_versions
from app.serving.sweep.report import Figures, Report, report_object
from app.serving.sweep.turns import Sweep

COLUMNS = ("Setting", "Tokens/s", "Speedup", "Accepted", "Tokens\nper step")


def sweep_table(report: Report, title: str) -> Table:
    """One row for each setting, cell by cell, with the range over the rounds; what a cell speaks for stands out."""
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


def left_out(sweep: Sweep) -> str:
    """What is not in the table, and why; "" when everything is."""
    if sweep.interrupted:
        return "Interrupted: this is what was measured until then."
    if sweep.skipped:
        return f"No time was left for {'; '.join(cell.name for cell in sweep.skipped)}: --minutes gives more."
    return ""


def sweep_document(sweep: Sweep, **about: Any) -> dict[str, Any]:
    """The whole run as plain JSON values; `about` is that of `Sweep.results`."""
    results = sweep.results(**about)
    return {**results, "report": report_object(results), "machine": describe_machine(), "versions": describe_versions()}
