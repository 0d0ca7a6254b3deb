"""A real `paceline serve` on a free port with tiny models on disk: two processes, real mlx, real sockets."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tests.tiny import write_tiny_model

START_SECONDS = 60.0


@dataclass(frozen=True)
class Server:
    """A running server and how to reach it."""

    process: psutil.Popen
    url: str

    @property
    def worker(self) -> psutil.Process:
        """The one child that runs mlx."""
        children = [child for child in self.process.children() if "app.worker.process" in child.cmdline()]
        assert len(children) == 1
        return children[0]

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(values)

    def wait_ready(self, seconds: float = START_SECONDS) -> float:
        """Poll until the worker serves; return how long that took, in seconds."""
        started = time.monotonic()
        gate = threading.Event()
        while time.monotonic() - started < seconds:
            try:
                if httpx.get(f"{self.url}/health/ready", timeout=60).status_code == 200:
                    return time.monotonic() - started
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, "the server ended"
            gate.wait(0.05)
        raise AssertionError(f"not ready after {seconds} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an attention and a hybrid model, a drafter for each, and a broken model."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "attention", "qwen3")
    write_tiny_model(folder / "attention-draft", "qwen3", noise=0.03)
    write_tiny_model(folder / "hybrid", "qwen3_next")
    write_tiny_model(folder / "hybrid-draft", "qwen3_next", noise=0.03)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    return folder


@contextmanager
def running(home: Path, **environment: str) -> Iterator[Server]:
    """Start a server with its state in `home`; yield it when it is ready, and stop it after the block."""
    port = free_port()
    own = {
        "PACELINE_HOST": "127.0.0.1",
        "PACELINE_PORT": str(port),
        "PACELINE_HOME": str(home),
        "PACELINE_OPEN": "0",
        "PACELINE_OPENBLAS": "0",
    }
    command = [sys.executable, "-m", "app.cli", "serve"]
    process = psutil.Popen(command, env=os.environ | own | environment, stdout=subprocess.DEVNULL)
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        server.wait_ready()
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server that drafts only for a single request: in a batch, drafting would depend on measured times."""
    models = {
        "PACELINE_MODEL_DIRS": str(model_folder),
        "PACELINE_DRAFTS": "attention=attention-draft,hybrid=hybrid-draft",
        "PACELINE_POLICY": "single",
    }
    with running(tmp_path_factory.mktemp("home"), **models) as server:
        yield server
