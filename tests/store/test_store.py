"""Choices and measurements outlive the process, stay private, and a damaged file is told."""

import sqlite3
import stat
from pathlib import Path

import pytest

from app.core.choices import ModelChoice
from app.core.errors import StoreUnavailable
from app.store.store import FILE_NAME, Store

CHOICE = ModelChoice(drafts=("draft",), methods=("dflash", "ngram"), num_draft_tokens=7, policy="single")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / FILE_NAME


def test_a_choice_is_kept_between_starts(path: Path) -> None:
    Store(path).save_choice("big", CHOICE, source="a person")
    assert Store(path).choice("big") == CHOICE
    assert Store(path).choice("other") is None


def test_a_choice_takes_the_place_of_an_earlier_one_and_can_be_forgotten(path: Path) -> None:
    store = Store(path)
    store.save_choice("big", CHOICE, source="a person")
    store.save_choice("big", ModelChoice(policy="off"), source="paceline bench")
    assert store.choice("big") == ModelChoice(policy="off")
    store.forget_choice("big")
    store.forget_choice("nobody")
    assert store.choice("big") is None


def test_none_and_an_empty_list_are_two_things(path: Path) -> None:
    store = Store(path)
    store.save_choice("none", ModelChoice(drafts=None), source="test")
    store.save_choice("empty", ModelChoice(drafts=()), source="test")
    assert store.choice("none") == ModelChoice(drafts=None)
    assert store.choice("empty") == ModelChoice(drafts=())


def test_reading_makes_no_file(path: Path) -> None:
    store = Store(path)
    assert store.choice("big") is None
    assert store.benchmarks("big") == []
    store.forget_choice("big")
    assert not path.parent.exists()


def test_the_file_and_its_folder_are_for_the_owner_only(path: Path) -> None:
    Store(path).save_choice("big", CHOICE, source="test")
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.parent.iterdir()}
    assert modes[FILE_NAME] == 0o600
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_database_writes_ahead_and_holds_foreign_keys(path: Path) -> None:
    store = Store(path)
    store.save_choice("big", CHOICE, source="test")
    with store.session() as session:
        connection = session.connection()
        values = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in PRAGMAS}
    assert values == PRAGMAS


PRAGMAS = {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 5000}


def test_measurements_are_listed_from_the_latest(path: Path) -> None:
    times = iter([1.0, 2.0, 3.0])
    store = Store(path, lambda: next(times))
    for rate in (10, 20):
        store.save_benchmark("big", versions={"mlx": "1"}, machine={"cores": 2}, results={"rate": rate})
    store.save_benchmark("other", versions={}, machine={}, results={})
    found = store.benchmarks("big")
    assert [(row.created_at, row.results) for row in found] == [(2.0, {"rate": 20}), (1.0, {"rate": 10})]
    assert (found[0].versions, found[0].machine) == ({"mlx": "1"}, {"cores": 2})


def test_a_damaged_file_is_named_with_what_to_do(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database at all" * 100)
    for use in (
        lambda store: store.choice("big"),
        lambda store: store.save_choice("big", CHOICE, source="test"),
        lambda store: store.benchmarks("big"),
    ):
        with pytest.raises(StoreUnavailable, match="move it away") as told:
            use(Store(path))
        assert str(path) in told.value.message
        assert "\n" not in told.value.message


def test_a_damaged_value_is_told_like_a_damaged_file(path: Path) -> None:
    Store(path).save_choice("big", CHOICE, source="test")
    with sqlite3.connect(path) as connection:
        connection.execute('UPDATE model_settings SET "values" = \'{"methods": ["dflash\'')
    with pytest.raises(StoreUnavailable, match="move it away"):
        Store(path).choice("big")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file in the place of the folder")
    with pytest.raises(StoreUnavailable, match="check that it is yours"):
        Store(tmp_path / "home" / FILE_NAME).save_choice("big", CHOICE, source="test")


def test_odd_letters_in_the_path_are_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "odd ?#%20 name" / FILE_NAME
    Store(path).save_choice("big", CHOICE, source="test")
    assert path.is_file()
    assert Store(path).choice("big") == CHOICE


def test_two_stores_share_one_file(path: Path) -> None:
    first, second = Store(path), Store(path)
    first.save_choice("big", CHOICE, source="test")
    second.save_choice("small", ModelChoice(policy="off"), source="test")
    first.close()
    assert first.choice("small") == ModelChoice(policy="off")
