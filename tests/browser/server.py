"""A real server for a real browser: `paceline serve` with the embedded models, a temporary home and a free port."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

from app.serving.auth import COOKIE

PASSWORD = "correct horse battery"
MODEL = "demo-assistant"
READY = "Ctrl-C stops the server"
CALL_SECONDS = 90


@dataclass
class Server:
    """A running server. `setup` is the printed address where the first password is chosen."""

    address: str
    setup: str
    home: Path
    said: str
    log: Path
    client: httpx2.Client
    process: subprocess.Popen[str]
    environment: dict[str, str]

    def kill(self) -> None:
        """Kill the server as a crash does, without a shutdown; its worker ends with it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def restart(self) -> None:
        """Start the server again after `kill`, with the same home and address."""
        self.process, _ = launch(self.environment, self.log, port=self.address.rpartition(":")[2])

    @property
    def worker(self) -> int:
        """The worker's process id."""
        return max(psutil.Process(self.process.pid).children(), key=lambda child: child.create_time()).pid

    def url(self, path: str) -> str:
        return self.address + path

    def set_up(self) -> None:
        """Choose the password as the set-up page does; from then on `client` is signed in."""
        token = self.setup.partition("#")[2]
        self.call("POST", "/admin/api/setup", {"token": token, "password": PASSWORD})

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call a JSON route of the dashboard as `client`; return the decoded answer."""
        json_type = {"content-type": "application/json"}
        content = None if method == "GET" else json.dumps(body if body is not None else {})
        response = self.client.request(method, path, content=content, headers=json_type)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response.json() if response.content else None

    def until(self, topic: str, wanted: Callable[[Any], bool]) -> Any:
        """Listen to the live feed until `wanted` accepts a topic's value; return that value."""
        value, began = None, time.monotonic()
        with self.client.stream("GET", f"/admin/api/live?topics={topic}") as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and wanted(value := json.loads(line.removeprefix("data: "))):
                    return value
                assert time.monotonic() - began < CALL_SECONDS, value
        raise AssertionError(f"the live feed ended before {topic} was as wanted: {value}")

    def another_client(self) -> httpx2.Client:
        """Return a client with the same session for another thread."""
        return httpx2.Client(base_url=self.address, cookies={COOKIE: self.cookie}, timeout=CALL_SECONDS)

    @property
    def cookie(self) -> str:
        return self.client.cookies.get(COOKIE) or ""

    def reply(self, text: str, model: str = MODEL, **body: Any) -> Any:
        """Send a model one message and return its whole reply."""
        message = {"role": "user", "content": text}
        return self.call("POST", "/admin/api/v1/chat/completions", {"model": model, "messages": [message], **body})


@contextlib.contextmanager
def serving(folder: Path, *, account: bool = True, **environment: str) -> Iterator[Server]:
    """Run a server whose state lies below `folder`; `environment` adds variables such as `PACELINE_MODEL_DIRS`."""
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "HF_"))},
        "PACELINE_HOME": str(folder / "home"),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HOME": str(folder),
        "COLUMNS": "200",
        **environment,
    }
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / "log"
    process, said = launch(variables, log_path)
    match = re.search(r"http://127\.0\.0\.1:\d+(?=/admin/\s)", said)
    assert match, said + log_path.read_text(encoding="utf-8")
    setup = re.search(r"http://\S+/admin/setup#\S+", said)
    with httpx2.Client(base_url=match[0], timeout=CALL_SECONDS) as client:
        server = Server(
            address=match[0],
            setup=setup[0] if setup else "",
            home=folder / "home",
            said=said,
            log=log_path,
            client=client,
            process=process,
            environment=variables,
        )
        try:
            if account:
                server.set_up()
            yield server
        finally:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
                server.process.communicate()


def launch(environment: dict[str, str], log_path: Path, port: str = "0") -> tuple[subprocess.Popen[str], str]:
    """Start a server, wait until it reports that it is ready, and return it with its output so far."""
    command = [sys.executable, "-m", "app.cli", "serve", "--port", port]
    with log_path.open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    return process, _greeting(process)


def _greeting(process: subprocess.Popen[str]) -> str:
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if READY in line:
            break
    return said
