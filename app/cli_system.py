"""Subcommands for the server of this computer: background, login, settings, keys, the desktop app.

Imports happen on first use, as everywhere in the command line.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.cli_frame import (
    LIKE_SERVE,
    OPTIONS_OF_SERVE,
    Json,
    application,
    client_settings,
    console,
    fail,
    print_text,
    reported_errors,
    serve_arguments,
    show,
)

Action = Literal["list", "create", "revoke"]
Scope = Literal["inference", "admin"]
AppAction = Literal["install", "uninstall", "status", "open"]
ConfigAction = Literal["list", "get", "set", "unset"]
DesktopPage = Literal["dashboard", "chat"]
CacheAction = Literal["list", "clear"]
ServiceAction = Literal["install", "uninstall", "status"]
EXIT_NOT_RUNNING = 3
SERVER, COMPUTER = "The server in the background", "This computer"


@application.command(rich_help_panel=SERVER, epilog=LIKE_SERVE, context_settings=OPTIONS_OF_SERVE)
def start(
    context: typer.Context,
    *,
    browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the dashboard if the server is already running.")
    ] = True,
) -> None:
    """Start the server in the background, where it outlives this terminal. Takes the options of `serve`."""
    from app.command.server import explicit_settings, running_server
    from app.command.service import open_page, setup_address
    from app.command.service import start as start_server

    arguments = serve_arguments(context)
    with reported_errors(), console().status("") as line:
        server, is_new = start_server(explicit_settings(), arguments, line.update)
        setup = setup_address(explicit_settings())
    verb = "is running" if is_new else "is already running"
    print_text(f"Paceline {verb} at {server.address} (process {server.pid}). `paceline stop` ends it.")
    if setup:
        print_text(f"Choose a password for the dashboard here (valid once, for 30 minutes):\n{setup}")
    elif (
        browser and not is_new and sys.stdout.isatty() and (running := running_server(explicit_settings())) is not None
    ):
        with reported_errors():
            open_page(running)


@application.command(rich_help_panel=SERVER)
def stop(*, force: Annotated[bool, typer.Option("--force", help="Do not wait for running requests.")] = False) -> None:
    """Stop the server of this state folder. Running requests finish first; new ones are refused meanwhile."""
    from app.command.server import explicit_settings
    from app.command.service import stop as stop_server

    with reported_errors(), console().status("") as line:
        server = stop_server(explicit_settings(), line.update, force=force)
    where = f" at {server.address}" if server is not None and server.port else ""
    print_text("Paceline is not running." if server is None else f"Paceline{where} is stopped.")


@application.command(rich_help_panel=SERVER, epilog=LIKE_SERVE, context_settings=OPTIONS_OF_SERVE)
def restart(context: typer.Context) -> None:
    """Stop the server and start it again, with the same `serve` options, or with new ones."""
    from app.command.server import explicit_settings
    from app.command.service import restart as restart_server

    arguments = serve_arguments(context)
    with reported_errors(), console().status("") as line:
        server = restart_server(explicit_settings(), arguments, line.update)
    print_text(f"Paceline is running at {server.address} (process {server.pid}).")


@application.command(rich_help_panel=SERVER)
def status(*, as_json: Json = False) -> None:
    """Tell whether the server runs, where, since when and with which models. Exits with 3 if it does not run."""
    from app.command.server import explicit_settings
    from app.command.service import status as read_status
    from app.command.service import status_lines

    with reported_errors():
        report = read_status(explicit_settings())
    if as_json:
        show(report)
    else:
        print_text("\n".join(status_lines(report)))
    raise typer.Exit(0 if report["running"] else EXIT_NOT_RUNNING)


@application.command(rich_help_panel=SERVER)
def logs(
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")] = False,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of lines.")] = 50,
) -> None:
    """Print the last lines of the server's log. Needs no server."""
    from app.command.server import explicit_settings
    from app.command.service import log_lines

    with reported_errors():
        for line in log_lines(explicit_settings().home, count, follow=follow):
            typer.echo(line)


@application.command(rich_help_panel=SERVER, epilog=LIKE_SERVE, context_settings=OPTIONS_OF_SERVE)
def service(
    context: typer.Context, action: Annotated[ServiceAction, typer.Argument(help="install, uninstall or status.")]
) -> None:
    """Start the server at login, and again after a crash: by launchd on macOS, by systemd on Linux."""
    from app.command import autostart
    from app.command.server import explicit_settings
    from app.command.service import install

    arguments = serve_arguments(context)
    with reported_errors(), console().status("") as line:
        settings = explicit_settings()
        if action == "install":
            server, agent = install(settings, arguments, line.update)
            message = f"Paceline is running at {server.address} and starts at login ({agent.path})."
        elif action == "uninstall":
            was_there = autostart.uninstall(settings)
            message = "Paceline stopped and no longer starts at login." if was_there else "It does not start at login."
        else:
            installed = autostart.installed_agent(settings)
            message = "It does not start at login." if installed is None else f"It starts at login ({installed.path})."
    print_text(message)


@application.command(
    rich_help_panel=COMPUTER,
    context_settings={"ignore_unknown_options": True},  # a value may be negative
    epilog="Examples: `paceline config set theme dark`, `paceline config set --model demo-assistant temperature 0.2`, "
    "`paceline config unset port`. Options override PACELINE_* variables, which override stored settings.",
)
def config(
    action: Annotated[ConfigAction, typer.Argument(help="list, get, set or unset.")] = "list",
    name: Annotated[str, typer.Argument(help="Setting, as named by `paceline config list`.")] = "",
    value: Annotated[
        str | None, typer.Argument(help="New value; separate lists with commas, and folders with colons.")
    ] = None,
    *,
    model: Annotated[str, typer.Option(help="Model id: its own settings instead of the server's.")] = "",
    as_json: Json = False,
) -> None:
    """Show and change settings of the server or of one model. Each says when a running server applies it."""
    from app.command.config import change, row, rows, table, text_of
    from app.command.server import explicit_settings

    if (action != "list") != bool(name) or (action == "set") != (value is not None):
        fail("use `config list`, `config get NAME`, `config set NAME VALUE` or `config unset NAME`")
    with reported_errors():
        settings = explicit_settings()
        if action in {"set", "unset"}:
            console().print(change(settings, name, value, model), highlight=False, markup=False)
        elif action == "get":
            setting = row(settings, name, model)
            show(setting) if as_json else typer.echo(text_of(setting, setting["value"]))
        else:
            all_rows = rows(settings, model)
            show(all_rows if as_json else table(all_rows))


@application.command(rich_help_panel=COMPUTER)
def password() -> None:
    """Set or reset the dashboard password and sign out all browsers. Needs no server."""
    from app.command.config import read_password, set_password
    from app.command.server import explicit_settings

    with reported_errors():
        set_password(explicit_settings(), read_password())
    console().print("The password is set. All browsers are signed out.", highlight=False)


@application.command(rich_help_panel=COMPUTER, epilog="Example: `paceline keys create 'Editor on my laptop'`")
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
    from app.command.config import keys_as_json, keys_table, open_accounts, revoke_key
    from app.command.server import explicit_settings

    with reported_errors(), open_accounts(explicit_settings()) as accounts:
        if action == "create":
            sys.stdout.write(accounts.keys.create(name, scope)[1] + "\n")
        elif action == "revoke":
            revoke_key(accounts.keys, name)
            console().print(f"The key {name} is revoked.", highlight=False, markup=False)
        else:
            rows = accounts.keys.list()
            show(keys_as_json(rows) if as_json else keys_table(rows))


@application.command(
    rich_help_panel=COMPUTER,
    name="app",
    epilog="Example: `paceline app install`, then double-click Paceline in ~/Applications.",
)
def app_(
    action: Annotated[
        AppAction, typer.Argument(help="install, uninstall, status, or open: what a double click does.")
    ] = "status",
    *,
    folder: Annotated[Path, typer.Option(help="Folder of the app.")] = Path("~/Applications"),
) -> None:
    """Put Paceline.app into a folder, for double clicks in the Finder of macOS; it runs this installation."""
    from app.command.server import explicit_settings
    from app.desktop import bundle, removal
    from app.desktop.menubar import has_tray, show_menu_bar
    from app.desktop.window import errors_in_dialog, open_app
    from app.i18n.catalogs import Catalogs, system_languages

    path = folder.expanduser().absolute()
    with reported_errors():
        if action == "open":
            with errors_in_dialog():
                open_app(explicit_settings(), show_menu_bar if has_tray() else None)
            return
        if action == "uninstall":
            message = bundle.uninstall(path)
            removal.record_app(explicit_settings().home, path, is_there=False)
        else:
            catalogs = Catalogs()
            words = catalogs.words(catalogs.choose(system_languages(os.environ)))
            info = bundle.launcher_info(explicit_settings(), words)
            if action == "install":
                removal.record_app(explicit_settings().home, path, is_there=True)
                message = bundle.install(path, info, tuple(catalogs.names))
            else:
                message = bundle.status(path, info)
    console().print(message, highlight=False, markup=False, soft_wrap=True)


@application.command(rich_help_panel=COMPUTER)
def cache(
    action: Annotated[CacheAction, typer.Argument(help="list or clear.")] = "list", *, as_json: Json = False
) -> None:
    """Show or clear the prefix cache on disk. Needs no server."""
    from app.command.loaded import cache_object, cache_table, clear_cache, read_cache

    settings = client_settings()
    with reported_errors():
        if action == "clear":
            print_text(clear_cache(settings))
        else:
            cached = read_cache(settings)
            show(cache_object(cached) if as_json else cache_table(cached))


@application.command(rich_help_panel=COMPUTER)
def menubar() -> None:
    """Show the server in the menu bar (Linux: tray); quitting it leaves the server running (extra `desktop`)."""
    from app.command.server import explicit_settings
    from app.command.service import open_page
    from app.desktop.menubar import show_menu_bar

    with reported_errors():
        if not show_menu_bar(explicit_settings(), open_page):
            print_text("The menu bar of this state folder is already running.")


@application.command(
    rich_help_panel=COMPUTER,
    epilog="Example: `paceline desktop chat`. Without pywebview (extra window) the browser opens.",
)
def desktop(page: Annotated[DesktopPage, typer.Argument(help="dashboard or chat.")] = "dashboard") -> None:
    """Open the dashboard or the chat in a separate window; starts the server if none runs."""
    from app.command.server import explicit_settings
    from app.desktop.window import open_window, web_view

    with reported_errors():
        open_window(explicit_settings(), "/admin/chat" if page == "chat" else "/admin/", web_view(os.environ))


@application.command(
    rich_help_panel=COMPUTER,
    epilog="Parts: service, app, downloads, caches, state. Example: `paceline uninstall caches downloads`",
)
def uninstall(
    parts: Annotated[list[str] | None, typer.Argument(help="Parts to remove; default: asks for each.")] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Every part.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what is there.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what Paceline wrote to this computer: lists it with sizes, and removes what you choose."""
    from app.command.server import explicit_settings, peek_settings
    from app.desktop import removal

    with reported_errors():
        settings = peek_settings(explicit_settings()) or explicit_settings()  # works with an unreadable store, too
        existing = removal.installed_parts(settings)
        chosen = removal.chosen_parts(existing, [part.name for part in existing] if everything else parts or ())
        if as_json:
            show(removal.as_json(existing))
            raise typer.Exit
        print_text("\n".join(part.text for part in chosen or existing) or "Nothing of Paceline's is here.")
        if dry_run:
            chosen = ()
        elif not (everything or parts) and sys.stdin.isatty():
            chosen = tuple(part for part in existing if typer.confirm(f"Remove {part.name}?"))
        elif chosen and not yes:
            typer.confirm("Remove this?", abort=True)
        if chosen:
            with console().status("") as line:
                report = removal.remove(settings, chosen, line.update)
            print_text("\n".join(report))
        print_text("\n".join(removal.untouched_items(settings)))


@application.command(rich_help_panel=COMPUTER)
def doctor(*, as_json: Json = False) -> None:
    """Check this computer and suggest fixes; exits with 1 if something keeps Paceline from working."""
    from app.command.doctor import examine, findings_as_json, findings_table, has_failed
    from app.command.server import explicit_settings

    with reported_errors():
        findings = examine(explicit_settings())
    show(findings_as_json(findings) if as_json else findings_table(findings))
    raise typer.Exit(int(has_failed(findings)))
