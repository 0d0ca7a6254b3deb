"""Builds the server from settings, worker, catalog and endpoints; runs it until a signal, then shuts down in order."""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from fastapi import APIRouter, Depends, FastAPI

from app import __version__
from app.admin import (
    chat_routes,
    connect,
    download_routes,
    draft_routes,
    model_routes,
    overview,
    request_routes,
    session_routes,
    settings_routes,
    welcome,
)
from app.admin.context import AdminContext
from app.admin.downloading import Downloads
from app.admin.feed import LiveFeed
from app.admin.loading import Loading
from app.admin.measuring import Measuring
from app.admin.model_view import ModelView
from app.admin.templating import Pages, read_assets
from app.admin.updates import Updates
from app.api import chat, completions, control, embeddings, messages, ollama, ollama_models, rerank, responses, tokens
from app.api.response_store import ResponseStore
from app.core import setting_texts
from app.core.errors import ServerRuns, StoreUnavailable
from app.core.messages import Accepted, Delta, Finished, Heartbeat, LoadProgress, TextWork
from app.hub.hub_files import HubToken
from app.i18n.catalogs import Catalogs
from app.machine import descriptors
from app.machine.server_file import SERVICE_LABEL, RunningServer, lock_home
from app.models.catalog import FolderCatalog, default_catalog
from app.models.pairing import Speedups
from app.serving.auth import AccessPolicy, authorize
from app.serving.awake import Awake, Caffeinate
from app.serving.choosing import SpeedupLookup
from app.serving.context import Activity, Context
from app.serving.errors import install_error_handlers
from app.serving.gate import Gate, configure_malloc
from app.serving.guessing import ENTRY_SECONDS, MAX_OPEN_CODES, Lockout, OneTimeCodes
from app.serving.journal import Journal
from app.serving.live_settings import BEYOND_LOOPBACK, USER_LANGUAGES, LiveSettings, SettingsState
from app.serving.logs import LogRing, WorkerLines, open_log_handlers, set_log_level
from app.serving.resolver import Resolver, stays
from app.serving.server import (
    AddressError,
    DrainingServer,
    bind,
    max_open_requests,
    serve_config,
)
from app.serving.sweep.report import speedups
from app.settings import Settings
from app.store.accounts import Accounts
from app.store.conversations import Conversations
from app.store.rows import DownloadRows, RequestHistory, StoredMeasurements, StoredSettings
from app.store.store import FILE_NAME, Store
from app.supervision.child import WORKER_COMMAND
from app.supervision.client import WorkerClient

ROUTERS = (chat, completions, responses, messages, embeddings, rerank, tokens, ollama, ollama_models, control)
"""Modules of the API, each with a `router`."""
AREAS = (
    overview,
    settings_routes,
    model_routes,
    draft_routes,
    chat_routes,
    download_routes,
    request_routes,
    connect,
    session_routes,
    welcome,
)
"""Modules of the dashboard, each with a `router`; their `TOPICS` are the live updates that their pages receive."""
ROUTES = APIRouter(dependencies=[Depends(authorize)])
"""All routes, closed unless public. Independent of an application and slow to build, so built once per process."""
for _module in (*ROUTERS, *AREAS):
    ROUTES.include_router(_module.router)
ROUTES.include_router(chat.router, prefix="/admin/api")  # for the chat page, which has a session and no key
SWITCH_SECONDS = 0.0005
"""Longest wait of the event loop, in seconds, for a thread that holds the interpreter lock. Python's default is ten
times as long, and the loop may wait that long after each system call: parsing a hostile body would stall streams."""
EXIT_UNAVAILABLE = 1
EXIT_UNSAFE = 2
RESTART = -1
"""Value in place of an exit code: the process must run its command line again."""


def create_app(
    live: LiveSettings,
    store: Store,
    client: WorkerClient,
    catalog: FolderCatalog,
    logs: LogRing | None = None,
    restart: Callable[[], None] | None = None,
) -> FastAPI:
    """Build the ASGI application around open settings and an open store; `client` need not be ready."""
    resolver = Resolver(live, catalog, client, measured_in(store))
    context = Context(
        live=live,
        worker=client,
        resolver=resolver,
        activity=Activity(lambda: min(live.current.max_requests, max_open_requests())),
        journal=Journal(
            RequestHistory(store),
            limit=lambda: live.current.history_limit,
            keeps_texts=lambda: live.current.keep_texts,
        ),
    )
    return build(admin_context(context, store, logs, restart))


def measured_in(store: Store) -> SpeedupLookup:
    """Return a function from model id to measured speedups of its drafters: empty if the store cannot be read."""
    measurements = StoredMeasurements(store)

    def measured(model_id: str) -> Speedups:
        try:
            return speedups(row.results for row in measurements.of(model_id))
        except StoreUnavailable:
            return {}

    return measured


def admin_context(
    context: Context, store: Store, logs: LogRing | None = None, restart: Callable[[], None] | None = None
) -> AdminContext:
    """Build the dashboard's context from `context` and everything else that the dashboard needs."""
    measurements, models = StoredMeasurements(store), ModelView(context)
    measuring = Measuring(context, models, measurements)
    loading = Loading(context, models, measuring)
    catalogs = Catalogs(context.settings.home / USER_LANGUAGES)
    updates = Updates(lambda: context.settings.check_updates)
    return AdminContext(
        serving=context,
        store=store,
        pages=Pages(read_assets(), catalogs, lambda: context.settings, updates.view),
        feed=LiveFeed(closing=lambda: context.activity.draining and len(context.activity) == 0),
        accounts=Accounts(store),
        setup_codes=OneTimeCodes(context.clock, max_open=MAX_OPEN_CODES),
        entry_codes=OneTimeCodes(context.clock, valid_seconds=ENTRY_SECONDS, max_open=MAX_OPEN_CODES),
        lockout=Lockout(context.clock),
        models=models,
        loading=loading,
        measuring=measuring,
        stored_measurements=measurements,
        history=RequestHistory(store),
        conversations=Conversations(store),
        downloads=Downloads(
            lambda: context.settings,
            DownloadRows(store),
            HubToken(context.settings.home),
            on_done=loading.on_download_done,
        ),
        updates=updates,
        logs=logs or LogRing(),
        restart=restart,
    )


@contextlib.asynccontextmanager
async def listening(admin: AdminContext) -> AsyncGenerator[None, None]:
    """Subscribe every part to the worker and the settings while the server runs, then end everything in order."""
    context = admin.serving
    unsubscribes = [
        context.worker.subscribe(context.metrics.observe, Heartbeat, TextWork),
        context.worker.subscribe(admin.pace.on_event, Delta),
        context.worker.subscribe(context.journal.on_event, LoadProgress, Finished),
        context.worker.subscribe(admin.loading.on_event, Heartbeat),
    ]

    def keep_models() -> None:
        context.worker.keep(stays(context.live))

    keep_models()
    listeners = (
        keep_models,
        context.journal.on_settings_changed,
        admin.downloads.start_queued,
        admin.updates.on_settings_changed,
    )
    unsubscribes += [context.live.subscribe(on_settings_changed) for on_settings_changed in listeners]
    await context.journal.load_recent()
    works = (context.journal.run(), admin.updates.run(), _compile(admin.pages))
    tasks = [asyncio.create_task(work) for work in works]
    async with contextlib.AsyncExitStack() as closing:  # a part that fails to close does not keep the others open
        for unsubscribe in unsubscribes:
            closing.callback(unsubscribe)
        for task in tasks:
            closing.push_async_callback(_cancel, task)
        for close in (admin.measuring.close, admin.loading.close, admin.downloads.stop):
            closing.push_async_callback(close)
        await admin.downloads.start()
        yield


async def _compile(pages: Pages) -> None:
    """Compile the templates ahead of time; those that cannot be read now are compiled at the first visit."""
    try:
        await asyncio.to_thread(pages.compile)
    except OSError as error:
        logging.getLogger("paceline.pages").warning(
            "the pages could not be prepared, their first visits take longer: %s", error
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def build(admin: AdminContext) -> FastAPI:
    """Build the ASGI application around a context: every route behind the gate, closed unless it is public.

    Clients need a key once the environment sets one or `require_key` is on, and always if other machines can connect.
    """
    context, settings = admin.serving, admin.serving.settings
    app = FastAPI(
        title="Paceline",
        version=__version__,
        openapi_url=None,
        redirect_slashes=False,
        routes=ROUTES.routes,
        lifespan=lambda _app: listening(admin),
    )
    app.state.context, app.state.admin, app.state.pages = context, admin, admin.pages
    app.state.responses = ResponseStore()
    app.state.access_policy = AccessPolicy(
        accounts=admin.accounts,
        secret=settings.api_key.get_secret_value() if settings.api_key is not None else None,
        requires_key=lambda: context.settings.require_key or not settings.is_loopback,
    )
    install_error_handlers(app)
    for name, read in (topic for area in AREAS for topic in getattr(area, "TOPICS", {}).items()):
        admin.feed.topic(name, functools.partial(read, admin))
    app.add_middleware(
        Gate,
        allowed_hosts=lambda: context.settings.host_names,
        allowed_origins=lambda: context.settings.allowed_origins,
        on_response=context.metrics.answered,
    )
    return app


Announce = Callable[[str, str, LiveSettings, FolderCatalog], None]
"""Callback in a thread once the server is up. Arguments: its URL, the URL to choose the first password (empty once a
password exists), the settings and the catalog."""
Publish = Callable[[str, int, str], None]
"""Callback once the server listens. Arguments: host, port and the key for commands on this computer."""


def run(
    explicit_settings: Settings,
    *,
    arguments: tuple[str, ...] = (),
    check: Callable[[Settings], None] = lambda _settings: None,
    announce: Announce | None = None,
) -> int:
    """Serve until SIGTERM or Ctrl-C. Return the exit code: 0, 1 for something unavailable, 2 for an unsafe address.

    `explicit_settings` are those of command line and environment, `arguments` the raw command-line options. Stored
    settings are read here, not by the caller, because a damaged store is set aside first. `check` may refuse the
    combined settings by raising.
    """
    descriptors.raise_limit()
    configure_malloc()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with (
            lock_home(explicit_settings.home) as write,
            contextlib.closing(Store(explicit_settings.home / FILE_NAME)) as store,
        ):

            def publish(host: str, port: int, key: str) -> None:
                write(RunningServer(host, port, key, os.getpid(), __version__, time.time(), arguments))

            code = _run(store, explicit_settings, check, announce or _announce, publish)
    except ServerRuns as error:
        _print_error(str(error))
        # launchd restarts a job that fails: with another exit code, it would try again every few seconds.
        return 0 if SERVICE_LABEL in os.environ.get("XPC_SERVICE_NAME", "") else EXIT_UNAVAILABLE
    return _reexecute() if code == RESTART else code


def _reexecute() -> int:
    """Run the command line of this process again in its place: for shells, launchd and systemd, it stays the same
    process. Return the exit code if that is impossible."""
    sys.stdout.flush()
    try:
        os.execvp(sys.orig_argv[0], sys.orig_argv)  # noqa: S606 - ourselves
    except OSError as error:
        _print_error(f"{sys.orig_argv[0]} cannot be run again ({error.strerror}): start it with `paceline start`")
    return EXIT_UNAVAILABLE


def open_store(store: Store, explicit_settings: Settings) -> tuple[str, LiveSettings, bool]:
    """Open the store; return a notice for people, the combined settings, and whether these are unsafe.

    A locked-down store is safe: it requires a key, wherever a client connects from. Raises `StoreUnavailable`.
    """
    notice, stored = store.start(), StoredSettings(store)
    live = LiveSettings(explicit_settings, stored)
    is_unsafe = not store.locked_down and BEYOND_LOOPBACK.clashes(SettingsState(live.current, stored.has_keys()))
    return notice, live, is_unsafe


def _run(
    store: Store, explicit_settings: Settings, check: Callable[[Settings], None], announce: Announce, publish: Publish
) -> int:
    try:
        notice, live, is_unsafe = open_store(store, explicit_settings)
    except StoreUnavailable as error:
        _print_error(str(error))
        return EXIT_UNAVAILABLE
    if notice:
        _print_error(notice)
    check(live.current)
    if is_unsafe:
        _print_error(f"{live.current.host}: {BEYOND_LOOPBACK.advice}")
        return EXIT_UNSAFE
    try:
        listener = bind(live.current.host, live.current.port)
    except AddressError as error:
        _print_error(str(error))
        return EXIT_UNAVAILABLE
    secrets = (explicit_settings.api_key.get_secret_value(),) if explicit_settings.api_key is not None else ()
    with open_log_handlers(LogRing(secrets=secrets), explicit_settings.home) as lines:
        if notice:
            logging.getLogger("paceline.store").warning("%s", notice)
        is_restart = asyncio.run(_leaving_threads(_serve(live, store, listener, announce, lines, publish)))
    return RESTART if is_restart else 0


def setup_address(admin: AdminContext, url: str) -> str:
    """Return the URL to choose the first password, with a new code; empty once that is set, or without loopback."""
    host = admin.serving.settings.host
    is_near = admin.serving.settings.is_loopback or host in setting_texts.UNSPECIFIED_ADDRESSES
    return f"{url}admin/setup#{admin.setup_codes.issue()}" if is_near and not admin.accounts.has_account else ""


def _worker(settings: Settings, lines: WorkerLines) -> WorkerClient:
    """Return the client of a worker that starts with these settings."""
    command = [*WORKER_COMMAND, "--costs-folder", str(settings.home / "costs"), "--wire", settings.wire]
    if settings.memory_limit is not None:
        command += ["--memory-ceiling-bytes", str(settings.memory_limit)]
    disk_bytes = int(settings.prefix_cache_disk * 10**9)
    command += ["--prefixes-folder", str(settings.prefixes_path), "--prefixes-bytes", str(disk_bytes)]
    command += ["--prefixes-days", str(settings.prefix_cache_days)]
    return WorkerClient(command=command, on_line=lines.log)


def _follow_settings(live: LiveSettings, catalog: FolderCatalog) -> None:
    """Apply model folders and log level, now and after each change."""

    def on_settings_changed() -> None:
        catalog.set_folders(live.current.model_folders)
        set_log_level(live.current.log_level)

    on_settings_changed()
    live.subscribe(on_settings_changed)


async def _leaving_threads(serving: Awaitable[bool]) -> bool:
    """Return the result of `serving`, after which `asyncio.run` waits for no thread: a disk may never answer."""
    try:
        return await serving
    finally:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


async def _serve(
    live: LiveSettings, store: Store, listener: socket.socket, announce: Announce, lines: WorkerLines, publish: Publish
) -> bool:
    """Serve until a signal or a restart; return whether to restart, which a signal during the drain prevents."""
    settings, port = live.current, listener.getsockname()[1]
    worker = _worker(settings, lines)
    catalog = default_catalog(settings.model_folders, cache_folder=settings.home)
    _follow_settings(live, catalog)
    is_restart = False

    def restart() -> None:
        nonlocal is_restart
        if not app.state.context.activity.draining:
            is_restart = True
            server.stop()

    app = create_app(live, store, worker, catalog, lines.ring, restart)

    def started() -> None:
        gc.freeze()  # else a full collection now and then stops every stream for 0.1 s
        publish(settings.host, port, app.state.access_policy.local_key)
        url = f"{setting_texts.local_url(settings.host, port)}/"
        setup = setup_address(app.state.admin, url)
        threading.Thread(target=announce, args=(url, setup, live, catalog), daemon=True).start()

    server = DrainingServer(
        serve_config(app),
        activity=app.state.context.activity,
        drain_seconds=settings.drain_seconds,
        on_started=started,
    )
    awake = Awake(Caffeinate(), is_busy=lambda: live.current.prevent_sleep and bool(worker.in_flight))
    worker.subscribe(awake.on_event, Accepted, Heartbeat, LoadProgress)
    await worker.start()
    try:
        await server.serve(sockets=[listener])
    finally:
        await worker.stop()
        awake.close()
    return is_restart and not server.force_exit


def _announce(url: str, setup: str, _live: LiveSettings, catalog: FolderCatalog) -> None:
    sys.stdout.write(f"Paceline listens on {url} (API: {url}v1)\n")
    if setup:
        sys.stdout.write(f"Choose a password for the dashboard (within 30 minutes, once): {setup}\n")
    sys.stdout.flush()
    catalog.is_reading_tokenizers()


def _print_error(message: str) -> None:
    sys.stderr.write(f"paceline: {message}\n")
