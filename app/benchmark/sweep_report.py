"""What `paceline bench MODEL` leaves behind: a table for people, a JSON document for machines."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from app.serving.sweep.document import sweep_results
from app.serving.sweep.grid import GOVERNOR, PLAIN
from app.serving.sweep.machine import describe_machine, describe_versions
from app.serving.sweep.recommendation import Recommendation
from app.serving.sweep.turns import Point, Sweep


def sweep_table(sweep: Sweep, title: str) -> Table:
    """One row for each setting, cell by cell; the fastest of each cell stands out."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in ("Rows, prompt", "Setting", "Tokens/s", "x plain", "Accepted", "Per cycle"):
        table.add_column(column, justify="left" if column in {"Rows, prompt", "Setting"} else "right", no_wrap=True)
    for cell in sweep.cells():
        points = sweep.points_of(cell)
        best = max(points, key=sweep.ratio)
        for number, point in enumerate(points):
            name = Text(cell.name if not number else "", style="bold")
            table.add_row(name, *_figures(sweep, point), style="green" if point is best else "")
        table.add_section()
    return table


def _figures(sweep: Sweep, point: Point) -> tuple[str, str, str, str, str]:
    used = f": {point.method}" if point.setting == GOVERNOR and point.method else ""
    return (
        point.setting.name + used,
        f"{point.tokens_per_second:.1f}",
        "" if point.setting == PLAIN else f"{sweep.ratio(point):.2f}",
        "" if point.acceptance is None else f"{100 * point.acceptance:.0f} %",
        "" if point.tokens_per_cycle is None else f"{point.tokens_per_cycle:.2f}",
    )


def left_out(sweep: Sweep) -> str:
    """What is not in the table, and why; "" when everything is."""
    if sweep.interrupted:
        return "Interrupted: this is what was measured until then."
    if sweep.skipped:
        return f"No time was left for {'; '.join(cell.name for cell in sweep.skipped)}: --minutes gives more."
    return ""


def sweep_document(
    sweep: Sweep,
    recommendation: Recommendation | None,
    *,
    model: str,
    drafts: Mapping[str, str],
    options: dict[str, Any],
) -> dict[str, Any]:
    """The whole run as plain JSON values."""
    results = sweep_results(sweep, recommendation, model=model, drafts=drafts, options=options)
    return {**results, "machine": describe_machine(), "versions": describe_versions()}
