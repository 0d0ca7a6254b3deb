"""What the command line prints, and how it ends when something is wrong: one line on the error stream, and exit code 1.

Imported at every start of `paceline`, so it must stay light.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from app.command.errors import CommandError
from app.core.errors import PacelineError

EXIT_INTERRUPTED = 130


@contextmanager
def told_errors() -> Iterator[None]:
    """Errors that a person can act on become one line and exit code 1; Ctrl-C just leaves."""
    try:
        yield
    except (CommandError, PacelineError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def fail(message: str) -> NoReturn:
    """Say what is wrong and leave."""
    typer.secho(message, fg=typer.colors.RED, err=True)
    raise typer.Exit(1)


def console() -> Console:
    """The screen, as wide as it is now."""
    return Console()


def show(what: Any) -> None:
    """Print a table, or a JSON document that another program can read."""
    if isinstance(what, dict | list):
        sys.stdout.write(json.dumps(what, indent=2, ensure_ascii=False) + "\n")
    else:
        console().print(what, crop=False)


def unbroken(table: Table) -> Table:
    """The same, with no word ever broken in a narrow window: ids are there to be copied."""
    for column in table.columns:
        words = (word for cell in (column.header, *column.cells) for word in str(cell).split())
        column.min_width = max(map(cell_len, words), default=0)
    return table
