"""The `paceline` command: what each word takes, and nothing else; the work is in `app.command`.

This is the one file that imports inside functions, so that `--help` answers at once and only `bench` imports mlx.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from app.command.listing import Row
    from app.settings import Settings

application = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run a language model on this computer, drafted by a small one: the same text, sooner.",
    epilog="Start with `paceline serve`. Settings are environment variables PACELINE_*; the README lists them.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Model = Annotated[str, typer.Argument(help="A model's id, as `paceline ls` shows it.")]


@application.callback(invoke_without_command=True)
def _root(*, version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        _console().print(f"paceline {__version__}", highlight=False)
        raise typer.Exit


@application.command(
    epilog="Try it: `paceline serve --model-dir ~/models --draft Qwen3-8B=Qwen3-0.6B`, then `paceline chat` elsewhere."
)
def serve(
    *,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (default: 127.0.0.1); beyond loopback needs a key.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default: 8710); 0 takes a free one.")] = None,
    model_dir: Annotated[
        list[Path] | None, typer.Option(help="A folder of model folders; may be repeated. Adds to PACELINE_MODEL_DIRS.")
    ] = None,
    draft: Annotated[
        list[str] | None, typer.Option(help="main=a+b: the drafters of a main model, or main=off. Repeatable.")
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(help='vLLM\'s JSON: \'{"method": "dflash", "model": "…", "num_speculative_tokens": 7}\'.'),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="When to speculate: single (alone), auto (where it pays), off (default: single).")
    ] = None,
    acceptance: Annotated[
        str | None, typer.Option(help="Which drafts stay: coupled (same seed, same text) or rejection.")
    ] = None,
) -> None:
    """Serve the models of this computer over an OpenAI endpoint. Needs no network."""
    from app.command.greeting import greeting
    from app.command.listing import models_as_chosen
    from app.main import run

    given = {"host": host, "port": port, "policy": policy, "acceptance": acceptance}
    settings = _settings(model_dirs=model_dir or [], drafts=draft or [], speculative_config=speculative_config, **given)
    with _told_errors():
        rows = models_as_chosen(settings)
    _refuse_wrong_drafts(draft or [], rows)
    raise typer.Exit(run(settings, announce=lambda url: _console().print(greeting(settings, rows, url), crop=False)))


@application.command()
def ls(*, as_json: Json = False) -> None:
    """List the models on disk: kind, size, context, the draft that pairs, and what is wrong. Needs no server."""
    from app.command.listing import disk_table, models_as_chosen, rows_as_json

    with _told_errors():
        rows = models_as_chosen(_settings())
    _show(rows_as_json(rows) if as_json else disk_table(rows))


@application.command()
def ps(*, as_json: Json = False) -> None:
    """Show what the server has loaded: state, memory, methods, requests running and waiting."""
    from app.command.listing import loaded_table, stored_choices
    from app.command.server import Server

    settings = _settings()
    with _told_errors(), Server(settings) as server:
        snapshot = server.loaded()
        chosen = stored_choices(settings, [model["id"] for model in snapshot.get("models") or ()])
    _show(snapshot if as_json else loaded_table(snapshot, chosen))


@application.command()
def load(
    model: Model,
    *,
    draft: Annotated[str | None, typer.Option(help="The drafters to load with it, joined by +, or off.")] = None,
    pin: Annotated[bool | None, typer.Option("--pin/--no-pin", help="Keep it until `paceline unload`.")] = None,
    ttl: Annotated[float | None, typer.Option(help="Unload after so many seconds without a request.")] = None,
) -> None:
    """Load a model, and its drafters, into memory now."""
    from app.command.listing import loaded_text
    from app.command.server import Server

    console = _console()
    with _told_errors(), Server(_settings()) as server, console.status(f"Loading {model}…"):
        answer = server.load(model, draft=draft, pin=pin, ttl=ttl)
    console.print(loaded_text(answer))


@application.command()
def unload(model: Model) -> None:
    """Give a model's memory back."""
    from app.command.server import Server

    with _told_errors(), Server(_settings()) as server:
        server.unload(model)
    _console().print(f"{model} is unloaded.", highlight=False)


@application.command(epilog="Example: `paceline chat --once 'Count from 1 to 20.'`")
def chat(
    model: Annotated[str | None, typer.Argument(help="A model's id; without it, the one that is loaded.")] = None,
    *,
    draft: Annotated[str | None, typer.Option(help="The drafters to use, joined by +.")] = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="Draft, or decode plainly.")
    ] = True,
    once: Annotated[str | None, typer.Option(help="Send this one prompt, print the reply and leave.")] = None,
) -> None:
    """Talk to a model. Tokens that its draft guessed are marked; speed and acceptance follow each reply."""
    from app.command.chat import Chat, ChatOptions, choose_model
    from app.command.server import Server

    settings = _settings()
    with _told_errors(), Server(settings) as server:
        chosen = choose_model(server, model or settings.default_model)
        options = ChatOptions(chosen, draft, system, temperature, speculation)
        conversation = Chat(server, options, _console())
        if once is None:
            raise typer.Exit(conversation.converse(input))
        conversation.say(once)


@application.command(epilog="Example: `paceline bench demo-assistant --svg speed.svg --apply`")
def bench(
    model: Annotated[str | None, typer.Argument(help="A model's id; without it, us and mlx-lm are compared.")] = None,
    *,
    prompt: Annotated[list[str] | None, typer.Option(help="Measure with this prompt; may be repeated.")] = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="Time to measure MODEL; less of it thins the grid.")] = 3.0,
    svg: Annotated[Path | None, typer.Option(help="Also draw speed by draft length into this file.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Keep the recommendation for MODEL.")] = False,
    case: Annotated[list[str] | None, typer.Option(help="Without MODEL: run only this case; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each side takes.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Small models and short texts: does it run at all?")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write all numbers into this file.")] = None,
    cases: Annotated[bool, typer.Option("--list", help="List the cases and leave.")] = False,
) -> None:
    """Does drafting pay for MODEL on this computer? Without MODEL: Paceline and mlx-lm side by side, in one run."""
    if model and (case or quick or cases):
        _fail("--case, --quick and --list compare Paceline with mlx-lm: leave MODEL out, or leave them out")
    if not model and (prompt or svg or apply):
        _fail("--prompt, --svg and --apply are about one model: name it, as in `paceline bench MODEL`")
    from app.engine.platform import prepare

    note = prepare().reason
    if model:
        from app.benchmark.model_command import Wishes, bench_model

        wishes = Wishes(
            model=model, prompts=tuple(prompt or ()), minutes=minutes, rounds=rounds, json=json, svg=svg, apply=apply
        )
        with _told_errors():
            bench_model(wishes, _settings(), console=_console(), note=note)
        return
    from app.benchmark.command import UnknownCase, list_cases, run_cases

    try:
        if cases:
            _console().print(list_cases())
        else:
            run_cases(case or [], rounds=rounds, quick=quick, file=json, console=_console(), note=note)
    except UnknownCase as error:
        _fail(str(error))


@application.command()
def doctor(*, as_json: Json = False) -> None:
    """Check this computer and say what to do; the exit code is 1 when something keeps Paceline from working."""
    from app.command.doctor import examine, findings_as_json, findings_table, has_failed

    findings = examine(_settings())
    _show(findings_as_json(findings) if as_json else findings_table(findings))
    raise typer.Exit(int(has_failed(findings)))


def _console() -> "Console":
    from rich.console import Console

    return Console()


def _show(what: Any) -> None:
    """Print a table, or a JSON document that another program can read."""
    if isinstance(what, dict | list):
        import json

        sys.stdout.write(json.dumps(what, indent=2, ensure_ascii=False) + "\n")
    else:
        _console().print(what)


def _settings(*, model_dirs: list[Path] | None = None, drafts: list[str] | None = None, **given: Any) -> "Settings":
    """The settings of the environment with what the command line says on top."""
    from app.settings import SettingsError, read_settings

    try:
        settings = read_settings(**{name: value for name, value in given.items() if value is not None})
        extra: dict[str, Any] = {}
        if model_dirs:
            extra["model_dirs"] = (*(folder.expanduser() for folder in model_dirs), *settings.model_dirs)
        if drafts:
            extra["drafts"] = {**settings.drafts, **_drafts_by_main(drafts)}
    except SettingsError as error:
        _fail(str(error))
    return settings.model_copy(update=extra)


def _drafts_by_main(drafts: list[str]) -> dict[str, str]:
    """What `--draft` names, by main model. Raises SettingsError."""
    from app.settings import read_settings

    return read_settings(drafts=",".join(drafts)).drafts


def _refuse_wrong_drafts(drafts: list[str], rows: "Sequence[Row]") -> None:
    """A drafter typed just now that cannot be used ends in one line; one that the environment names is left out."""
    problems = {row.id: row.problem for row in rows if row.kind == "main"}
    for main in _drafts_by_main(drafts) if drafts else ():
        if main not in problems:
            _fail(f'--draft names no main model of this computer: "{main}"; `paceline ls` shows which are here')
        if problems[main]:
            _fail(f"{problems[main]} (or leave --draft out)")


@contextmanager
def _told_errors() -> Iterator[None]:
    """Errors that a person can act on become one line and exit code 1; Ctrl-C just leaves."""
    from app.command.server import CommandError
    from app.core.errors import PacelineError

    try:
        yield
    except (CommandError, PacelineError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _fail(message: str) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(message, style="red", markup=False, highlight=False)
    raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    application()


if __name__ == "__main__":
    main()
