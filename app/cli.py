"""The `paceline` command: what each word takes, and nothing else; the work is in `app.command`.

This is the one file that imports inside functions, so that `--help` answers at once.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from app import __version__
from app.core.errors import PacelineError

Host = Annotated[
    str | None, typer.Option(help="Address to listen on (default: 127.0.0.1); other than loopback requires a key.")
]
Port = Annotated[int | None, typer.Option(help="Port to listen on (default: 8710); 0 picks a free one.")]
ModelFolders = Annotated[list[Path] | None, typer.Option(help="Model folder; repeatable. Adds to PACELINE_MODEL_DIRS.")]
Drafts = Annotated[
    list[str] | None, typer.Option(help="main=a+b: the drafters of a main model, or main=off. Repeatable.")
]
SpeculativeJson = Annotated[
    str | None,
    typer.Option(help='vLLM\'s JSON: \'{"method": "dflash", "model": "…", "num_speculative_tokens": 7}\'.'),
]
Policy = Annotated[
    str | None,
    typer.Option(help="When to draft: single (only one request running; default), auto (whenever faster), off."),
]
Acceptance = Annotated[
    str | None, typer.Option(help="Acceptance rule: coupled (exact: same seed, same text) or rejection.")
]
Repository = Annotated[str, typer.Argument(help="organisation/name on the Hugging Face hub.")]
Revision = Annotated[str, typer.Option(help="Branch, tag or commit; default: the latest.")]


if TYPE_CHECKING:
    from rich.console import Console

    from app.hub.catalog import FolderCatalog
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
Action = Literal["list", "create", "revoke"]
Scope = Literal["inference", "admin"]
AppAction = Literal["install", "uninstall", "status"]
ConfigAction = Literal["list", "get", "set", "unset"]
Model = Annotated[str, typer.Argument(help="Model id, as shown by `paceline ls`.")]
ServiceAction = Literal["install", "uninstall", "status"]
EXIT_INTERRUPTED = 130
EXIT_NOT_RUNNING = 3
OPTIONS_OF_SERVE = {"allow_extra_args": True, "ignore_unknown_options": True}
LIKE_SERVE = "Takes the options of `paceline serve` too, such as --port 9000; `paceline serve --help` lists them."


@contextmanager
def reported_errors() -> Iterator[None]:
    """Errors that a person can act on become one line and exit code 1; Ctrl-C just leaves."""
    try:
        yield
    except PacelineError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def fail(message: str) -> NoReturn:
    """Say what is wrong and leave."""
    typer.secho(message, fg=typer.colors.RED, err=True)
    raise typer.Exit(1)


@application.callback(invoke_without_command=True)
def _root(*, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        _console().print(f"paceline {__version__}", highlight=False)
        raise typer.Exit


@application.command(
    epilog="Try it: `paceline serve --model-dir ~/models --draft Qwen3-8B=Qwen3-0.6B`, then `paceline chat`."
)
def serve(
    context: typer.Context,
    *,
    host: Host = None,
    port: Port = None,
    model_dir: ModelFolders = None,
    draft: Drafts = None,
    speculative_config: SpeculativeJson = None,
    policy: Policy = None,
    acceptance: Acceptance = None,
) -> None:
    """Serve the models of this computer over an OpenAI endpoint, in this terminal. Needs no network."""
    from app.command.server import given
    from app.command.service import words_of
    from app.main import run

    with reported_errors():
        wanted = given(
            model_dirs=model_dir or (),
            drafts=draft or (),
            host=host,
            port=port,
            policy=policy,
            acceptance=acceptance,
            speculative_config=speculative_config,
        )

    def check(settings: "Settings") -> None:
        if draft:
            from app.command.listing import check_named_drafts

            check_named_drafts(settings, given(drafts=draft).drafts)

    def greet(url: str, setup: str, live: "LiveSettings", catalog: "FolderCatalog") -> None:
        from app.command.listing import greeting, models_at_once

        _console().print(greeting(live.current, models_at_once(catalog, live), url, setup), crop=False)

    with reported_errors():
        code = run(wanted, words=words_of(context.params), check=check, announce=greet)
    raise typer.Exit(code)


@application.command(epilog=LIKE_SERVE, context_settings=OPTIONS_OF_SERVE)
def start(
    context: typer.Context,
    *,
    browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the dashboard if the server runs already.")
    ] = True,
) -> None:
    """Start the server in the background, where it outlives this terminal. Takes the options of `serve`."""
    import webbrowser

    from app.command.server import given
    from app.command.service import start as begin

    words = _words_of_serve(context)
    with reported_errors(), _console().status("") as line:
        server, is_new = begin(given(), words, line.update)
    verb = "runs" if is_new else "runs already"
    _say(f"Paceline {verb} at {server.address} (process {server.pid}). `paceline stop` ends it.")
    if browser and not is_new and sys.stdout.isatty():
        webbrowser.open(f"{server.address}/admin/")


@application.command()
def stop(*, force: Annotated[bool, typer.Option("--force", help="Do not wait for running requests.")] = False) -> None:
    """Stop the server of this state folder. Running requests finish first; new ones are refused meanwhile."""
    from app.command.server import given
    from app.command.service import stop as end

    with reported_errors(), _console().status("") as line:
        server = end(given(), line.update, force=force)
    _say("Paceline does not run." if server is None else f"Paceline at {server.address} is stopped.")


@application.command(epilog=LIKE_SERVE, context_settings=OPTIONS_OF_SERVE)
def restart(context: typer.Context) -> None:
    """Stop the server and start it again, with the options of `serve` that it had, or with new ones."""
    from app.command.server import given
    from app.command.service import restart as again

    words = _words_of_serve(context)
    with reported_errors(), _console().status("") as line:
        server = again(given(), words, line.update)
    _say(f"Paceline runs at {server.address} (process {server.pid}).")


@application.command()
def status(*, as_json: Json = False) -> None:
    """Tell whether the server runs, where, since when and with which models. Exits with 3 if it does not run."""
    from app.command.server import given
    from app.command.service import status as look
    from app.command.service import status_lines

    with reported_errors():
        told = look(given())
    if as_json:
        _show(told)
    else:
        _say("\n".join(status_lines(told)))
    raise typer.Exit(0 if told["running"] else EXIT_NOT_RUNNING)


@application.command()
def logs(
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
) -> None:
    """Print the log of the server, the last lines of it. Needs no server."""
    from app.command.server import given
    from app.command.service import log_lines

    with reported_errors():
        for line in log_lines(given().home, count, follow=follow):
            typer.echo(line)


@application.command(epilog=LIKE_SERVE, context_settings=OPTIONS_OF_SERVE)
def service(
    context: typer.Context, action: Annotated[ServiceAction, typer.Argument(help="install, uninstall or status.")]
) -> None:
    """Start the server at login, and again after a crash: by launchd on macOS, by systemd on Linux."""
    from app.command import autostart
    from app.command.server import given
    from app.command.service import install

    words = _words_of_serve(context)
    with reported_errors(), _console().status("") as line:
        settings = given()
        if action == "install":
            server, agent = install(settings, words, line.update)
            said = f"Paceline runs at {server.address} and starts at login ({agent.path})."
        elif action == "uninstall":
            was_there = autostart.uninstall(settings)
            said = "Paceline is stopped and starts no more at login." if was_there else "It does not start at login."
        else:
            found = autostart.installed(settings)
            said = "It does not start at login." if found is None else f"It starts at login ({found.path})."
    _say(said)


@application.command()
def ls(*, as_json: Json = False) -> None:
    """List the models on disk: kind, size, context, matching drafter and problems. Needs no server."""
    from app.command.listing import at_a_glance, disk_table, models_on_disk, rows_as_json
    from app.command.server import given

    with reported_errors():
        settings = given()
        rows = models_on_disk(at_a_glance(settings) or _live(settings))
    _show(rows_as_json(rows) if as_json else disk_table(rows))


@application.command()
def ps(*, as_json: Json = False) -> None:
    """Show loaded models: state, memory, methods, running and queued requests."""
    from app.command.loaded import loaded_table
    from app.command.server import asked_server, stored_choices

    settings = _asking()
    with reported_errors():
        snapshot = asked_server(settings).call("GET", "/api/status")
    _show(snapshot if as_json else loaded_table(snapshot, stored_choices(settings)))


@application.command()
def load(
    model: Model,
    *,
    draft: Annotated[str | None, typer.Option(help="Drafters to load with it, joined by +, or off.")] = None,
    pin: Annotated[bool | None, typer.Option("--pin/--no-pin", help="Keep it loaded until `paceline unload`.")] = None,
    ttl: Annotated[float | None, typer.Option(help="Unload after this many idle seconds.")] = None,
) -> None:
    """Load a model and its drafters."""
    from app.command.loaded import loaded_text
    from app.command.server import asked_server

    server = asked_server(_asking())
    with reported_errors(), _console().status(f"Loading {model}…"):
        asked = {"model": model, "draft": draft, "pin": pin, "ttl": ttl}
        answer = server.call("POST", "/api/load", {name: value for name, value in asked.items() if value is not None})
    _show(loaded_text(answer))


@application.command()
def unload(model: Model) -> None:
    """Unload a model."""
    from app.command.server import asked_server

    with reported_errors():
        was_loaded = asked_server(_asking()).call("POST", "/api/unload", {"model": model}).get("was_loaded")
    _console().print(f"{model} {'is unloaded' if was_loaded else 'was not loaded'}.", highlight=False, markup=False)


@application.command()
def release(model: Model) -> None:
    """Release a model that is quarantined because the worker kept crashing on it."""
    from app.command.server import asked_server

    with reported_errors():
        asked_server(_asking()).call("POST", "/api/release", {"model": model})
    _console().print(f"{model} is released and can load again.", highlight=False)


@application.command(epilog="Example: `paceline chat --once 'Count from 1 to 20.'`")
def chat(
    model: Annotated[str | None, typer.Argument(help="Model id; default: the default or only model.")] = None,
    *,
    draft: Annotated[str | None, typer.Option(help="Drafters to use, joined by +.")] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 always picks the most likely token.")] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="Turn speculative decoding on or off.")
    ] = True,
    once: Annotated[str | None, typer.Option(help="Send this prompt, print the reply and exit.")] = None,
) -> None:
    """Chat with a model. Accepted draft tokens are marked; speed and acceptance follow each reply."""
    from app.command.chat import Chat, choose_model
    from app.command.server import asked_server

    settings = _asking()
    server = asked_server(settings)
    with reported_errors():
        chosen = choose_model(server, model or settings.default_model)
        asked: dict[str, Any] = {"model": chosen}
        if draft:
            asked["draft_model"] = draft
        if temperature is not None:
            asked["temperature"] = temperature
        if not speculation:
            asked["speculation"] = {"method": "off"}
        conversation = Chat(server, asked, _console(), system=system)
        if once is None:
            raise typer.Exit(conversation.converse(input))
        conversation.say(once)


@application.command(epilog="Example: `paceline bench demo-assistant --svg speed.svg --apply`")
def bench(
    model: Model,
    *,
    prompt: Annotated[list[str] | None, typer.Option(help="Benchmark with this prompt; repeatable.")] = None,
    minutes: Annotated[float, typer.Option(min=0.05, max=60, help="Duration; less time, fewer settings.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, max=9, help="Rounds per setting.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Also write all results to this file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also plot speed by draft length to this file.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Apply the recommendation to MODEL.")] = False,
) -> None:
    """Does drafting pay for MODEL on this computer? Measured by the running server, or by one just for this."""
    from app.command.bench import bench_model

    asked = {"model": model, "prompts": prompt or [], "minutes": minutes, "rounds": rounds, "grid": "full"}
    with reported_errors():
        bench_model(asked, _settings(), screen=_console(), json_file=json, svg_file=svg, apply=apply)


@application.command(
    epilog="Example: `paceline pull mlx-community/Qwen3-8B-4bit`. Ctrl-C pauses; run it again to resume."
)
def pull(repository: Repository, *, revision: Revision = "") -> None:
    """Download a model into the downloads folder, by the running server where there is one."""
    from app.command.pull import pull_model

    with reported_errors():
        pull_model(_settings(), repository, revision, _console())


@application.command()
def password() -> None:
    """Set or reset the dashboard password and sign out all browsers. Needs no server."""
    from app.command.config import account, read_password
    from app.command.server import given

    with reported_errors(), account(given()) as accounts:
        accounts.set_password(read_password())
    _console().print("The password is set. All browsers are signed out.", highlight=False)


@application.command(epilog="Example: `paceline keys create 'Editor on my laptop'`")
def keys(
    action: Annotated[Action, typer.Argument(help="list, create or revoke.")] = "list",
    name: Annotated[str, typer.Argument(help="Name of the key; revoke also takes its number.")] = "",
    *,
    scope: Annotated[
        Scope, typer.Option(help="inference: the endpoint only; admin: the dashboard's API too.")
    ] = "inference",
    as_json: Json = False,
) -> None:
    """List, create or revoke API keys. A new key is shown once. Needs no server."""
    from app.command.config import account, keys_as_json, keys_table, revoke_key
    from app.command.server import given

    with reported_errors(), account(given()) as accounts:
        if action == "create":
            sys.stdout.write(accounts.keys.create(name, scope)[1] + "\n")
        elif action == "revoke":
            revoke_key(accounts.keys, name)
            _console().print(f"The key {name} is revoked.", highlight=False, markup=False)
        else:
            rows = accounts.keys.list()
            _show(keys_as_json(rows) if as_json else keys_table(rows))


@application.command(
    epilog="Examples: `paceline config set theme dark`, `paceline config set --model demo-assistant temperature 0.2`, "
    "`paceline config unset port`. Options override PACELINE_* variables, which override stored settings."
)
def config(
    action: Annotated[ConfigAction, typer.Argument(help="list, get, set or unset.")] = "list",
    name: Annotated[str, typer.Argument(help="Setting, as named by `paceline config list`.")] = "",
    value: Annotated[str | None, typer.Argument(help="New value; separate lists with commas.")] = None,
    *,
    model: Annotated[str, typer.Option(help="Model id: its own settings instead of the server's.")] = "",
    as_json: Json = False,
) -> None:
    """Show and change settings of the server or of one model. Each says when a running server applies it."""
    from app.command.config import change, row, rows, table, text_of
    from app.command.server import given

    if (action != "list") != bool(name) or (action == "set") != (value is not None):
        fail("use `config list`, `config get NAME`, `config set NAME VALUE` or `config unset NAME`")
    with reported_errors():
        settings = given()
        if action in {"set", "unset"}:
            _console().print(change(settings, name, value, model), highlight=False, markup=False)
        elif action == "get":
            found = row(settings, name, model)
            _show(found) if as_json else typer.echo(text_of(found["value"], found["unit"]))
        else:
            all_rows = rows(settings, model)
            _show(all_rows if as_json else table(all_rows))


@application.command(
    name="app", epilog="Example: `paceline app install`, then double-click Paceline in ~/Applications."
)
def app_(
    action: Annotated[AppAction, typer.Argument(help="install, uninstall or status.")] = "status",
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the app.")] = Path("~/Applications"),
) -> None:
    """Put Paceline.app into a folder, for double clicks in the Finder of macOS; it runs this installation."""
    from app.command.server import given
    from app.desktop import bundle
    from app.i18n import Catalogs, system_languages

    place = folder.expanduser().absolute()
    with reported_errors():
        if action == "uninstall":
            said = bundle.uninstall(place)
        else:
            catalogs = Catalogs()
            words = catalogs.words(catalogs.choose(system_languages(os.environ)))
            this = bundle.this_installation(given(), words)
            said = (
                bundle.status(place, this) if action == "status" else bundle.install(place, this, tuple(catalogs.names))
            )
    _console().print(said, highlight=False, markup=False, soft_wrap=True)


@application.command()
def doctor(*, as_json: Json = False) -> None:
    """Check this computer and suggest fixes; exits with 1 if something keeps Paceline from working."""
    from app.command.doctor import examine, findings_as_json, findings_table, has_failed
    from app.command.server import given

    with reported_errors():
        findings = examine(given())
    _show(findings_as_json(findings) if as_json else findings_table(findings))
    raise typer.Exit(int(has_failed(findings)))


def _settings() -> "Settings":
    """The settings of the environment, and what is stored where it says nothing."""
    from app.command.server import given

    with reported_errors():
        return _live(given()).current


def _live(settings: "Settings") -> "LiveSettings":
    """What is given over what the store says, which is opened."""
    from app.command.config import opened

    with opened(settings) as live:
        return live


def _asking() -> "Settings":
    """The settings for a command that only asks the server: it glances at the store, and opens it if it must."""
    from app.command.server import given, known

    with reported_errors():
        return known(given()) or _settings()


def _words_of_serve(context: typer.Context) -> tuple[str, ...]:
    """What was typed beyond the command's own options, read as `serve` would read it."""
    from app.command.service import words_of

    command = typer.main.get_command(application).get_command(context, "serve")  # type: ignore[attr-defined]
    return words_of(command.make_context("serve", list(context.args), parent=context.parent).params)


def _say(text: str) -> None:
    _console().print(text, highlight=False, markup=False, soft_wrap=True)


def _console() -> "Console":
    """The screen, as wide as it is now."""
    from rich.console import Console

    return Console()


def _show(what: Any) -> None:
    """Print a table, or a JSON document that another program can read."""
    if isinstance(what, dict | list):
        sys.stdout.write(json.dumps(what, indent=2, ensure_ascii=False) + "\n")
    else:
        _console().print(what, crop=False)


def main() -> None:
    """Run the command line."""
    application()


if __name__ == "__main__":
    main()
