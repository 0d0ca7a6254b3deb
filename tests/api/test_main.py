"""The server process: quick to start, free of mlx, safe by default, and clear about why it cannot start."""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import psutil
import pytest

from app.core.setting_texts import local_url
from app.machine import server_file
from app.main import listening, run
from app.serving.server import bind
from app.settings import Settings
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from tests.admin.model_site import make_model_site
from tests.api.fakes import make_site, served

RUN = "import sys; from app.main import run; from app.settings import read_settings; sys.exit(run(read_settings()))"
IMPORTS = """
import sys
calls = 0
def count(_frame, event, _argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
import fastapi, pydantic, sqlmodel
packages = calls
from app.main import create_app
from app.serving.live_settings import LiveSettings
from app.settings import Settings
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from app.supervision.client import WorkerClient
from app.models.catalog import FolderCatalog
store = Store(Settings().home / FILE_NAME)
create_app(LiveSettings(Settings(), StoredSettings(store)), store, WorkerClient(), FolderCatalog(()))
sys.setprofile(None)
print(calls / packages)
print([name for name in ("mlx", "mlx_lm", "transformers", "torch", "numpy") if name in sys.modules])
"""

REACHED = """
import os, signal, socket
from app.main import _run
from app.settings import read_settings
from app.store.store import FILE_NAME, Store

def publish(host, port, _key):
    with socket.socket() as client:
        print(client.connect_ex((host, port)))

def announce(*_values):
    os.kill(os.getpid(), signal.SIGTERM)

settings = read_settings()
_run(Store(settings.home / FILE_NAME), settings, lambda _settings: None, announce, publish)
"""
HANGS = """
import asyncio, os, signal, sys, threading
from app import cli
from app.admin.downloading import Downloads
from app.supervision.client import WorkerClient

async def start(client, begin=WorkerClient.start):
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    await begin(client)

async def resume(downloads, begin=Downloads.start):
    asyncio.create_task(downloads.call_hub(lambda _hub: threading.Event().wait()))
    await begin(downloads)

WorkerClient.start, Downloads.start = start, resume
cli._greet = lambda *_values: (print("served", flush=True), os.kill(os.getpid(), signal.SIGTERM))
sys.argv = ["paceline", "serve", "--port", "0"]
cli.main()
"""
LARGE_BODIES = """
import json
from concurrent.futures import ThreadPoolExecutor
import psutil
from app.api.completions import CompletionBody
from app.serving.gate import configure_malloc, parse
configure_malloc()

def read(size):
    parse(json.dumps({"prompt": "7" * size}).encode(), CompletionBody)

def used(size):
    with ThreadPoolExecutor() as threads:
        list(threads.map(read, [size] * 8))
    return psutil.Process().memory_info().rss

print(-used(10) + used(31_000_000))
"""


@pytest.fixture(autouse=True)
def _home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tests away from the user's `~/.paceline`."""
    monkeypatch.setenv("HOME", str(tmp_path))


def settings(**values: object) -> Settings:
    return Settings(**values)  # type: ignore[arg-type]


def _run(program: str, **variables: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | variables).stdout


def test_the_server_is_made_in_time_and_without_mlx() -> None:
    ratio, imported = _run(IMPORTS).splitlines()
    assert float(ratio) < 2.5, "in calls of functions, of those that the packages make which it is built on"
    assert imported == "[]"


def test_the_memory_of_large_bodies_is_given_back() -> None:
    assert int(_run(LARGE_BODIES)) < 16_000_000


def test_beyond_loopback_without_a_key_it_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5"):  # noqa: S104
        assert run(settings(host=host, port=0)) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all("PACELINE_API_KEY" in line for line in lines)


def test_a_taken_port_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(bind("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert run(settings(port=port)) == 1
    assert capfd.readouterr().err.splitlines() == [
        f"paceline: port {port} is taken (by another Paceline? see `paceline ps`): stop it or set PACELINE_PORT"
    ]


@contextlib.contextmanager
def running(home: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server in a process of its own; yield the process and the server's address."""
    environment = {"PACELINE_PORT": "0", "PACELINE_DRAIN_SECONDS": "1", "PATH": "/usr/bin:/bin", "HOME": str(home)}
    command = [sys.executable, "-c", RUN]
    environment |= {"PACELINE_HOME": str(home / "state"), **variables}
    with (
        (home / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Paceline listens on http://127.0.0.1:"), (home / "log").read_text(encoding="utf-8")
        try:
            yield process, line.split()[3]
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            assert process.wait(timeout=60) == 0


def status_of(address: str, **headers: str) -> int:
    """Return the status of a GET."""
    try:
        request = urllib.request.Request(address, headers=headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_it_serves_and_ends_with_0_on_sigterm(tmp_path: Path) -> None:
    with running(tmp_path) as (_, url):
        assert status_of(f"{url}health/live") == 200


def test_what_commands_find_in_its_file_can_be_reached(tmp_path: Path) -> None:
    assert _run(REACHED, PACELINE_HOME=str(tmp_path / "state"), PACELINE_PORT="0") == "0\n"


def test_a_disk_and_a_hub_that_never_answer_do_not_hold_up_the_end(tmp_path: Path) -> None:
    assert _run(HANGS, PACELINE_HOME=str(tmp_path / "state")) == "served\n"


def test_a_browser_that_stays_in_the_foreground_holds_nothing_up(tmp_path: Path) -> None:
    browser, is_open = tmp_path / "browser", tmp_path / "is-open"
    browser.write_text(f'#!/bin/sh\nwhile [ -e "{is_open}" ]; do sleep 0.1; done\n')
    browser.chmod(0o700)
    is_open.touch()
    with running(tmp_path, PACELINE_OPEN="1", BROWSER=f"{browser} %s") as (_, url):
        assert status_of(f"{url}health/live") == 200
        is_open.unlink()


def test_stored_settings_are_read_at_the_start_and_felt_while_it_runs(tmp_path: Path) -> None:
    store = Store(tmp_path / "state" / FILE_NAME)
    StoredSettings(store).change_settings({"allowed_hosts": ["studio.local"], "port": 1}, source="test")
    store.close()
    with running(tmp_path) as (_, url):
        assert status_of(f"{url}health/live", host="studio.local") == 200
        assert status_of(f"{url}health/live", host="mac.local") == 403
        config(tmp_path, "set", "allowed_hosts", "mac.local")
        assert status_of(f"{url}health/live", host="mac.local") == 200
        assert status_of(f"{url}health/live", host="studio.local") == 403


def ask_owner(home: Path, url: str, method: str, path: str, body: object = None) -> HTTPResponse:
    """Send a request with the key from the server's file, and return the response for the caller to read."""
    running = server_file.read_server(home / "state")
    assert running is not None
    connection = HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60)
    headers = {"authorization": f"Bearer {running.key}", "content-type": "application/json"}
    connection.request(method, path, None if method == "GET" else json.dumps(body or {}), headers)
    return connection.getresponse()


def test_a_restart_applies_what_waited_in_the_same_process_with_its_lock_its_log_and_one_worker(tmp_path: Path) -> None:
    with running(tmp_path) as (process, url):
        assert process.stdout is not None
        config(tmp_path, "set", "prefix_cache_days", "3")
        worker = psutil.Process(process.pid).children()[0]
        answer = ask_owner(tmp_path, url, "POST", "/admin/api/restart")
        assert (answer.status, json.load(answer)) == (202, {"new_port": None})
        again = next(line for line in process.stdout if line.startswith("Paceline listens on")).split()[3]
        settings = json.load(ask_owner(tmp_path, again, "GET", "/admin/api/settings"))["settings"]
        row = next(row for row in settings if row["name"] == "prefix_cache_days")
        assert (row["value"], row["in_effect"]) == (3, True)
        assert not worker.is_running()
        assert server_file.lock_holder(tmp_path / "state") == process.pid
        log = (tmp_path / "state" / server_file.LOG_FOLDER / server_file.LOG).read_text(encoding="utf-8")
        assert "Traceback" not in log
    assert not server_file.is_served(tmp_path / "state")


def test_a_stop_while_a_restart_waits_for_requests_ends_the_server(tmp_path: Path) -> None:
    with running(tmp_path, PACELINE_DRAIN_SECONDS="3600") as (process, url):
        body = {"model": "demo-assistant", "messages": [{"role": "user", "content": "Count."}], "stream": True}
        reply = ask_owner(
            tmp_path, url, "POST", "/v1/chat/completions", {**body, "ignore_eos": True, "max_tokens": 1500}
        )
        assert reply.readline().startswith(b"data: ")
        assert ask_owner(tmp_path, url, "POST", "/admin/api/restart").status == 202
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def config(home: Path, *words: str) -> str:
    """Return the output of `paceline config`, which finds the server by its home folder alone."""
    command = [sys.executable, "-m", "app.cli", "config", *words]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "PACELINE_HOME": str(home / "state")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_command_line_asks_the_server_to_change_a_setting_and_opens_the_store_when_none_runs(
    tmp_path: Path,
) -> None:
    file, own = tmp_path / "state" / server_file.FILE_NAME, ("--model", "demo-assistant")
    with running(tmp_path) as (_, url):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        left = file.read_bytes()
        key = json.loads(left)["key"]
        assert status_of(f"{url}admin/api/settings", authorization=f"Bearer {key}") == 200
        assert status_of(f"{url}admin/api/settings", authorization=f"Bearer {key}x") == 401
        assert "takes effect now" in config(tmp_path, "set", "theme", "dark")
        with urllib.request.urlopen(f"{url}admin/setup", timeout=60) as page:  # noqa: S310
            assert b'data-theme="dark"' in page.read()
        assert "temperature is 0.5" in config(tmp_path, "set", *own, "temperature", "0.5")
    assert not file.exists()
    file.write_bytes(left)  # as a killed server leaves it
    assert config(tmp_path, "get", "theme") == "dark\n"
    assert "theme is light" in config(tmp_path, "set", "theme", "light")
    assert config(tmp_path, "get", *own, "temperature") == "0.5\n"


def test_a_damaged_store_is_set_aside_and_everything_needs_a_key(tmp_path: Path) -> None:
    path = tmp_path / "state" / FILE_NAME
    path.parent.mkdir()
    path.write_bytes(b"damaged" * 1000)
    for start in ("the first", "the next"):
        with running(tmp_path) as (_, url):
            for route in ("v1/models", "metrics", "api/ps", "admin/api/settings"):
                assert status_of(f"{url}{route}") == 401, (start, route)
            assert status_of(f"{url}health/live") == 200
        said = (tmp_path / "log").read_text(encoding="utf-8")
        assert ("was damaged (it is not a database)" in said) == (start == "the first")
        assert "locked down" in said, "at every start"
    assert len(list(path.parent.glob(f"{FILE_NAME}.damaged-*"))) == 1


def test_a_store_of_a_newer_paceline_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Store(tmp_path / FILE_NAME).start()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        file.executescript("UPDATE alembic_version SET version_num = '0999'; PRAGMA user_version = 999")
    assert run(settings(home=tmp_path, port=0)) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "newer Paceline" in line


def test_addresses() -> None:
    assert local_url("127.0.0.1", 1) == "http://127.0.0.1:1"
    assert local_url("0.0.0.0", 1) == "http://127.0.0.1:1"  # noqa: S104
    assert local_url("::", 1) == "http://[::1]:1"
    assert local_url("::1", 1) == "http://[::1]:1"


@pytest.mark.anyio
async def test_ipv6_loopback() -> None:
    with closing(bind("::1", 0)) as listener:
        assert listener.getsockname()[0] == "::1"
    async with asyncio.timeout(60), served(make_site()) as (port, _):
        assert port > 0


@pytest.mark.anyio
async def test_whatever_fails_at_start_or_end_each_part_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    admin, closed = make_model_site(tmp_path).admin, []

    async def fail() -> None:
        raise OSError("the disk is gone")

    async def close() -> None:
        closed.append("measuring")

    monkeypatch.setattr(admin.pages, "compile", (tmp_path / "nowhere").read_text)
    monkeypatch.setattr(admin.downloads, "stop", fail)
    monkeypatch.setattr(admin.measuring, "close", close)
    running = listening(admin)
    await running.__aenter__()
    while "could not be prepared" not in caplog.text:
        await asyncio.to_thread(lambda: None)
    with pytest.raises(OSError, match="the disk is gone"):
        await running.__aexit__(None, None, None)
    assert closed == ["measuring"]


def test_a_mac_is_kept_awake_while_a_model_is_asked_for_and_let_go_when_the_server_ends(tmp_path: Path) -> None:
    program, called = tmp_path / "caffeinate", tmp_path / "called"
    program.write_text(f'#!/bin/sh\necho $$ "$@" >"{called}"\nexec sleep 600\n')
    program.chmod(0o755)
    os.mkfifo(called)
    with running(tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin") as (process, url):
        body = json.dumps({"model": "demo-assistant", "draft": "off"}).encode()
        wanted = urllib.request.Request(f"{url}api/load", body, {"content-type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(wanted, timeout=60) as response:  # noqa: S310
            assert json.load(response)["model"] == "demo-assistant"
        child, *words = called.read_text().split()
        assert words == ["-i", "-w", str(process.pid)]
        assert psutil.pid_exists(int(child)), "a request may follow soon"
    assert not psutil.pid_exists(int(child))
