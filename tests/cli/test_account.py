"""`paceline password` and `paceline keys`: they change the store directly and show no secret but a new key, once."""

import json
import os
import pty
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from sqlmodel import Session
from typer.testing import CliRunner, Result

from app.cli import application
from app.store.accounts import Accounts
from app.store.rows import FIRST_STEPS, FirstRun
from app.store.store import FILE_NAME, Store

PASSWORD = "correct horse battery"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def run(home: Path, *words: str, typed: str = "") -> Result:
    return CliRunner().invoke(application, list(words), env={"PACELINE_HOME": str(home), "COLUMNS": "160"}, input=typed)


def accounts(home: Path) -> Accounts:
    return Accounts(Store(home / FILE_NAME))


def test_a_password_is_set_from_a_pipe_and_every_browser_signed_out(home: Path) -> None:
    kept = accounts(home)
    secret = kept.sessions.begin("Firefox")
    result = run(home, "password", typed=f"{PASSWORD}\n")
    assert result.exit_code == 0
    assert PASSWORD not in result.output
    assert kept.is_password(PASSWORD)
    assert not kept.sessions.is_open(secret)
    assert run(home, "password", typed="another password\n").exit_code == 0
    assert not kept.is_password(PASSWORD)


def test_with_the_first_password_the_first_steps_are_offered_once(home: Path) -> None:
    first_run = FirstRun(Store(home / FILE_NAME))
    assert run(home, "password", typed=f"{PASSWORD}\n").exit_code == 0
    assert first_run.remaining() == list(FIRST_STEPS)
    first_run.finish(*FIRST_STEPS)
    assert run(home, "password", typed="another password\n").exit_code == 0
    assert first_run.remaining() == []


def test_two_first_steps_that_end_at_once_are_both_done(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = Store(home / FILE_NAME), FirstRun(Store(home / FILE_NAME))
    other.begin()
    first, second, *later = FIRST_STEPS
    begin_writing = store.session

    def after_the_other(*, vital: bool = False) -> AbstractContextManager[Session]:
        other.finish(second)
        return begin_writing(vital=vital)

    monkeypatch.setattr(store, "session", after_the_other)
    FirstRun(store).finish(first)
    assert other.remaining() == later


def test_a_bad_password_changes_nothing_and_says_why(home: Path) -> None:
    for typed in ("", "short\n", "password\n"):
        result = run(home, "password", typed=typed)
        assert result.exit_code == 1
        assert "password" in result.stderr
    assert not accounts(home).has_account


@pytest.mark.parametrize(("again", "code"), [(PASSWORD, 0), ("something else", 1)])
def test_on_a_terminal_it_is_typed_twice_and_never_shown(home: Path, again: str, code: int) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PACELINE_HOME": str(home)}
    command = [sys.executable, "-m", "app.cli", "password"]
    with Popen(
        command, stdin=theirs, stdout=PIPE, stderr=PIPE, env=environment, start_new_session=True, text=True
    ) as process:
        assert process.stderr is not None
        shown = ""
        for line in (PASSWORD, again):
            while not shown.endswith(": "):
                shown += process.stderr.read(1)
            shown += "\n"
            os.write(ours, f"{line}\n".encode())
        said, problem = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == code
    assert PASSWORD not in shown + said + problem
    assert accounts(home).has_account == (code == 0)


def test_a_key_is_printed_once_and_works_until_it_is_revoked(home: Path) -> None:
    made = run(home, "keys", "create", "my laptop", "--scope", "admin")
    text = made.stdout.strip()
    assert made.exit_code == 0
    key = accounts(home).keys.find(text)
    assert key is not None
    assert (key.name, key.scope) == ("my laptop", "admin")
    listed = run(home, "keys")
    assert "my laptop" in listed.output
    assert text not in listed.output
    assert text not in run(home, "keys", "list", "--json").output
    assert json.loads(run(home, "keys", "--json").output)[0]["name"] == "my laptop"
    assert run(home, "keys", "revoke", "my laptop").exit_code == 0
    assert accounts(home).keys.find(text) is None
    assert "No API keys" in run(home, "keys").output


def test_a_key_that_is_not_one_is_not_revoked(home: Path) -> None:
    for name in ("2", "twin"):
        assert run(home, "keys", "create", name).exit_code == 0
    for wrong in ("nothing", "2", "99", ""):
        result = run(home, "keys", "revoke", wrong)
        assert result.exit_code == 1
        assert "paceline keys" in result.stderr
    assert run(home, "keys", "revoke", "1").exit_code == 0
    assert [key.id for key in accounts(home).keys.list()] == [2]


def test_a_second_key_of_one_name_is_refused(home: Path) -> None:
    assert run(home, "keys", "create", "editor").exit_code == 0
    result = run(home, "keys", "create", " editor ")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "There is a key called editor already" in result.stderr
    assert run(home, "keys", "revoke", "editor").exit_code == 0
    assert run(home, "keys", "create", "editor").exit_code == 0, "the name of a revoked key is free"


def test_a_key_needs_a_name(home: Path) -> None:
    result = run(home, "keys", "create")
    assert result.exit_code == 1
    assert "name" in result.stderr
    assert run(home, "keys", "borrow").exit_code == 2
