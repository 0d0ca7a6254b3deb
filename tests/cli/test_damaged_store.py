"""The command line, whatever is in the place of its store: no traceback, nothing lost, and advice on what to do.

Every command that opens the store runs in every state; a real `serve` sets a damaged one aside and starts locked down.
"""

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from argon2 import PasswordHasher
from click.testing import Result
from typer.testing import CliRunner

from app.cli import application
from app.machine.installation import this_installation
from app.store.accounts import Accounts
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from tests.shares import one_in

PAGE_BYTES = 4096
COMMANDS = (
    ("config", "list"),
    ("config", "set", "theme", "dark"),
    ("keys", "list"),
    ("keys", "create", "laptop"),
    ("password",),
    ("doctor",),
    ("bench", "demo-assistant"),
    ("pull", "paceline-test/tiny"),
)
GLANCING = (("ls",), ("ps",), ("load", "demo-assistant"), ("chat", "--once", "hello"))
"""Commands that only read a few settings: they go on where the damaged store still yields these."""
GOES_ON = ("no /", "Model ")
WAY_BACK = f"update this one with `{this_installation().update}`, or begin anew with `mv "
State = Callable[[Path], None]


def written(content: Callable[[bytes], bytes]) -> State:
    return lambda path: path.write_bytes(content(path.read_bytes())) and None


def flipped(offset: int) -> State:
    return written(lambda sound: sound[:offset] + bytes([sound[offset] ^ 0xFF]) + sound[offset + 1 :])


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "mine.txt").write_text("precious")


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("unmounted") / FILE_NAME)


def link_to_text(path: Path) -> None:
    path.write_text("precious" * 100)
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def journal_alone(path: Path) -> None:
    path.unlink()
    path.with_name(f"{FILE_NAME}-wal").write_bytes(b"\x37\x7f\x06\x82" + bytes(5000))


def folder_for_a_journal(path: Path) -> None:
    path.with_name(f"{FILE_NAME}-wal").mkdir()


def another_program(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE bookmarks (url TEXT)")


def value_of(table: str, column: str, value: object) -> State:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as file:
            file.execute(f"UPDATE {table} SET {column} = ?", (value,))  # noqa: S608
            file.commit()

    return change


def older(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as file:
        file.executescript(
            "CREATE TABLE model_choice (model_id, drafts, methods, num_draft_tokens, policy, acceptance,"
            " prompt_lookup_min, prompt_lookup_max, source, updated_at);"
            "CREATE TABLE benchmark (id INTEGER PRIMARY KEY, model_id, created_at, versions, machine, results);"
        )


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.executescript("UPDATE alembic_version SET version_num = '0999'; PRAGMA user_version = 999")


DAMAGED: Mapping[str, State] = {
    "empty": written(lambda _sound: b""),
    "one byte": written(lambda sound: sound[:1]),
    "cut in the header": written(lambda sound: sound[:99]),
    "cut after a page": written(lambda sound: sound[:PAGE_BYTES]),
    "cut in a page": written(lambda sound: sound[: 3 * PAGE_BYTES + 700]),
    "header flipped": flipped(3),
    "page size flipped": flipped(16),
    "page flipped": flipped(PAGE_BYTES * 2),
    "zeroed": written(lambda sound: bytes(len(sound))),
    "end zeroed": written(lambda sound: sound[: len(sound) // 2] + bytes(len(sound) - len(sound) // 2)),
    "text": written(lambda _sound: b"dear diary, " * 500),
    "folder": folder,
    "link to nothing": link_to_nothing,
    "link to text": link_to_text,
    "pipe": pipe,
    "journal alone": journal_alone,
    "folder for a journal": folder_for_a_journal,
    "another program": another_program,
    "value of a setting": value_of("setting", "value", "trux"),
    "schema": written(lambda sound: sound.replace(b"CREATE TABLE api_key", b"CREATE TABL\xdf api_key")),
    "text of a key": value_of("api_key", "name", b"laptop\xff"),
}
SOUND: Mapping[str, State] = {
    "older": older,
    "untouched": lambda _path: None,
    "gone": Path.unlink,
    "not readable": lambda path: path.chmod(0),
    "readable by all": lambda path: path.chmod(0o666),
    "journal damaged": lambda path: path.with_name(f"{FILE_NAME}-wal").write_bytes(os.urandom(5000)) and None,
    "journal left over": lambda path: path.with_name(f"{FILE_NAME}-wal").write_bytes(b"") or None,
    "index of the journal damaged": lambda path: path.with_name(f"{FILE_NAME}-shm").write_bytes(bytes(99)) and None,
}


@pytest.fixture
def path(environment: Mapping[str, str]) -> Path:
    """Path of a closed store with an account, a revoked key and a setting."""
    path = Path(environment["PACELINE_HOME"]) / FILE_NAME
    store = Store(path)
    accounts = Accounts(store, hasher=PasswordHasher(1, 8, 1))
    accounts.set_up("correct horse battery")
    accounts.keys.revoke(accounts.keys.create("lost", "admin")[0].id)
    StoredSettings(store).change_settings({"require_key": True}, source="test")
    store.close()
    return path


def run(environment: Mapping[str, str], command: tuple[str, ...]) -> Result:
    return CliRunner().invoke(application, list(command), input="correct horse battery\n", env=dict(environment))


def entries(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder with their content, without SQLite's shared memory and our locks."""
    kept = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.endswith(("-shm", ".lock")))
    return {str(file.relative_to(folder)): file.read_bytes() for file in kept}


@pytest.mark.parametrize("state", one_in(3, [*DAMAGED]))
def test_each_command_says_what_to_do_and_leaves_a_damaged_store_alone(
    state: str, path: Path, environment: Mapping[str, str]
) -> None:
    DAMAGED[state](path)
    before = entries(path.parent)
    for command in COMMANDS:
        result = run(environment, command)
        assert isinstance(result.exception, SystemExit), (command, result.exc_info)
        assert result.exit_code == 1, command
        assert "serve` sets it aside" in re.sub(r"\s+", " ", result.output), (command, result.output)
    for command in GLANCING:
        said = re.sub(r"\s+", " ", run(environment, command).output)
        assert "serve` sets it aside" in said or said.startswith(GOES_ON), (command, said)
    for command in GLANCING:
        result = run(environment, command)
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exc_info)
    after = entries(path.parent)
    assert {name: after.get(name) for name in before} == before


def test_each_command_leaves_the_store_of_a_newer_paceline_alone(path: Path, environment: Mapping[str, str]) -> None:
    newer(path)
    before = path.read_bytes()
    for command in (*COMMANDS, ("serve",)):
        result = run(environment, command)
        assert result.exit_code == 1, command
        assert WAY_BACK in re.sub(r"\s+", " ", result.output), command
    for command in GLANCING:
        said = re.sub(r"\s+", " ", run(environment, command).output)
        assert WAY_BACK in said or said.startswith(GOES_ON), (command, said)
    assert path.read_bytes() == before


@pytest.mark.parametrize("state", SOUND)
def test_each_command_goes_on_with_a_store_that_is_sound(
    state: str, path: Path, environment: Mapping[str, str]
) -> None:
    SOUND[state](path)
    assert run(environment, ("keys", "create", "laptop")).exit_code == 0
    assert run(environment, ("config", "set", "theme", "dark")).exit_code == 0
    assert run(environment, ("ls",)).exit_code == 0
    assert "laptop" in run(environment, ("keys", "list")).stdout
    assert Store(path).start() == ""
    assert path.stat().st_mode & 0o777 == 0o600
    assert Accounts(Store(path)).has_account == (state not in {"gone", "older"})


@pytest.mark.parametrize("state", one_in(9, [*DAMAGED]))
def test_serve_starts_locked_down_with_the_damaged_store_aside(
    state: str, path: Path, environment: Mapping[str, str]
) -> None:
    DAMAGED[state](path)
    before = entries(path.parent)
    command = [sys.executable, "-m", "app.cli", "serve", "--port", "0"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")} | dict(environment)
    with subprocess.Popen(
        command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        matches = (re.search(r"http://127\.0\.0\.1:\d+/v1", line) for line in process.stdout)
        address = next((match[0] for match in matches if match), "")
        assert httpx2.get(f"{address}/models", trust_env=False, timeout=60).status_code == 401
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "is set aside as" in output
    assert "locked down" in output
    assert "Traceback" not in output
    after = entries(path.parent)
    aside = {re.sub(r"\.damaged-\d+-\d+", "", name): content for name, content in after.items() if "damaged-" in name}
    kept = {name: content for name, content in before.items() if name.startswith(FILE_NAME) and "reserve" not in name}
    assert {name: {**after, **aside}.get(name) for name in kept} == kept, "nothing is lost"
    assert [file for file in path.parent.iterdir() if "damaged-" in file.name]
