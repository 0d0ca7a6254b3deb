"""A damaged database is either intact after all or set aside; it is never used as an empty one that needs no key.

In these tests a password, a key, a revoked key, and the setting `require_key` protect the server.
"""

import random
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from argon2 import PasswordHasher

from app.core.errors import StoreUnavailable
from app.model_settings import ModelSettings
from app.store.accounts import Accounts
from app.store.rows import StoredMeasurements, StoredSettings
from app.store.store import FILE_NAME, Store
from app.store.tables import RequestRow

FAST = PasswordHasher(1, 8, 1)
SETTINGS = {"require_key": True, "port": 9000, "allowed_hosts": ["studio.local"]}
MODELS = {"big": ModelSettings(alias="b", temperature=0.5)}
PAGE_BYTES = 4096

Protection = tuple[dict[str, object], dict[str, ModelSettings], bool, list[str]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a closed file with everything in it."""
    path = tmp_path_factory.mktemp("sound") / FILE_NAME
    store = Store(path)
    fill(store)
    store.close()
    return path


def fill(store: Store) -> None:
    accounts, kept = Accounts(store, hasher=FAST), StoredSettings(store)
    accounts.set_up("correct horse battery")
    accounts.keys.create("laptop", "inference")
    revoked, _ = accounts.keys.create("lost", "admin")
    accounts.keys.revoke(revoked.id)
    kept.change_settings(SETTINGS, source="test")
    kept.save_model("big", MODELS["big"], source="test")
    for number in range(60):
        StoredMeasurements(store).save(
            "big", versions={"mlx": "1"}, machine={}, results={"rate": number, "text": "x" * 300}
        )
    with store.session() as session:
        session.add_all([RequestRow(id=str(number), figures={"tokens": number}) for number in range(60)])


def protection(store: Store) -> Protection:
    """Return the values that must not change unnoticed."""
    kept, accounts = StoredSettings(store), Accounts(store, hasher=FAST)
    return (
        kept.settings(),
        kept.models(),
        accounts.is_password("correct horse battery"),
        [key.name for key in accounts.keys.list()],
    )


INTACT: Protection = (SETTINGS, MODELS, True, ["laptop"])


def check_start(folder: Path, how: str) -> bool:
    """Start on the file in `folder`; return whether it was set aside. The store must be intact or locked down."""
    path = folder / FILE_NAME
    before = path.read_bytes() if path.exists() else b""
    store = Store(path)
    said = store.start()
    asides = list(folder.glob(f"{FILE_NAME}.damaged-*"))
    if not store.locked_down:
        assert protection(store) == INTACT, how
        assert (said, asides) == ("", []), how
        store.close()
        return False
    assert "is set aside as" in said, how
    assert "locked down" in said, how
    assert before in {aside.read_bytes() for aside in asides if not aside.name.endswith(("-wal", "-shm"))} or not before
    assert StoredSettings(store).settings() == {}, how
    store.close()
    assert "damaged" not in Store(path).start(), "the new file is sound"
    assert Store(path).locked_down, "and stays locked down until an account is set up"
    return True


def damaged_copy(sound: Path, folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(content)


def test_a_sound_file_is_just_opened(sound: Path, tmp_path: Path) -> None:
    shutil.copy(sound, tmp_path / FILE_NAME)
    assert not check_start(tmp_path, "untouched")


def test_a_row_that_belongs_to_none_is_damage(sound: Path, tmp_path: Path) -> None:
    shutil.copy(sound, tmp_path / FILE_NAME)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        file.execute("PRAGMA foreign_keys = OFF")
        file.execute(
            "INSERT INTO message (id, conversation_id, turn, parent, role, content, reasoning, created_at)"
            " VALUES (1, 7, 'q1', '', 'user', 'x', '', 0)"
        )
        file.commit()
    assert check_start(tmp_path, "a turn of no conversation")


def test_a_file_that_is_cut_off_anywhere_is_set_aside(sound: Path, tmp_path: Path) -> None:
    size = sound.stat().st_size
    pages = [count * PAGE_BYTES for count in range(0, size // PAGE_BYTES, 4)]
    for length in sorted({*pages, 1, 15, 16, 99, 100, 101, PAGE_BYTES - 1, PAGE_BYTES + 1, size - PAGE_BYTES}):
        folder = tmp_path / str(length)
        damaged_copy(sound, folder, sound.read_bytes()[:length])
        assert check_start(folder, f"{length} of {size} bytes")
    damaged_copy(sound, tmp_path / "last", sound.read_bytes()[:-1])
    check_start(tmp_path / "last", "a last byte that may be unused: intact or set aside")


@pytest.mark.parametrize("content", [b"", b"\x00" * 8192, b"no database at all" * 500, b"SQLite format 3\x00"])
def test_what_is_no_database_is_set_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert check_start(tmp_path, repr(content[:20]))


def test_a_database_of_another_program_is_set_aside(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        file.execute("CREATE TABLE bookmarks (url TEXT)")
    assert check_start(tmp_path, "another program")


def test_a_journal_without_its_database_is_damage(sound: Path, tmp_path: Path) -> None:
    (tmp_path / f"{FILE_NAME}-wal").write_bytes(b"\x37\x7f\x06\x82" + b"\x00" * 5000)
    assert check_start(tmp_path, "journal only")
    assert len(list(tmp_path.glob(f"{FILE_NAME}.damaged-*-wal"))) == 1


def test_a_journal_with_a_flipped_byte_loses_nothing_that_protects(tmp_path: Path) -> None:
    """SQLite silently drops the end of a damaged journal, so protecting values are never in the journal alone."""
    live = Store(tmp_path / "live" / FILE_NAME)
    fill(live)
    wal = live.path.with_name(f"{FILE_NAME}-wal")
    assert wal.stat().st_size > 0, "the requests are still in the journal"
    chance = random.Random(5)
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        shutil.copy(live.path, folder / FILE_NAME)
        journal = bytearray(wal.read_bytes())
        journal[chance.randrange(len(journal))] ^= 0xFF
        (folder / wal.name).write_bytes(journal)
        assert not check_start(folder, f"journal {number}")
    live.close()


def test_the_new_file_is_private_and_the_old_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"damaged" * 1000)
    for _ in range(2):
        store = Store(tmp_path / FILE_NAME, lambda: 0.0)
        store.start()
        store.close()
        store.path.write_bytes(b"damaged" * 1000)
    asides = sorted(tmp_path.glob(f"{FILE_NAME}.damaged-*"))
    assert len(asides) == 2, "two in one second get two names"
    assert {aside.read_bytes() for aside in asides} == {b"damaged" * 1000}
    Store(tmp_path / FILE_NAME).start()
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


def test_setting_up_an_account_opens_the_server_again_and_everybody_sees_it(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"damaged" * 1000)
    store, other = Store(tmp_path / FILE_NAME), Store(tmp_path / FILE_NAME)
    store.start()
    assert store.locked_down
    assert other.locked_down
    assert not Accounts(store, hasher=FAST).has_account
    assert Accounts(other, hasher=FAST).set_up("correct horse battery")
    assert not store.locked_down
    assert Store(tmp_path / FILE_NAME).start() == ""


def test_damage_while_the_server_runs_is_an_error_and_not_an_empty_store(sound: Path, tmp_path: Path) -> None:
    shutil.copy(sound, tmp_path / FILE_NAME)
    store = Store(tmp_path / FILE_NAME)
    store.start()
    store.close()
    (tmp_path / FILE_NAME).write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="it is empty"):
        StoredSettings(store).settings()
    with pytest.raises(StoreUnavailable, match="it is empty"):
        _ = store.locked_down
