"""`make bench`: picks the cases, runs them in one temporary workshop, prints the table, writes the file."""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from app.cli_frame import reported_errors
from app.core.errors import InvalidRequest
from bench.comparison import NOTE
from bench.comparison.agent_case import AGENT_CASES
from bench.comparison.cases import ENGINE_CASES, Bench, Case
from bench.comparison.governor_case import GOVERNOR_CASES
from bench.comparison.measure import CaseResult
from bench.comparison.pairs import Sizes
from bench.comparison.ragged_case import RAGGED_CASES
from bench.comparison.real_text_case import REAL_TEXT_CASES
from bench.comparison.report import as_document, as_table
from bench.comparison.sampling_case import SAMPLING_CASES
from bench.comparison.server_cases import SERVER_CASES
from bench.comparison.speculation_cases import SPECULATION_CASES
from bench.comparison.workshop import Workshop

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *ENGINE_CASES,
        *SAMPLING_CASES,
        *SPECULATION_CASES,
        *RAGGED_CASES,
        *AGENT_CASES,
        *GOVERNOR_CASES,
        *SERVER_CASES,
        *REAL_TEXT_CASES,
    )
}
QUICK = Sizes(hidden=192, layers=8)
SIZES = {"113M": Sizes(), "1B": Sizes(hidden=1920, layers=24, vocabulary=32_768), "7B": Sizes(3840, 36, 151_936)}
"""Model sizes, by the number of parameters of the targets."""
SMALLEST = next(iter(SIZES))
BITS = (0, 2, 3, 4, 5, 6, 8)
TOKENS, QUICK_TOKENS = 128, 32
DRAFTS = 4


class UnknownCase(InvalidRequest):
    """No case has the requested name; the message lists the names."""


def list_cases() -> Table:
    """Return a table of the cases' names and summaries."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for case in CASES.values():
        table.add_row(f"[bold]{case.name}[/]", case.summary)
    return table


def choose_cases(names: Sequence[str]) -> list[Case]:
    """Return the named cases in their usual order, or all. Raises UnknownCase."""
    if unknown := sorted(set(names) - set(CASES)):
        raise UnknownCase(f"no case is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    return [case for name, case in CASES.items() if not names or name in names]


def run_cases(
    names: Sequence[str],
    *,
    rounds: int,
    quick: bool,
    file: Path | None,
    console: Console,
    size: str = SMALLEST,
    bits: int = 0,
    note: str = "",
) -> list[CaseResult]:
    """Run the cases one after the other; print a table of each, and write a file if one is named."""
    cases = choose_cases(names)
    if size not in SIZES:
        raise InvalidRequest(f"no size is called {size}; there are {', '.join(SIZES)}")
    if bits not in BITS:
        raise InvalidRequest(f"nothing is quantised to {bits} bits; there are {', '.join(map(str, BITS))}")
    results = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: stops the servers, removes the models
    with TemporaryDirectory(prefix="paceline-bench-") as folder, console.status("") as status:
        workshop = Workshop(Path(folder), QUICK if quick else SIZES[size], DRAFTS, bits)
        for case in cases:
            status.update(f"{case.name}: preparing")

            def progress(text: str, name: str = case.name) -> None:
                status.update(f"{name}: {text}")

            bench = Bench(workshop, rounds, QUICK_TOKENS if quick else TOKENS, DRAFTS, progress)
            results.append(case.run(bench))
            console.print(as_table(results[-1]))
            if file is not None:  # after each case, so that an interrupted run keeps what it measured
                options = {
                    "rounds": rounds,
                    "quick": quick,
                    "size": size,
                    "bits": bits,
                    "cases": [done.name for done in results],
                    "blas": note,
                }
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(as_document(results, options), indent=2) + "\n", encoding="utf-8")
    return results


def main(
    *,
    case: Annotated[list[str] | None, typer.Option(help="Run only this case; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per side.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Smoke test: small models and short texts.")] = False,
    size: Annotated[str, typer.Option(help=f"Parameters of the models that are made: {', '.join(SIZES)}.")] = SMALLEST,
    bits: Annotated[int, typer.Option(help="Quantise these models; 0: half precision, float32 on a CPU.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write all results to this file.")] = None,
    cases: Annotated[bool, typer.Option("--list", help="List the cases and exit.")] = False,
) -> None:
    """Compare Paceline with mlx-lm, paired in one run."""
    with reported_errors():
        if cases:
            Console().print(list_cases())
        else:
            run_cases(
                case or [],
                rounds=rounds,
                quick=quick,
                file=json,
                console=Console(),
                size=size,
                bits=bits,
                note=NOTE,
            )


if __name__ == "__main__":
    typer.run(main)
