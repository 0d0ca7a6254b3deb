"""The `paceline` command: only the arguments of each subcommand; `app.command` and `app.desktop` do the work.

Subcommands for models are here, those for the background server and this computer in `app.cli_system`.
Imports happen inside functions, so that `--help` responds immediately.
"""

import contextlib
import gc
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import app.cli_system  # noqa: F401 - registers its subcommands
from app.cli_frame import (
    Json,
    application,
    client_settings,
    console,
    live_settings,
    reported_errors,
    show,
    stored_settings,
)
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
    typer.Option(help="When to draft: auto (whenever faster; default), single (only one request running), off."),
]
Acceptance = Annotated[
    str | None,
    typer.Option(help="Acceptance rule: coupled (exact: same seed, same text), strict (on any device) or rejection."),
]
Repository = Annotated[str, typer.Argument(help="organisation/name on the Hugging Face hub.")]
Revision = Annotated[str, typer.Option(help="Branch, tag or commit; default: the latest.")]


if TYPE_CHECKING:
    from app.models.catalog import FolderCatalog
    from app.serving.live_settings import LiveSettings
    from app.settings import Settings

Model = Annotated[str, typer.Argument(help="Model id, as shown by `paceline ls`.")]


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
    gc.disable()  # imports create no garbage, and looking for it takes a tenth of the start-up time
    from app.command.server import explicit_settings
    from app.command.service import option_arguments
    from app.main import run

    gc.enable()
    with reported_errors():
        settings = explicit_settings(
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

            check_named_drafts(settings, explicit_settings(drafts=draft).drafts)

    with reported_errors():
        raise typer.Exit(run(settings, arguments=option_arguments(context.params), check=check, announce=_greet))


def _greet(url: str, setup: str, live: "LiveSettings", catalog: "FolderCatalog") -> None:
    from app.command.doctor import start_findings
    from app.command.listing import greeting, models_for_greeting
    from app.command.server import target_server
    from app.command.service import open_page

    console().print(greeting(live.current, models_for_greeting(catalog, live), url, setup), crop=False)
    for finding in start_findings(live.current):
        logging.getLogger("paceline.start").warning("%s: %s", finding.message, finding.action)
    try:
        if live.current.open:
            open_page(target_server(live.current))
    except PacelineError as error:  # the server runs on, even if its page cannot be opened
        console().print(str(error), highlight=False, markup=False)


@application.command()
def ls(*, as_json: Json = False) -> None:
    """List the models on disk: kind, size, context, matching drafter and problems. Needs no server."""
    from app.command.listing import disk_table, models_on_disk, peek_live_settings, rows_as_json
    from app.command.server import explicit_settings

    with reported_errors():
        settings = explicit_settings()
        rows = models_on_disk(peek_live_settings(settings) or live_settings(settings))
    show(rows_as_json(rows) if as_json else disk_table(rows))


@application.command()
def ps(*, as_json: Json = False) -> None:
    """Show loaded models: state, memory, methods, running and queued requests."""
    from app.command.loaded import loaded_table
    from app.command.server import stored_model_settings, target_server

    settings = client_settings()
    with reported_errors():
        snapshot = target_server(settings).call("GET", "/api/status")
    show(snapshot if as_json else loaded_table(snapshot, stored_model_settings(settings)))


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
    from app.command.server import target_server

    server = target_server(client_settings())
    with reported_errors(), console().status(f"Loading {model}…"):
        request = {"model": model, "draft": draft, "pin": pin, "ttl": ttl}
        answer = server.call("POST", "/api/load", {name: value for name, value in request.items() if value is not None})
    show(loaded_text(answer))


@application.command()
def unload(model: Model) -> None:
    """Unload a model."""
    from app.command.server import target_server

    with reported_errors():
        was_loaded = target_server(client_settings()).call("POST", "/api/unload", {"model": model}).get("was_loaded")
    console().print(f"{model} {'is unloaded' if was_loaded else 'was not loaded'}.", highlight=False, markup=False)


@application.command()
def release(model: Model) -> None:
    """Release a model that is quarantined because the worker kept crashing on it."""
    from app.command.server import target_server

    with reported_errors():
        target_server(client_settings()).call("POST", "/api/release", {"model": model})
    console().print(f"{model} is released and can load again.", highlight=False)


@application.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: `paceline launch claude --model Qwen3-Coder-30B -- --continue`",
)
def launch(
    context: typer.Context,
    agent: Annotated[str, typer.Argument(help="claude, codex, opencode, aider or crush.")],
    *,
    model: Annotated[str | None, typer.Option(help="Model id; default: the default or only model.")] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print what would be run, and run nothing.")] = False,
    force: Annotated[bool, typer.Option(help="Start even if the model's context is too short for the agent.")] = False,
) -> None:
    """Run a coding agent on a model here; start the server if none runs. Arguments after `--` go to the agent."""
    from app.coding_agents import as_text
    from app.command.launch import coding_agent, exec_agent, prepare
    from app.command.server import explicit_settings
    from app.command.service import start

    with reported_errors():
        chosen = coding_agent(agent)
        settings = client_settings()
        with console().status("") as line:
            running, _ = start(explicit_settings(), (), line.update)
        endpoint, environment = prepare(chosen, settings, running, model, is_forced=force)
        if print_only:
            typer.echo(as_text(chosen, endpoint, environment, context.args))
        else:
            exec_agent(chosen, endpoint, environment, context.args)


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
    schema: Annotated[Path | None, typer.Option(help="Answer in JSON by the schema in this file.")] = None,
    tools: Annotated[Path | None, typer.Option(help="Functions to call, as JSON; you give their results.")] = None,
    once: Annotated[str | None, typer.Option(help="Send this prompt, print the reply and exit.")] = None,
) -> None:
    """Chat with a model. Accepted draft tokens are marked; speed and acceptance follow each reply."""
    from app.command.chat import Chat, choose_model, output_constraints
    from app.command.server import target_server

    settings = client_settings()
    server = target_server(settings)
    with reported_errors():
        chosen = choose_model(server, model or settings.default_model)
        request: dict[str, Any] = {"model": chosen, **output_constraints(schema, tools)}
        if draft:
            request["draft_model"] = draft
        if temperature is not None:
            request["temperature"] = temperature
        if not speculation:
            request["speculation"] = {"method": "off"}
        conversation = Chat(server, request, console(), system=system)
        if once is None:
            raise typer.Exit(conversation.converse(input))
        conversation.send_message(once)


@application.command(epilog="Example: `paceline bench demo-assistant --json speed.json --apply`")
def bench(
    model: Model,
    *,
    prompt: Annotated[list[str] | None, typer.Option(help="Benchmark with this prompt; repeatable.")] = None,
    minutes: Annotated[float, typer.Option(min=0.05, max=60, help="Duration; less time, fewer settings.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, max=9, help="Rounds per setting.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Also write all results to this file.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Apply the recommendation to MODEL.")] = False,
) -> None:
    """Does drafting pay for MODEL on this computer? Measured by the running server, or by one just for this."""
    from app.command.bench import bench_model

    request = {"model": model, "prompts": prompt or [], "minutes": minutes, "rounds": rounds, "grid": "full"}
    with reported_errors():
        bench_model(request, stored_settings(), screen=console(), json_file=json, apply=apply)


@application.command(
    epilog="Example: `paceline pull mlx-community/Qwen3-8B-4bit`. Ctrl-C pauses; run it again to resume."
)
def pull(repository: Repository, *, revision: Revision = "") -> None:
    """Download a model into the downloads folder, by the running server where there is one."""
    from app.command.pull import pull_model

    with reported_errors():
        pull_model(stored_settings(), repository, revision, console())


def main() -> None:
    """Run the command line. Threads that are left when it ends are not waited for: their disk may never answer."""
    try:
        application()
    except SystemExit as end:
        if threading.active_count() == 1:
            raise
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


if __name__ == "__main__":
    main()
