"""Processes that a server started end as soon as it is killed, even while they import or a library holds the GIL."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0
WAITS = "import threading; threading.Event().wait()"
HOLDS_PYTHON = "import re; re.match('(a+)+$', 'a' * 100 + 'b')"
WORKER = """
import asyncio
from app.supervision.child import WORKER_COMMAND, Child
async def serve():
    child = await Child.spawn(WORKER_COMMAND, on_event=print, on_close=print)
    await asyncio.Event().wait()
asyncio.run(serve())
"""
PROMPT = """
import asyncio, sys
from app.core.messages import Generate
from app.core.unit import ModelSpecification
from app.supervision.client import WorkerClient
async def serve():
    client = WorkerClient()
    await client.start()
    model = ModelSpecification(id="m", path=sys.argv[1])
    async for _ in client.generate(Generate(id="r", model=model, text="hello")):
        pass
asyncio.run(serve())
"""
DOWNLOAD = """
import asyncio
from app.hub.download_run import spawn_child
async def serve():
    process = await spawn_child(b"{}\\n")
    await asyncio.Event().wait()
asyncio.run(serve())
"""
LIVES = {
    "a worker that waits": (WORKER, "app.worker.process", "mlx", WAITS),
    "a worker that is busy": (WORKER, "app.worker.process", "mlx", "while True: pass"),
    "a text process that waits": (PROMPT, "app.worker.text_process", "tokenizers", WAITS),
    "a text process that gives no turn": (PROMPT, "app.worker.text_process", "tokenizers", HOLDS_PYTHON),
    "a download that waits": (DOWNLOAD, "app.hub.download_child", "huggingface_hub", WAITS),
}
"""Server script, module that it starts, package imported there, and the endless code of that package, by case."""


@contextmanager
def server(script: str, folder: Path, packages: Path) -> Iterator[psutil.Popen]:
    path = os.pathsep.join((str(packages), str(ROOT)))
    command = [sys.executable, "-c", script, str(folder)]
    process = psutil.Popen(command, cwd=packages, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        for member in (*process.children(recursive=True), process) if process.is_running() else ():
            member.kill()
        process.wait()


@pytest.mark.parametrize("life", LIVES)
def test_whatever_it_is_at_it_ends_with_a_killed_server(tmp_path: Path, life: str) -> None:
    script, started, package, stays = LIVES[life]
    place = tmp_path / "packages" / package
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(f"open({str(tmp_path / 'reached')!r}, 'w').close()\n{stays}\n")
    write_tiny_model(tmp_path / "m", "qwen3")
    with server(script, tmp_path / "m", tmp_path / "packages") as process:
        until = time.monotonic() + PATIENCE_SECONDS
        while not (tmp_path / "reached").exists():
            assert time.monotonic() < until
        children = process.children(recursive=True)
        assert any(started in child.cmdline() for child in children)
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(children, PATIENCE_SECONDS)
        for member in left:
            member.kill()
        assert left == []
