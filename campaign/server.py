"""The server under attack: a normal `paceline serve` in a home of its own, and its processes."""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2
import psutil

from campaign.judgement import Memory

START_SECONDS, END_SECONDS = 120.0, 30.0
READY, ADDRESS = b"Ctrl-C stops the server", re.compile(rb"http://127\.0\.0\.1:\d+")
TAIL_CHARACTERS = 300
"""Characters of the log's end that a failure quotes."""
LOG_LINES = 30
"""Number of log lines that are quoted below a turn that exceeded a time limit."""
CALL_SECONDS = 60.0
POLL_SECONDS = 0.05
PREFIX_BYTES = 16 << 20
"""Size of the prefix cache in memory, in bytes: small, so that any growth is a leak."""
ROLES = {"app.worker.process": "worker", "app.worker.text_process": "text", "serve": "server"}
"""Names of processes, by an argument of their command line."""
TRACEBACK = b"Traceback (most recent call last)"


class Server:
    """One server; `hub` is the address where it looks for models. `admin_key` may do everything."""

    def __init__(self, folder: Path, hub: str) -> None:
        self.folder = folder
        """Folder for everything that the server and its attackers write."""
        self.home = folder / "home"
        self.downloads = folder / "models"
        self.log = folder / "log"
        self.admin_key = secrets.token_urlsafe()
        self.address = ""
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "HF_"))
        }
        self.environment |= {
            "HOME": str(folder),
            "HF_HOME": str(folder / "hub"),
            "PACELINE_HOME": str(self.home),
            "PACELINE_API_KEY": self.admin_key,
            "PACELINE_OPEN": "0",
            "PACELINE_CHECK_UPDATES": "0",
            "PACELINE_HUB_ENDPOINT": hub,
            "PACELINE_DOWNLOADS_FOLDER": str(self.downloads),
            "PACELINE_MODEL_DIRS": str(self.downloads),
            "PACELINE_PREFIX_CACHE_MEMORY": str(PREFIX_BYTES),
            "PACELINE_PREFIX_CACHE_DISK": "0.1",
        }
        for directory in (self.home, self.downloads):
            directory.mkdir(parents=True)
        self._tracebacks = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the server, or start it again. Raises RuntimeError if it does not get ready."""
        port = self.address.rpartition(":")[2] or "0"
        self._process, self.address = await launch(self.environment, self.log, port)

    async def kill(self) -> None:
        """Kill the server as a crash would; its children are left alone."""
        if self._process is not None:
            signal_to(self._process, signal.SIGKILL)
            await self._process.wait()

    async def stop(self) -> bool:
        """Shut the server down, and kill the processes that are left; return whether it ended by itself in time."""
        process_tree = self.process_tree()
        code = await shut_down(self._process) if self._process is not None else 0
        kill_all(process_tree)
        return code != -signal.SIGKILL

    def process_tree(self) -> list[psutil.Process]:
        """Return the server and all its descendants."""
        try:
            server = psutil.Process(self._process.pid if self._process else -1)
            return [server, *server.children(recursive=True)]
        except (psutil.NoSuchProcess, ValueError):
            return []

    def worker(self) -> psutil.Process | None:
        """Return the process that runs the models, or None while there is none."""
        return next(
            (process for process in self.process_tree() if "app.worker.process" in _command_line(process)), None
        )

    def memory(self) -> dict[str, Memory]:
        """Return the memory of the server, of the worker, and of all text processes as one; others are left out."""
        by_role: dict[str, Memory] = {}
        for process in self.process_tree():
            command_line = _command_line(process)
            for name in (role for part, role in ROLES.items() if part in command_line):
                counted = by_role.get(name, Memory(process.pid, 0))
                with contextlib.suppress(psutil.NoSuchProcess):
                    by_role[name] = Memory(counted.process_id, counted.resident_bytes + process.memory_info().rss)
        return by_role

    def client(self, key: str) -> httpx2.AsyncClient:
        """Return a client with a key, for many requests at once."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.AsyncClient(
            base_url=self.address, headers=headers, timeout=CALL_SECONDS, limits=limits, trust_env=False
        )

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Make an admin's call that must succeed. Raises RuntimeError otherwise."""
        async with self.client(self.admin_key) as admin:
            answer = await admin.request(method, path, json=body)
        if not answer.is_success:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    async def new_key(self) -> str:
        """Create an inference key."""
        created = await self.call("POST", "/admin/api/keys", {"name": secrets.token_hex(8), "scope": "inference"})
        return str(created["text"])

    async def revoke_keys(self) -> None:
        """Revoke every key that was created through the API."""
        for key in (await self.call("GET", "/admin/api/keys"))["keys"]:
            await self.call("DELETE", f"/admin/api/keys/{key['id']}")

    async def is_ready(self, seconds: float) -> bool:
        """Return whether the server accepts requests within `seconds`."""
        async with self.client(self.admin_key) as admin:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx2.TransportError):
                    if (await admin.get("/health/ready")).is_success:
                        return True
                await asyncio.sleep(POLL_SECONDS)
        return False

    def log_lines(self, since_bytes: int) -> list[str]:
        """Return the last lines of the log that were written after its first `since_bytes` bytes."""
        with self.log.open("rb") as log:
            log.seek(since_bytes)
            return log.read().decode(errors="replace").splitlines()[-LOG_LINES:]

    def new_tracebacks(self) -> int:
        """Return the number of tracebacks in the log since the last call."""
        before, self._tracebacks = self._tracebacks, self.log.read_bytes().count(TRACEBACK)
        return self._tracebacks - before


async def launch(environment: dict[str, str], log: Path, port: str = "0") -> tuple[asyncio.subprocess.Process, str]:
    """Start a server and wait until it is ready; return it and its address. Raises RuntimeError if it is not."""
    command = [sys.executable, "-m", "app.cli", "serve", "--port", port]
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True
        )
    output = b""
    try:
        async with asyncio.timeout(START_SECONDS):
            while process.stdout is not None and READY not in output and (line := await process.stdout.readline()):
                output += line
    except TimeoutError:
        pass
    address = ADDRESS.search(output)
    if READY not in output or address is None:
        code = await shut_down(process)
        raise RuntimeError(f"`serve` did not get ready and ended with {code}: {log_tail(log)}")
    return process, address[0].decode()


def log_tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(encoding="utf-8", errors="replace").strip()[-TAIL_CHARACTERS:]


async def shut_down(process: asyncio.subprocess.Process) -> int:
    """Shut a server down, by SIGKILL if it does not end in time; return its exit code."""
    signal_to(process, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(process.wait(), END_SECONDS)
    signal_to(process, signal.SIGKILL)
    return await process.wait()


def signal_to(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal. `send_signal` could reap a process that has just ended: its waiter would miss the exit code."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill the processes that have not ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
