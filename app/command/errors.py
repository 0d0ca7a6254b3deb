"""What the command line tells instead of a traceback: one line on the error stream, and exit code 1.

Imported at every start of `paceline`, so it must stay light.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from app.core.errors import PacelineError

EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """Something that a person at the prompt can act on; the message is all they see."""


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
