"""Results of a run: a table for people, and for programs a JSON document that also has machine and versions."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from app.serving.sweep.worker_side import describe_machine, describe_versions
from bench.comparison.measure import CaseResult, Check


def as_document(results: Sequence[CaseResult], options: dict[str, Any]) -> dict[str, Any]:
    """Return the whole run as plain JSON values."""
    return {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "options": options,
        "cases": [_case_document(result) for result in results],
    }


def _case_document(result: CaseResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "summary": result.summary,
        "unit": result.unit,
        "series": {
            series.name: {
                "median": series.median,
                "values": [sample.value for sample in series.samples],
                "notes": series.median_notes(),
            }
            for series in result.series
        },
        "checks": [_check_document(check) for check in result.checks],
        "notes": dict(result.notes),
    }


def _check_document(check: Check) -> dict[str, Any]:
    return {
        "label": check.label,
        "value": check.value,
        "bound": check.bound,
        "direction": check.direction,
        "passed": check.passed,
    }


def as_table(result: CaseResult) -> Table:
    """Return a table with one row per contender, then one per promise."""
    table = Table(title=f"{result.name}: {result.summary}", title_justify="left", title_style="bold", expand=False)
    table.add_column("What", no_wrap=True)
    table.add_column("Median", justify="right", no_wrap=True)
    table.add_column("Explained by")
    for series in result.series:
        notes = ", ".join(f"{name} {value:.3g}" for name, value in series.median_notes().items())
        table.add_row(series.name, f"{series.median:.1f} {result.unit}", notes)
    table.add_section()
    for check in result.checks:
        verdict = "[green]kept[/]" if check.passed else "[red]missed[/]"
        table.add_row(check.label, f"{check.value:.2f}", f"{verdict}: {check.direction} {check.bound:.2f}")
    return table


def as_markdown(documents: Sequence[dict[str, Any]]) -> str:
    """Build the table of `docs/speed.md` from the documents of one or more runs; the last run of each case wins."""
    cases = {case["name"]: case for document in documents for case in document["cases"]}
    lines = ["| Case | Medians | Promise | Bound | Measured |", "|---|---|---|---:|---:|"]
    for case in cases.values():
        medians = ", ".join(f"{name} {series['median']:.1f}" for name, series in case["series"].items())
        for number, check in enumerate(case["checks"]):
            first = f"`{case['name']}` | {medians} {case['unit']}" if number == 0 else " | "
            sign = "≥" if check["direction"] == "at least" else "≤"
            value = f"{check['value']:.2f}"
            measured = f"**{value}**" if check["passed"] else f"{value} (missed)"
            lines.append(f"| {first} | {check['label']} | {sign} {check['bound']:.2f} | {measured} |")
    return "\n".join(lines)
