"""Composes the server: settings, worker, catalog and endpoints; runs it until a signal, and ends it in order."""

import asyncio
import contextlib
import socket
import sys
import webbrowser
from collections.abc import AsyncGenerator, Callable

from fastapi import Depends, FastAPI

from app import __version__
from app.admin import assets, pages
from app.admin.identity import StoredCallers
from app.api import chat, completions, control, health, metrics, models
from app.hub import pairing
from app.hub.catalog import default_catalog
from app.i18n import read_words
from app.serving.activity import Activity
from app.serving.auth import Door, NoCallers, authorize
from app.serving.context import Context
from app.serving.errors import install_error_handlers
from app.serving.gate import Gate
from app.serving.idle import IdleLimit
from app.serving.ports import Catalog, Worker
from app.serving.resolver import Resolver
from app.serving.server import AddressError, DrainingServer, bind, serve_config
from app.settings import Settings
from app.store.accounts import Accounts
from app.store.store import FILE_NAME, Store
from app.worker.client import WorkerClient
from app.worker.supervisor import Supervisor

ROUTERS = (chat, completions, models, control, health, metrics)
EXIT_ADDRESS = 1
EXIT_UNSAFE = 2


def create_app(settings: Settings, client: Worker, catalog: Catalog) -> FastAPI:
    """The ASGI application; `client` need not be ready."""
    store = Store(settings.home / FILE_NAME)
    accounts = Accounts(store)
    resolver = Resolver(settings, catalog, client, pairing, store)
    context = Context(
        settings=settings,
        worker=client,
        resolver=resolver,
        activity=Activity(settings.max_requests),
        idle=IdleLimit(client, resolver, settings.idle_seconds),
    )
    door = Door(
        callers=StoredCallers(accounts),
        secret=secret_of(settings),
        requires_key=lambda: not settings.is_loopback,
    )
    return build(context, door)


def secret_of(settings: Settings) -> str | None:
    """The key of the environment."""
    return settings.api_key.get_secret_value() if settings.api_key is not None else None


def build(context: Context, door: Door | None = None) -> FastAPI:
    """The ASGI application around a context: every route behind the gate, closed unless it is public."""

    @contextlib.asynccontextmanager
    async def listen(_app: FastAPI) -> AsyncGenerator[None, None]:
        listeners = (context.measurements.observe, context.idle.hear)
        unsubscribes = [context.worker.subscribe(listener) for listener in listeners]
        yield
        for unsubscribe in unsubscribes:
            unsubscribe()

    app = FastAPI(
        title="Paceline",
        version=__version__,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(authorize)],
        lifespan=listen,
    )
    app.state.context = context
    app.state.door = door or Door(callers=NoCallers(), secret=secret_of(context.settings))
    install_error_handlers(app)
    for module in ROUTERS:
        app.include_router(module.router)
    static = assets.read_assets()
    app.include_router(assets.make_router(static))
    app.include_router(pages.make_router(start_view(context), static, read_words()))
    app.add_middleware(Gate, allowed_hosts=context.settings.host_names, answered=context.measurements.answered)
    return app


def start_view(context: Context) -> pages.StartView:
    """What the start page shows of the application: the usable models, those in memory first."""

    def model_names() -> list[str]:
        loaded = context.resolver.loaded()
        usable = [each.id for each in context.resolver.models() if each.kind == "main" and not each.problem]
        first = context.settings.default_model
        return sorted(usable, key=lambda name: (name != first, name not in loaded))

    return pages.StartView(version=__version__, has_key=context.settings.api_key is not None, model_names=model_names)


def run(settings: Settings, *, announce: Callable[[str], None] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C. The exit code: 0, 1 for an address that cannot be had, 2 for an unsafe one."""
    if not settings.is_loopback and settings.api_key is None:
        _complain(f"{settings.host} is reachable from other machines: set PACELINE_API_KEY, or listen on 127.0.0.1")
        return EXIT_UNSAFE
    try:
        listener = bind(settings.host, settings.port)
    except AddressError as error:
        _complain(str(error))
        return EXIT_ADDRESS
    return asyncio.run(_serve(settings, listener, announce or _announce))


async def _serve(settings: Settings, listener: socket.socket, announce: Callable[[str], None]) -> int:
    supervisor = Supervisor(memory_ceiling_bytes=settings.memory_limit, costs_folder=settings.home / "costs")
    client = WorkerClient(supervisor)
    app = create_app(settings, client, default_catalog(settings.model_dirs))
    url = address_url(settings.host, listener.getsockname()[1])

    def started() -> None:
        announce(url)
        if settings.open:
            webbrowser.open(url)

    server = DrainingServer(
        serve_config(app),
        activity=app.state.context.activity,
        drain_seconds=settings.drain_seconds,
        on_started=started,
    )
    await supervisor.start()
    try:
        await server.serve(sockets=[listener])
    finally:
        await supervisor.stop()
    return 0


def address_url(host: str, port: int) -> str:
    """Where a browser on this machine finds a server that listens on `host`."""
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _announce(url: str) -> None:
    sys.stdout.write(f"Paceline listens on {url} (API: {url}v1)\n")
    sys.stdout.flush()


def _complain(message: str) -> None:
    sys.stderr.write(f"paceline: {message}\n")
