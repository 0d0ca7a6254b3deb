"""Stored values outlive the process and stay private, and problems with the file are reported."""

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.download import Download
from app.core.errors import StoreUnavailable
from app.model_settings import ModelSettings
from app.store import database
from app.store.database import check_owner, exclusive, fill_reserve
from app.store.rows import DownloadRows, StoredMeasurements, StoredSettings
from app.store.store import FILE_NAME, Store
from app.store.tables import RequestRow

CHOSEN = ModelSettings(drafts=("draft",), methods=("dflash", "ngram"), num_draft_tokens=7, policy="single")
PRAGMAS = {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 5000, "checkpoint_fullfsync": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / FILE_NAME


def kept(path: Path) -> StoredSettings:
    """Return the stored settings as a new process sees them."""
    return StoredSettings(Store(path))


def test_what_is_set_for_a_model_is_kept_between_starts(path: Path) -> None:
    kept(path).save_model("big", CHOSEN, source="a person")
    assert kept(path).models().get("big") == CHOSEN
    assert kept(path).models().get("other") is None


def test_a_process_that_never_lets_go_of_the_file_is_not_waited_for_without_end(path: Path) -> None:
    with exclusive(path):
        with pytest.raises(StoreUnavailable, match="another Paceline process"), exclusive(path, wait_seconds=0.0):
            pass
        assert kept(path).settings() == {}, "nothing is there to be opened"
    kept(path).change_settings({"theme": "dark"}, source="a person")


def test_it_takes_the_place_of_what_was_set_before_and_can_be_forgotten(path: Path) -> None:
    kept(path).save_model("big", CHOSEN, source="a person")
    kept(path).save_model("big", ModelSettings(policy="off"), source="paceline bench")
    assert kept(path).models().get("big") == ModelSettings(policy="off")
    kept(path).save_model("big", ModelSettings(), source="a person")
    kept(path).save_model("nobody", ModelSettings(), source="a person")
    assert kept(path).models() == {}


def test_unset_and_an_empty_list_are_two_things(path: Path) -> None:
    kept(path).save_model("empty", ModelSettings(drafts=()), source="test")
    settings = kept(path).models().get("empty")
    assert settings is not None
    assert (settings.drafts, settings.methods) == ((), None)


def test_settings_of_the_server_are_kept_all_or_none(path: Path) -> None:
    kept(path).change_settings({"port": 9000, "allowed_hosts": ["studio.local"], "theme": "dark"}, source="a person")
    kept(path).change_settings({"theme": None, "port": 9001}, source="a person")
    assert kept(path).settings() == {"port": 9001, "allowed_hosts": ["studio.local"]}
    with pytest.raises(StoreUnavailable):
        kept(path).change_settings({"port": 1, "theme": object()}, source="a person")
    assert kept(path).settings() == {"port": 9001, "allowed_hosts": ["studio.local"]}


@pytest.mark.parametrize(("name", "value"), [("horoscope", 1), ("top_k", -5), ("methods", '"telepathy"')])
def test_what_another_version_set_and_this_one_does_not_know_is_left_out(path: Path, name: str, value: object) -> None:
    kept(path).save_model("big", CHOSEN, source="test")
    with Store(path).session() as session:
        connection = session.connection()
        connection.exec_driver_sql(f"""UPDATE model_settings SET "values" = json_set("values", '$.{name}', {value})""")  # noqa: S608
    assert kept(path).models().get("big") == CHOSEN.model_copy(update={name: None} if name in CHOSEN.given() else {})


def test_reading_makes_no_file(path: Path) -> None:
    store = Store(path)
    assert (kept(path).models(), kept(path).settings(), kept(path).has_keys()) == ({}, {}, False)
    assert (StoredMeasurements(store).of("big"), store.locked_down) == ([], False)
    store.check()
    assert not path.parent.exists()


def test_the_file_and_its_folder_are_for_the_owner_only(path: Path) -> None:
    kept(path).save_model("big", CHOSEN, source="test")
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.parent.iterdir()}
    assert modes[FILE_NAME] == 0o600
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_database_writes_ahead_and_holds_foreign_keys(path: Path) -> None:
    with Store(path).session() as session:
        connection = session.connection()
        assert {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in PRAGMAS} == PRAGMAS


def test_what_is_read_never_waits_for_who_writes_and_is_of_one_moment(path: Path) -> None:
    store = Store(path)
    kept(path).change_settings({"port": 1}, source="test")
    with store.read_session() as reading:
        assert reading.get(RequestRow, "a") is None
        with store.session() as writing:
            writing.add(RequestRow(id="a", figures={}))
        assert reading.get(RequestRow, "a") is None
    with store.read_session() as reading:
        assert reading.get(RequestRow, "a") is not None


def test_a_store_that_is_busy_for_a_moment_is_not_examined_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MILLISECONDS", 1)
    store = Store(path)
    store.start()
    monkeypatch.setattr(database, "examine", lambda path: pytest.fail(f"{path} is read in whole"))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="database is locked"):
            StoredSettings(store).change_settings({"theme": "dark"}, source="a person")
        assert StoredSettings(store).settings() == {}
    StoredSettings(store).change_settings({"theme": "dark"}, source="a person")


def test_measurements_are_listed_from_the_latest(path: Path) -> None:
    times = iter([1.0, 2.0, 3.0])
    kept = StoredMeasurements(Store(path), lambda: next(times))
    for rate in (10, 20):
        kept.save("big", versions={"mlx": "1"}, machine={"cores": 2}, results={"rate": rate})
    kept.save("other", versions={}, machine={}, results={})
    rows = kept.of("big")
    assert [(row.created_at, row.results) for row in rows] == [(2.0, {"rate": 20}), (1.0, {"rate": 10})]
    assert (rows[0].versions, rows[0].machine) == ({"mlx": "1"}, {"cores": 2})


@pytest.mark.parametrize(
    "use",
    [
        lambda path: kept(path).models().get("big"),
        lambda path: kept(path).save_model("big", CHOSEN, source="test"),
        lambda path: StoredMeasurements(Store(path)).of("big"),
        lambda path: Store(path).check(),
    ],
)
def test_a_damaged_file_is_told_with_what_to_do_and_left_alone(path: Path, use: Callable[[Path], object]) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreUnavailable, match="`paceline serve` sets it aside") as raised:
        use(path)
    assert str(path) in str(raised.value), "whoever owns the computer is told where it is"
    assert str(path.parent) not in raised.value.message, "and nobody else"
    assert "\n" not in raised.value.message
    assert path.read_bytes() == b"no database at all" * 100


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file in the place of the folder")
    with pytest.raises(StoreUnavailable, match="check that it is yours"):
        kept(tmp_path / "home" / FILE_NAME).save_model("big", CHOSEN, source="test")


def test_odd_letters_in_the_path_are_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "odd ?#%20 name" / FILE_NAME
    kept(path).save_model("big", CHOSEN, source="test")
    assert path.is_file()
    assert kept(path).models().get("big") == CHOSEN


@pytest.mark.parametrize("kind", ["a pipe", "a link"])
def test_what_is_no_file_in_the_place_of_the_reserve_is_neither_waited_for_nor_written(path: Path, kind: str) -> None:
    reserve, other = path.with_name(f"{FILE_NAME}.reserve"), path.with_name("thesis.txt")
    path.parent.mkdir(exist_ok=True)
    other.write_text("mine")
    if kind == "a pipe":
        os.mkfifo(reserve)
    else:
        reserve.symlink_to(other)
    fill_reserve(path)
    StoredSettings(Store(path)).change_settings({"theme": "dark"}, source="a person")
    assert other.read_text() == "mine"
    assert StoredSettings(Store(path)).settings() == {"theme": "dark"}


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 1 << 64])
def test_a_number_that_no_database_holds_is_refused_and_the_store_goes_on(path: Path, number: int) -> None:
    downloads = DownloadRows(Store(path))
    kept = downloads.add(Download(repository="a/model"))
    with pytest.raises(StoreUnavailable):
        downloads.save([replace(kept, total_bytes=number)])
    downloads.save([replace(kept, total_bytes=5)])
    assert [download.total_bytes for download in downloads.all()] == [5]


def test_two_stores_share_one_file(path: Path) -> None:
    first, second = Store(path), Store(path)
    StoredSettings(first).save_model("big", CHOSEN, source="test")
    StoredSettings(second).save_model("small", ModelSettings(policy="off"), source="test")
    first.close()
    assert StoredSettings(first).models()["small"] == ModelSettings(policy="off")


def test_a_folder_that_others_may_write_into_becomes_private_and_that_is_said(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    assert "from now on only you can" in Store(path).start()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert Store(path).start() == ""


def test_a_folder_of_another_user_is_refused_with_what_to_do(path: Path) -> None:
    path.parent.mkdir()
    for advice in ("set PACELINE_HOME to a folder of your own", f"run `sudo chown -R $(id -un) {path.parent}` if it"):
        with pytest.raises(StoreUnavailable) as raised:
            check_owner(path, user=os.geteuid() + 1)
        assert f"{path.parent} belongs to another user: {advice}" in str(raised.value)
        assert str(path.parent) not in raised.value.message
        path.touch()  # a folder in which Paceline was run by sudo


def test_a_folder_that_everybody_shares_is_refused_and_left_as_it_is(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o1777)
    for use in (Store(path).start, Store(path).check):
        with pytest.raises(StoreUnavailable, match="is shared by everybody") as raised:
            use()
        assert f"{path.parent} is shared by everybody: set PACELINE_HOME to a folder of your own" in str(raised.value)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o1777
    assert list(path.parent.iterdir()) == []
