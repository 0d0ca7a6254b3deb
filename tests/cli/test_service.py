"""The server in the background: one for each home, however it is started, and an orderly end."""

import errno
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2
import msgspec
import pytest

from app.command import service
from app.command.service import log_lines, option_arguments, readable, start, status, status_lines, stop
from app.core.errors import CommandError
from app.machine.installation import this_installation
from app.machine.server_file import (
    FILE_NAME,
    LOCK_NAME,
    LOG,
    LOG_FOLDER,
    START_LOCK,
    RunningServer,
    is_served,
    lock_holder,
    lock_home,
    read_server,
)
from app.settings import read_settings
from app.store.database import back_up
from app.store.snapshot import FILE_NAME as STORE


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    return {**own, "PACELINE_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "PACELINE_OPENBLAS": "0"}


@pytest.fixture
def home(environment: Mapping[str, str]) -> Iterator[Path]:
    """A state folder whose server ends with the test."""
    home = Path(environment["PACELINE_HOME"])
    yield home
    said(environment, "stop", "--force")
    assert not is_served(home)


def begin(environment: Mapping[str, str], *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "app.cli", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(environment: Mapping[str, str], *words: str, code: int = 0) -> str:
    with begin(environment, *words) as process:
        out, complaint = process.communicate(timeout=60)
    assert process.returncode == code, complaint
    return (out + complaint).strip()


def running(home: Path) -> RunningServer:
    server = read_server(home)
    assert server is not None
    return server


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.soak)])
def test_starts_at_once_make_one_server(environment: Mapping[str, str], home: Path, count: int) -> None:
    starts = [begin(environment, "start", "--port", "0") for _ in range(count)]
    answers = [process.communicate(timeout=100) for process in starts]
    assert {process.returncode for process in starts} == {0}, answers
    server = running(home)
    assert all(f"{server.address} (process {server.pid})" in out for out, _ in answers)
    assert sum("is already running" in out for out, _ in answers) == count - 1
    refused = said(environment, "serve", "--port", "0", code=1)
    assert (
        refused
        == f"paceline: Paceline is already running: {server.address} (process {server.pid}); `paceline stop` ends it"
    )
    by_launchd = said({**environment, "XPC_SERVICE_NAME": "app.paceline.server"}, "serve", "--port", "0")
    assert by_launchd == refused, "and no failure, after which launchd would try again for ever"
    assert httpx2.get(f"{server.address}/health/live", timeout=60).is_success


def test_what_a_killed_server_left_is_in_nobodys_way(environment: Mapping[str, str], home: Path) -> None:
    said(environment, "start", "--port", "0")
    killed = running(home)
    left = (home / FILE_NAME).read_bytes()
    os.kill(killed.pid, signal.SIGKILL)
    while is_served(home):
        pass
    (home / FILE_NAME).write_bytes(left)
    assert "is not running" in said(environment, "status", code=3)
    stranger = msgspec.structs.replace(killed, pid=os.getpid(), port=9)
    (home / FILE_NAME).write_bytes(msgspec.json.encode(stranger))
    assert said(environment, "stop") == "Paceline is not running."
    said(environment, "start", "--port", "0")
    assert running(home).pid not in {killed.pid, os.getpid()}


def test_a_stop_lets_a_stream_finish_and_says_that_it_waits(environment: Mapping[str, str], home: Path) -> None:
    said(environment, "start", "--port", "0")
    server = running(home)
    question = {"role": "user", "content": "Count from 1 to 150."}
    body = {"model": "demo-assistant", "messages": [question], "stream": True, "max_tokens": 1500}
    messages: list[str] = []
    settings = read_settings(home=home)
    with (
        ThreadPoolExecutor(1) as threads,
        httpx2.stream("POST", f"{server.address}/v1/chat/completions", json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        next(line for line in lines if '"content"' in line)
        stopping = threads.submit(stop, settings, messages.append)
        text = "".join(lines)
        assert stopping.result(timeout=60) == server
    assert "Waiting for 1 request to finish" in messages
    assert text.endswith("data: [DONE]")
    assert '"error"' not in text
    assert not is_served(home)


def test_a_start_while_it_stops_waits_for_the_end_and_starts_another(
    environment: Mapping[str, str], home: Path
) -> None:
    said(environment, "start", "--port", "0")
    server = running(home)
    question = {"role": "user", "content": "Count from 1 to 150."}
    body = {"model": "demo-assistant", "messages": [question], "stream": True, "max_tokens": 1500}
    with httpx2.stream("POST", f"{server.address}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if '"content"' in line)
        os.kill(server.pid, signal.SIGTERM)
        while not status(read_settings(home=home))["draining"]:
            pass
        starting = begin(environment, "start", "--port", "0")
        assert "".join(lines).endswith("data: [DONE]")
    out, complaint = starting.communicate(timeout=60)
    assert starting.returncode == 0, complaint
    assert running(home).pid != server.pid
    assert f"Paceline is running at {running(home).address}" in out


def test_a_stop_is_over_although_another_server_comes_at_once(environment: Mapping[str, str], home: Path) -> None:
    said(environment, "start", "--port", "0")
    program = (
        "import contextlib, sys, time, pathlib; from app.machine.server_file import ServerRuns, lock_home\n"
        "while True:\n"
        "    with contextlib.suppress(ServerRuns), lock_home(pathlib.Path(sys.argv[1])): time.sleep(60); break"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(home)], env=environment) as next_one:
        assert said(environment, "stop").endswith("is stopped.")
        while lock_holder(home) != next_one.pid:
            pass
        assert "is stopped." in said(environment, "stop", "--force")


def test_a_server_that_hangs_is_told_and_ended_by_force(
    environment: Mapping[str, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANSWER_SECONDS", "KILL_SECONDS", "HANG_SECONDS"):
        monkeypatch.setattr(service, name, 0.3)
    said(environment, "start", "--port", "0")
    server, settings = running(home), read_settings(home=home)
    os.kill(server.pid, signal.SIGSTOP)
    assert "It does not answer: `paceline stop --force` ends it." in status_lines(status(settings))
    with pytest.raises(CommandError, match=f"process {server.pid} of Paceline does not answer"):
        start(settings, (), lambda _text: None)
    assert stop(settings, lambda _text: None, force=True) == server
    assert not is_served(home)


def test_a_server_that_never_listens_is_named_and_ended_by_force(
    environment: Mapping[str, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KILL_SECONDS", "HANG_SECONDS"):
        monkeypatch.setattr(service, name, 0.3)
    program = (
        "import sys, time, pathlib; from app.machine.server_file import lock_home\n"
        "with lock_home(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(home)]
    settings = read_settings(home=home)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as hanging:
        assert hanging.stdout is not None
        hanging.stdout.readline()
        assert status(settings)["starting"]
        with pytest.raises(
            CommandError, match=f"process {hanging.pid} of Paceline does not answer: `paceline stop --force`"
        ):
            start(settings, (), lambda _text: None)
        with pytest.raises(CommandError, match=f"process {hanging.pid} neither starts nor ends"):
            stop(settings, lambda _text: None)
        ended = stop(settings, lambda _text: None, force=True)
        assert ended is not None
        assert ended.pid == hanging.pid
    assert not is_served(home)


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(CommandError, match="does not support file locks: set PACELINE_HOME"):
        start(read_settings(home=tmp_path), (), lambda _text: None)


def test_after_a_stop_nothing_of_the_stores_journal_is_left(environment: Mapping[str, str], home: Path) -> None:
    said(environment, "start", "--port", "0")
    said(environment, "stop")
    assert [path.name for path in home.glob(f"{STORE}-*")] == []


def test_a_browser_that_comes_back_when_it_is_closed_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "closed"
    os.mkfifo(go_on)
    monkeypatch.setattr(service, "OPEN_SECONDS", 0.05)
    monkeypatch.setattr("webbrowser.open", lambda _address: bool(go_on.read_text()))
    assert service.open_in_browser("about:blank")
    go_on.write_text("closed")
    monkeypatch.setattr("webbrowser.open", lambda _address: False)
    monkeypatch.setattr(service, "OPEN_SECONDS", 30.0)
    assert not service.open_in_browser("about:blank")


def test_a_start_beside_a_server_that_does_not_come_up_starts_one(environment: Mapping[str, str], home: Path) -> None:
    with lock_home(home):
        starting = begin(environment, "start", "--port", "0")
        while not (home / START_LOCK).exists():
            pass
    assert "Paceline is running at" in starting.communicate(timeout=60)[0]
    assert is_served(home)


def test_ctrl_c_leaves_what_goes_on_and_says_so(
    environment: Mapping[str, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(_seconds: float) -> None:
        raise KeyboardInterrupt

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = read_settings(home=home)
    with monkeypatch.context() as pressed:
        pressed.setattr("app.command.service.time.sleep", press)
        with pytest.raises(CommandError, match="is still starting"):
            start(settings, ("--port=0",), lambda _text: None)
    output = said(environment, "start", "--port", "0")
    assert "Paceline is already running at" in output, "the start that was left is waited for, not repeated"
    with monkeypatch.context() as pressed:
        pressed.setattr("app.command.service.time.sleep", press)
        with pytest.raises(CommandError, match="is still stopping"):
            stop(settings, lambda _text: None)
    while is_served(home):
        pass


def test_a_restart_repeats_the_options_and_takes_new_ones(environment: Mapping[str, str], home: Path) -> None:
    said(environment, "start", "--port", "0", "--policy", "off")
    first = running(home)
    assert first.words == ("--port=0", "--policy=off")
    said(environment, "restart")
    second = running(home)
    assert second.words == first.words
    assert second.pid != first.pid
    report = json.loads(said(environment, "status", "--json"))
    assert (report["address"], report["pid"], report["models"]) == (second.address, second.pid, [])
    said(environment, "restart", "--port", "0")
    assert running(home).words == ("--port=0",)
    commands = said({**environment, "PACELINE_PORT": "1"}, "ps")
    assert "No model is loaded" in commands, "found by the state folder, whatever the port"


def test_a_start_that_fails_says_why_in_one_line(environment: Mapping[str, str]) -> None:
    assert said(environment, "start", "--host", "0.0.0.0", code=1).startswith("0.0.0.0: other machines reach")  # noqa: S104
    assert "No such option: --bogus" in said(environment, "start", "--bogus", code=2)
    assert "there is no log" in said(environment, "logs", code=1)


def test_the_state_of_a_newer_paceline_is_refused_with_the_way_back(environment: Mapping[str, str], home: Path) -> None:
    said(environment, "config", "set", "theme", "dark")
    path = home / STORE
    copy = back_up(path, "0999")  # as a newer Paceline does before it migrates
    script = (
        "UPDATE alembic_version SET version_num = '0999'; PRAGMA user_version = 999;"
        "UPDATE setting SET value = '\"light\"' WHERE name = 'theme'; CREATE TABLE dream (text);"
    )
    crash = f"import os, sqlite3; file = sqlite3.connect({str(path)!r}); file.executescript({script!r}); os._exit(0)"
    subprocess.run([sys.executable, "-c", crash], check=True)
    journal = path.with_name(f"{STORE}-wal")
    assert journal.stat().st_size > 0, "the newer one did not end in order"
    refused = said(environment, "start", "--port", "0", code=1)
    assert said(environment, "serve", "--port", "0", code=1) == f"paceline: {refused}"
    (line,) = refused.splitlines()
    assert line.startswith(f"{path} was written by a newer Paceline (it has revision 0999")
    update, go_back = re.findall("`(.*?)`", line)
    assert update == this_installation().update
    assert str(copy) in go_back
    assert not journal.exists(), "it would be taken for the copy's"
    with closing(sqlite3.connect(path)) as newer:
        newer.execute("SELECT * FROM setting").fetchall()
        assert "`paceline stop`" in said(environment, "keys", code=1), "nothing is moved from under a server"
    subprocess.run(go_back, shell=True, check=True)  # noqa: S602 - what a person would paste
    assert said(environment, "config", "get", "theme") == "dark"
    with closing(sqlite3.connect(path.with_name(f"{STORE}.newer"))) as kept:
        assert kept.execute("SELECT value FROM setting WHERE name = 'theme'").fetchall() == [('"light"',)]


def test_options_become_words_that_mean_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"host": None, "port": 9000, "model_dir": [Path("models"), Path("/other")], "draft": ["a=b", "c=off"]}
    folders = (f"--model-dir={tmp_path}/models", "--model-dir=/other")
    assert option_arguments(options) == ("--port=9000", *folders, "--draft=a=b", "--draft=c=off")


@pytest.mark.parametrize("name", [FILE_NAME, LOCK_NAME])
def test_a_pipe_in_the_place_of_what_a_server_says_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert (is_served(tmp_path), lock_holder(tmp_path), read_server(tmp_path)) == (False, 0, None)


def test_the_log_is_read_from_its_end_and_followed_into_its_next_file(tmp_path: Path) -> None:
    folder = tmp_path / LOG_FOLDER
    folder.mkdir()
    log = folder / LOG

    def line(number: int) -> str:
        record = {
            "time": "2026-01-01T00:00:00.000+00:00",
            "level": "info",
            "logger": "paceline",
            "text": f"line {number}",
        }
        return json.dumps(record) + "\n"

    log.write_text("".join(map(line, range(5000))), encoding="utf-8")
    assert [logged.rpartition(" ")[2] for logged in log_lines(tmp_path, 2)] == ["4998", "4999"]
    assert len(list(log_lines(tmp_path, 9000))) == 5000
    assert list(log_lines(tmp_path, 0)) == []
    assert readable(b"no line of ours") == "no line of ours"
    followed = log_lines(tmp_path, 1, follow=True)
    assert next(followed).endswith("line 4999")
    with log.open("a", encoding="utf-8") as file:
        file.write(line(1) + line(2)[:20])
    assert next(followed).endswith("line 1")
    with log.open("a", encoding="utf-8") as file:
        file.write(line(2)[20:])
    log.rename(folder / f"{LOG}.1")
    log.write_text(line(3), encoding="utf-8")
    assert [next(followed)[-1] for _ in range(2)] == ["2", "3"]
