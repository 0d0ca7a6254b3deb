"""A real server, as `paceline serve` makes it, with a home folder for the test and a scripted worker."""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

import app
from app.machine.server_file import RunningServer, lock_home
from app.main import create_app
from app.models.catalog import FolderCatalog
from app.serving.live_settings import LiveSettings
from app.serving.server import DrainingServer, bind, serve_config
from app.settings import Settings
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from app.supervision.client import WorkerClient
from tests.scripted.folders import PLAYS, template_source, write_scripted_model

WORKER = "tests.scripted.worker"
END_SECONDS = 30.0


@dataclass(frozen=True)
class Exchange:
    """A request and its answer."""

    path: str
    sent: bytes
    answered: bytes


class ScriptedServer:
    """Handle for tests on a running scripted server."""

    def __init__(self, home: Path, port: int, heard: "list[Exchange]") -> None:
        self.home = home
        self.heard = heard
        """Exchanges of all requests that have ended, in order."""
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._models = home / "models"
        self._plays: dict[str, str] = {}
        self._write_plays()

    def model(self, template: str = "demo", *, source: str = "", tokenizer: str = "") -> str:
        """Return the id of a model with the published template of this name, or with the template `source`.

        Its tokenizer is the embedded model's with the template's marks, or a published one. It is made once.
        """
        model_id = f"{template}--{tokenizer}" if tokenizer else template
        if not (self._models / model_id).exists():
            write_scripted_model(self._models / model_id, source or template_source(template), tokenizer=tokenizer)
        return model_id

    def play(self, text: str) -> str:
        """Return a prompt, or the end of one, that every model answers with `text`."""
        name = next((name for name, said in self._plays.items() if said == text), f"p{len(self._plays)}")
        self._plays[name] = text
        self._write_plays()
        return f"PLAY:{name}"

    def _write_plays(self) -> None:
        unfinished = self._models / f".{PLAYS}"
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(self._plays), encoding="utf-8")
        unfinished.replace(self._models / PLAYS)


@contextlib.contextmanager
def scripted_server(home: Path, *, worker: str = WORKER) -> Iterator[ScriptedServer]:
    """Serve `home`, where `paceline launch` finds the server too, until the block ends; `worker` is a module to run."""
    ready: Future[tuple[int, DrainingServer, asyncio.AbstractEventLoop]] = Future()
    heard: list[Exchange] = []
    thread = threading.Thread(target=asyncio.run, args=(_serve(home, worker, ready, heard),), name="scripted server")
    (home / "models").mkdir(parents=True)
    thread.start()
    port, server, loop = ready.result()
    scripted = ScriptedServer(home, port, heard)
    try:
        with scripted.client:
            yield scripted
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(END_SECONDS)


class Heard:
    """ASGI middleware that records the body and the answer of each request."""

    def __init__(self, app: Any, heard: list[Exchange]) -> None:
        self._app, self._heard = app, heard

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent, answered = bytearray(), bytearray()

        async def hear() -> Any:
            message = await receive()
            sent.extend(message.get("body", b""))
            return message

        async def tell(message: Any) -> None:
            answered.extend(message.get("body", b""))
            await send(message)

        await self._app(scope, hear, tell)
        self._heard.append(Exchange(scope["path"], bytes(sent), bytes(answered)))


async def _serve(
    home: Path,
    worker_module: str,
    ready: "Future[tuple[int, DrainingServer, asyncio.AbstractEventLoop]]",
    heard: list[Exchange],
) -> None:
    try:
        with lock_home(home) as publish, contextlib.closing(Store(home / FILE_NAME)) as store:
            store.start()
            live = LiveSettings(Settings(home=home), StoredSettings(store))
            worker = WorkerClient(command=(sys.executable, "-m", worker_module))
            application = create_app(live, store, worker, FolderCatalog([home / "models"], refresh_seconds=0.0))
            listener, started = bind("127.0.0.1", 0), asyncio.Event()
            activity = application.state.context.activity
            config = serve_config(Heard(application, heard))  # type: ignore[arg-type]
            server = DrainingServer(config, activity=activity, drain_seconds=0.0, on_started=started.set)
            await worker.start()
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await started.wait()
            port, key = listener.getsockname()[1], application.state.access_policy.local_key
            publish(RunningServer("127.0.0.1", port, key, os.getpid(), app.__version__, time.time()))
            ready.set_result((port, server, asyncio.get_running_loop()))
            try:
                await serving
            finally:
                await worker.stop()
    except BaseException as error:
        if not ready.done():
            ready.set_exception(error)
        raise
