"""Shared by all subcommands: the application, the output of errors and results, and the settings that apply.

Imports happen on first use, so that `--help` responds immediately.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from app import __version__
from app.core.errors import PacelineError

if TYPE_CHECKING:
    from rich.console import Console

    from app.serving.live_settings import LiveSettings
    from app.settings import Settings

application = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run language models on this computer with speculative decoding: same text, faster.",
    epilog="Start with `paceline serve`. Settings: `paceline config`, or PACELINE_* variables (docs/settings.md).",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
EXIT_INTERRUPTED = 130
OPTIONS_OF_SERVE = {"allow_extra_args": True, "ignore_unknown_options": True}
LIKE_SERVE = "Takes the options of `paceline serve` too, such as --port 9000; `paceline serve --help` lists them."


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn errors that a person can act on into one line and exit code 1; exit with 130 on Ctrl-C."""
    try:
        yield
    except PacelineError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def fail(message: str) -> NoReturn:
    """Print what is wrong and exit with 1."""
    typer.secho(message, fg=typer.colors.RED, err=True)
    raise typer.Exit(1)


@application.callback(invoke_without_command=True)
def _root(*, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        console().print(f"paceline {__version__}", highlight=False)
        raise typer.Exit


def stored_settings() -> "Settings":
    """Return the settings of the environment, completed by the stored ones."""
    from app.command.server import explicit_settings

    with reported_errors():
        return live_settings(explicit_settings()).current


def live_settings(settings: "Settings") -> "LiveSettings":
    """Return `settings` over the stored ones; opens the store."""
    from app.command.config import open_settings

    with open_settings(settings) as live:
        return live


def client_settings() -> "Settings":
    """Return the settings for a client command; the store is opened only if a read-only look does not suffice."""
    from app.command.server import explicit_settings, peek_settings

    with reported_errors():
        return peek_settings(explicit_settings()) or stored_settings()


def serve_arguments(context: typer.Context) -> tuple[str, ...]:
    """Return the remaining arguments, parsed and normalised as options of `serve`."""
    from app.command.service import option_arguments

    command = typer.main.get_command(application).get_command(context, "serve")  # type: ignore[attr-defined]
    return option_arguments(command.make_context("serve", list(context.args), parent=context.parent).params)


def print_text(text: str) -> None:
    console().print(text, highlight=False, markup=False, soft_wrap=True)


def console() -> "Console":
    """Return a console of the terminal's current width."""
    from rich.console import Console

    return Console()


def show(what: Any) -> None:
    """Print a table, or a JSON document that another program can read."""
    if isinstance(what, dict | list):
        sys.stdout.write(json.dumps(what, indent=2, ensure_ascii=False) + "\n")
    else:
        console().print(what, crop=False)
