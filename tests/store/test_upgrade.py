"""A store that Paceline wrote at the commit in its file name keeps everything when it is opened today."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.model_settings import ModelSettings
from app.store.accounts import Accounts
from app.store.conversations import Conversations
from app.store.rows import DownloadRows, RequestHistory, StoredMeasurements, StoredSettings
from app.store.store import FILE_NAME, Store

HOMES = Path(__file__).parent / "homes"
PASSWORD = "correct horse battery"
KEY = "pl-BQWifVgYtUyRMwSxfAoRSieWyZJaHe9NYtK3S_4FS5g"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    shutil.copy(HOMES / "c324348.sqlite3", tmp_path / FILE_NAME)
    store = Store(tmp_path / FILE_NAME)
    assert (
        store.start() == f"{FILE_NAME} was migrated to a new format; the old file is kept as {store.path}.before-0005."
    )
    return store


def test_settings_of_the_server_and_of_models_stay(store: Store) -> None:
    kept = StoredSettings(store)
    assert kept.settings() == {
        "theme": "dark",
        "allowed_hosts": ["studio.local"],
        "port": 9000,
        "drafts": {"demo-assistant": "demo-draft"},
    }
    assert kept.models() == {
        "demo-assistant": ModelSettings(temperature=0.25, alias="helper", methods=("ngram", "draft_model"))
    }


def test_account_and_keys_stay_and_the_password_is_hashed_anew(store: Store) -> None:
    accounts = Accounts(store)
    assert not accounts.is_locked_down
    assert [(key.name, key.scope) for key in accounts.keys.list()] == [("editor", "inference"), ("laptop", "admin")]
    key = accounts.keys.find(KEY)
    assert key is not None
    assert key.name == "editor"
    assert not accounts.is_password("another password")
    for _ in range(2):  # by scrypt, then by argon2
        assert accounts.is_password(PASSWORD)
    assert b"scrypt$" not in store.path.read_bytes()


def test_downloads_measurements_and_requests_stay(store: Store) -> None:
    (download,) = DownloadRows(store).all()
    assert (download.repository, download.state) == ("mlx-community/Qwen3-8B-4bit", "paused")
    assert (download.done_bytes, download.total_bytes, download.drafts_for) == (400, 1000, "big")
    (measurement,) = StoredMeasurements(store).of("demo-assistant")
    assert measurement.results["model"] == "demo-assistant"
    assert measurement.versions["mlx"] == "0.32.4"
    (request,) = RequestHistory(store).page(count=5)
    assert (request.model_id, request.outcome) == ("demo-assistant", "length")


def test_conversations_become_lines_of_turns(store: Store) -> None:
    conversations = Conversations(store)
    (heading,) = conversations.list()
    conversation, turns = conversations.find(heading.id) or (None, ())
    assert conversation is not None
    assert (conversation.title, conversation.options) == ("Counting", {"temperature": 0.5})
    assert [(turn.parent, turn.content) for turn in turns] == [("", "Count from 1 to 3."), ("m1", "1, 2, 3")]
    assert (turns[1].spans, turns[1].figures) == ([[0, 4, "ngram"]], {"seed": 4})


def test_the_command_line_reads_it_at_once(tmp_path: Path) -> None:
    shutil.copy(HOMES / "c324348.sqlite3", tmp_path / FILE_NAME)
    environment = {**os.environ, "PACELINE_HOME": str(tmp_path), "COLUMNS": "200"}
    command = [sys.executable, "-m", "app.cli", "ls"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "temperature 0.25" in output
