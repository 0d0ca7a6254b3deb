"""Files that Paceline keeps: whatever they contain, they are read as the expected type or count as missing."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.download import MARKER
from app.core.errors import CommandError
from app.desktop import bundle, removal
from app.desktop.window import SIZE_FILE, WindowSize, read_size
from app.hub.partial_folder import read_marker
from app.i18n.catalogs import Catalogs
from app.machine.own_files import read_json_as
from app.machine.server_file import FILE_NAME, lock_home, read_server
from app.models.tokenizer_file import TokenizerCache, TokenizerFile
from app.settings import Settings

DAMAGED = {
    "no UTF-8": b'{"key": "\xff", "host": "\xdf"}',
    "deep": b'{"unknown": ' + b"[" * 100_000,
    "cut off": b'{"host": "127.0',
    "another type": b'["\xff"]',
    "huge": b'{"port": ' + b"9" * 5000,
    "nothing": b"",
}
"""File contents by kind of damage; msgspec raises exceptions of several types for them."""


def server(home: Path) -> Any:
    with lock_home(home):
        return read_server(home)


def record(folder: Path) -> Any:
    try:
        return bundle.read_record(folder)
    except CommandError:
        return None


READERS: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "window": (SIZE_FILE, lambda home: read_size(home / SIZE_FILE), WindowSize()),
    "apps": (removal.APPS_FILE, lambda home: removal.installed_parts(Settings(home=home)) and None, None),
    "marker": (MARKER, read_marker, None),
    "record": (bundle.RECORD, record, None),
    "tokenizers": (
        "tokenizers.json",
        lambda home: TokenizerCache(home / "tokenizers.json").cached_facts(TokenizerFile(home, (0, 0, 0, 0))),
        None,
    ),
    "languages": ("languages/xx.json", lambda home: Catalogs(home / "languages").words("xx").language, "en"),
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_beside_the_store_is_as_none(reader: str, damage: str, tmp_path: Path) -> None:
    name, read, nothing = READERS[reader]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(DAMAGED[damage])
    assert read(tmp_path) == nothing


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_server_whose_file_is_damaged_is_as_one_that_does_not_listen_yet(damage: str, tmp_path: Path) -> None:
    with lock_home(tmp_path):
        (tmp_path / FILE_NAME).write_bytes(DAMAGED[damage])
        assert read_server(tmp_path) is None


def test_a_pipe_in_the_place_of_a_kept_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SIZE_FILE)
    assert read_size(tmp_path / SIZE_FILE) == WindowSize()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_of_the_kind_or_nothing(content: bytes) -> None:
    path = Path(os.environ["TMPDIR"]) / "kept.json"
    path.write_bytes(content)
    kept = read_json_as(path, dict[str, int], 1000)
    assert kept is None or all(isinstance(value, int) for value in kept.values())
