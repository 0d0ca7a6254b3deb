"""A real server on a home of its own, as `paceline serve` makes it, with `scripted_worker` in place of its worker."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import app
from app.core.server_file import RunningServer, held_home
from app.hub.catalog import FolderCatalog
from app.main import create_app
from app.serving.live_settings import LiveSettings
from app.serving.server import DrainingServer, bind, serve_config
from app.settings import Settings
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from app.worker.client import WorkerClient

MODEL = "scripted"
CONTEXT_TOKENS = 131_072
COMMAND = (sys.executable, "-m", "tests.agents.scripted_worker")


def write_model(folder: Path) -> None:
    """The embedded model, said to hold what an agent's prompt takes."""
    shutil.copytree(Path(app.__file__).parent / "demo_models" / "demo-assistant", folder)
    for name, field in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {field: CONTEXT_TOKENS}))


@contextlib.asynccontextmanager
async def scripted_server(home: Path) -> AsyncGenerator[WorkerClient, None]:
    """It serves `home`, where `paceline launch` finds it, until the block ends."""
    write_model(home / "models" / MODEL)
    with held_home(home) as publish, contextlib.closing(Store(home / FILE_NAME)) as store:
        store.start()
        live = LiveSettings(Settings(home=home), StoredSettings(store))
        worker = WorkerClient(command=COMMAND)
        application = create_app(live, store, worker, FolderCatalog([home / "models"]))
        listener, started = bind("127.0.0.1", 0), asyncio.Event()
        server = DrainingServer(
            serve_config(application),
            activity=application.state.context.activity,
            drain_seconds=0.0,
            on_started=started.set,
        )
        await worker.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await started.wait()
        port, key = listener.getsockname()[1], application.state.door.own_key
        publish(RunningServer("127.0.0.1", port, key, os.getpid(), app.__version__, time.time()))
        try:
            yield worker
        finally:
            server.stop()
            await serving
            await worker.stop()
