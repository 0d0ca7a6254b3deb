"""A full disk: changes that protect access are still written, into reserved space; others are refused in words.

Here SQLite itself reports the disk as full, because it may not let the file grow.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from argon2 import PasswordHasher
from sqlalchemy import event

from app.core.errors import StoreUnavailable
from app.store.accounts import Accounts
from app.store.database import RESERVE_BYTES
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store

PASSWORD = "correct horse battery"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "home" / FILE_NAME)
    yield store
    store.close()


@pytest.fixture
def accounts(store: Store) -> Accounts:
    """Return accounts with enough keys and sessions to fill some pages."""
    accounts = Accounts(store, hasher=PasswordHasher(1, 8, 1))
    accounts.set_up(PASSWORD)
    for number in range(20):
        accounts.keys.create(f"{number} {'x' * 70}", "admin")
    for number in range(10):
        accounts.sessions.begin(f"{number} {'x' * 200}")
    return accounts


def reserve_of(store: Store) -> Path:
    return store.path.with_name(f"{FILE_NAME}.reserve")


def let_nothing_grow(store: Store) -> None:
    with store.session() as session:
        pages = session.connection().exec_driver_sql("PRAGMA page_count").scalar()
        session.connection().exec_driver_sql(f"PRAGMA max_page_count = {pages}")


def test_room_is_kept_from_the_first_use_on_and_taken_once(store: Store, accounts: Accounts) -> None:
    assert accounts.has_account
    assert reserve_of(store).stat().st_size == RESERVE_BYTES
    assert reserve_of(store).stat().st_mode & 0o777 == 0o600
    assert len(set(reserve_of(store).read_bytes())) > 200, "no disk makes nothing of it"
    reserve_of(store).unlink()
    Store(store.path).start()
    assert reserve_of(store).stat().st_size == RESERVE_BYTES


def test_revoking_signing_in_and_out_and_a_new_password_have_the_reserve_and_take_less(
    store: Store, accounts: Accounts
) -> None:
    secret = accounts.sessions.begin("Firefox")
    journal = store.path.with_name(f"{FILE_NAME}-wal")
    seen: list[bool] = []
    with store.session() as session:
        event.listen(session.get_bind(), "commit", lambda _connection: seen.append(reserve_of(store).exists()))
    seen.clear()
    for vital in (
        lambda: accounts.keys.revoke(7),
        lambda: accounts.sessions.end(secret),
        lambda: accounts.sessions.begin("Safari"),
        lambda: accounts.set_password("staple staple staple"),
    ):
        with Store(store.path).read_session() as other:  # keeps the journal from being emptied
            other.connection().exec_driver_sql("SELECT 1 FROM setting")
            before = journal.stat().st_size
            vital()
            assert journal.stat().st_size - before < RESERVE_BYTES
        assert reserve_of(store).stat().st_size == RESERVE_BYTES
    assert seen
    assert not any(seen), "it is free while they write"


def test_a_full_store_refuses_in_words_without_a_path_and_lets_keys_be_revoked(
    store: Store, accounts: Accounts
) -> None:
    let_nothing_grow(store)
    with pytest.raises(StoreUnavailable) as raised:
        StoredSettings(store).change_settings({"default_model": "x" * 20_000}, source="test")
    assert raised.value.message == f"{FILE_NAME} cannot be written, because the disk is full: make room, and try again"
    assert str(store.path) in str(raised.value)
    assert accounts.keys.revoke(7)
    assert 7 not in {key.id for key in accounts.keys.list()}
    accounts.sessions.end_all()
    assert accounts.sessions.list() == []


def test_a_reserve_that_is_only_partly_there_is_made_whole(store: Store, accounts: Accounts) -> None:
    os.truncate(reserve_of(store), 5000)
    accounts.keys.revoke(1)
    assert reserve_of(store).stat().st_size == RESERVE_BYTES
