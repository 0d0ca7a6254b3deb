"""With any bytes in its store the server starts, requires keys, sets an unusable file aside, and serves every page."""

import asyncio
import json
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import pytest
from argon2 import PasswordHasher
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.download import Download
from app.core.errors import StoreUnavailable
from app.main import create_app, open_store
from app.model_settings import ModelSettings
from app.settings import Settings
from app.store.accounts import Accounts
from app.store.conversations import ConversationHeader, Conversations
from app.store.rows import DownloadRows, FirstRun, StoredMeasurements, StoredSettings
from app.store.store import FILE_NAME, Store
from app.store.tables import MessageRow, RequestRow, SQLModel
from tests.api.fakes import MODELS, FakeCatalog, FakeWorker
from tests.benchmark.sweeps import swept

EXAMPLES = [10, pytest.param(400, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
HOMES = Path(__file__).parent / "homes"
PAGES = (
    "/admin",
    "/admin/settings",
    "/admin/welcome",
    "/admin/api/keys",
    "/admin/api/state",
    "/admin/api/conversations",
    "/admin/api/conversations/1",
    "/admin/api/drafts/demo-main",
    "/admin/api/measurements",
    "/admin/api/models",
    "/admin/api/models/demo-main/settings",
    "/admin/api/settings",
    "/admin/api/requests",
    "/admin/api/requests/r1",
    "/admin/api/replies/r1",
    "/admin/api/downloads",
    "/v1/models",
)
"""Paths of pages and API routes that together read rows of every table."""
CALL = {"id": "c1", "name": "look", "arguments": "{}"}
FIGURES: dict[str, Any] = {
    "usage": {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0},
    "seconds": {"total": 1.5},
    "timings": {"predicted_per_second": 4.25},
    "speculation": {"method": "ngram", "drafted": 4, "accepted": 2},
}
LOCK = "every request needs a key"

Damaging = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a closed file with rows in every table, from a server that requires keys."""
    path = tmp_path_factory.mktemp("sound") / FILE_NAME
    store = Store(path, lambda: 1_000_000.0)
    accounts, kept = Accounts(store, hasher=PasswordHasher(1, 8, 1)), StoredSettings(store)
    accounts.set_up("correct horse battery")
    accounts.sessions.begin("a browser")
    accounts.keys.create("laptop", "inference")
    FirstRun(store).begin()
    kept.change_settings({"require_key": True, "max_requests": 9, "drafts": {"demo-main": "off"}}, source="test")
    kept.save_model("demo-main", ModelSettings(alias="main", temperature=0.5), source="test")
    DownloadRows(store).add(Download(repository="org/model", state="failed", problem="disk_full: 3", total_bytes=9))
    results = swept({(1, "off", 0): 10.0, (1, "draft_model", 4): 20.0}).results(drafts={"draft_model": "demo-draft"})
    StoredMeasurements(store).save("demo-main", versions={"mlx": "1"}, machine={"cores": 2}, results=results)
    turns = [
        MessageRow(turn="q1", content="Hi"),
        MessageRow(turn="a1", parent="q1", role="assistant", content="So", spans=[[0, 1, "ngram"]], calls=[CALL]),
    ]
    turns[1].figures = {"stopped": True}
    Conversations(store).add(1, 0, turns, ConversationHeader("Talk", "demo-main", {"temperature": 0.5}))
    with store.session() as session:
        session.add(RequestRow(id="r1", figures=FIGURES, model_id="demo-main", prompt="Hi", reply="So", outcome="stop"))
    store.close()
    return path


def check_start(content: bytes, damage: Damaging = lambda _path: None, *, may_be_open: bool = False) -> bool:
    """Start on a damaged copy as `serve` does; return whether it was set aside. `may_be_open`: it may need no key."""
    with TemporaryDirectory() as name:
        path = Path(name) / FILE_NAME
        path.write_bytes(content)
        damage(path)
        before = path.read_bytes()
        with closing(Store(path)) as store:
            notice, live, is_unsafe = open_store(store, Settings(home=path.parent))
            app = create_app(live, store, FakeWorker(), FakeCatalog(MODELS))  # type: ignore[arg-type]
            assert not is_unsafe
            assert may_be_open or app.state.access_policy.is_key_required
            asides = [aside for aside in path.parent.glob(f"{FILE_NAME}.damaged-*") if aside.suffix[:4] != "-wal"]
            assert (store.locked_down, LOCK in notice, bool(asides)) in {(False,) * 3, (True,) * 3}, notice
            has_copy = any(path.parent.glob(f"{FILE_NAME}.before-*"))
            assert not asides or has_copy or before in {aside.read_bytes() for aside in asides}
            if not asides:
                asyncio.run(_check_pages(app))
            return bool(asides)


async def _check_pages(app: Any) -> None:
    headers = {"authorization": f"Bearer {app.state.access_policy.local_key}"}
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8710", headers=headers) as client,
    ):
        for page in PAGES:
            response = await client.get(page)
            assert response.status_code < 500, (page, response.text)


def set_value(path: Path, table: str, column: str, value: Any) -> bool:
    """Put a value into one row of a table; return whether the table accepts it."""
    with closing(sqlite3.connect(path)) as file, suppress(sqlite3.IntegrityError):
        which = "name = 'require_key'" if (table, column) == ("setting", "value") else "true"
        where = f'SELECT min(rowid) FROM "{table}" WHERE {which}'  # noqa: S608
        taken = file.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ({where})', (value,)).rowcount  # noqa: S608
        file.commit()
        return taken == 1
    return False


def test_a_sound_store_opens_and_its_pages_answer(sound: Path) -> None:
    assert not check_start(sound.read_bytes())


# --- values -------------------------------------------------------------------------------------------------------

COLUMNS = [(table.name, column.name) for table in SQLModel.metadata.sorted_tables for column in table.columns]
NUMBERS = st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=True), st.just(float("inf")))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.one_of(
    st.text(max_size=40),
    JSON_VALUES.map(json.dumps),
    st.sampled_from(["", "NaN", "1e999", "9" * 400, "9" * 5000, "[" * 100_000, '"\\ud800"', "null", '{"a": Infinity}']),
)


def spoilt(draw: st.DrawFn, value: Any) -> Any:
    """Draw a value that replaces a stored one: anything, or the stored text with bytes changed, lost or added."""
    content = value.encode() if isinstance(value, str) else b""
    if not content or draw(st.booleans()):
        return draw(st.one_of(NUMBERS, TEXTS, st.binary(max_size=40), st.none()))
    place = draw(st.integers(0, len(content) - 1))
    more = draw(st.binary(max_size=2))
    changed = content[:place] + more + content[place + draw(st.integers(0, 2)) :]
    try:
        return changed.decode()
    except UnicodeDecodeError:
        return changed


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_store_with_any_value_in_any_column_opens_closed(sound: Path, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data(), st.sampled_from(COLUMNS), st.booleans())
    def spoil(data: st.DataObject, column: tuple[str, str], as_text: bool) -> None:
        with closing(sqlite3.connect(sound)) as file:
            (before,) = file.execute(f'SELECT "{column[1]}" FROM "{column[0]}" LIMIT 1').fetchone()  # noqa: S608
        value = data.draw(st.composite(spoilt)(before))
        is_open = column == ("setting", "name") or (column == ("setting", "value") and value in ("false", b"false"))

        def damage(path: Path) -> None:
            set_value(path, *column, value)
            if as_text and isinstance(value, bytes):  # a text that is not valid UTF-8
                with closing(sqlite3.connect(path)) as file, suppress(sqlite3.IntegrityError):
                    file.execute(f'UPDATE "{column[0]}" SET "{column[1]}" = CAST("{column[1]}" AS TEXT)')  # noqa: S608
                    file.commit()

        check_start(sound.read_bytes(), damage, may_be_open=is_open)

    spoil()


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("alembic_version", "version_num", "9" * 39),
        ("alembic_version", "version_num", "9" * 5_000),
        ("setting", "value", "trux"),
        ("setting", "value", "NaN"),
        ("setting", "value", b"\xff\xfe"),
        ("setting", "value", "[" * 100_000),
        ("setting", "value", "9" * 5000),
        ("api_key", "name", b"laptop"),
        ("api_key", "created_at", "yesterday"),
        ("api_key", "used_at", 1e300),
        ("account", "password_hash", b"\xdf\x00"),
        ("session", "seen_at", float("inf")),
        ("model_settings", "values", "[]"),
        ("benchmark", "results", "7"),
        ("request", "figures", '{"usage": '),
        ("message", "calls", '{"id": "c1"}'),
        ("message", "content", b"So"),
        ("conversation", "options", '"\\ud800"'),
        ("download", "total_bytes", "much"),
    ],
)
def test_a_value_that_is_none_of_its_column_is_damage(sound: Path, table: str, column: str, value: Any) -> None:
    assert check_start(sound.read_bytes(), lambda path: set_value(path, table, column, value) and None)


@pytest.mark.parametrize("value", ["0", "1", '"off"', "null", None, "[false]", "-0.0", '"maybe"'])
def test_a_protecting_setting_that_was_stored_as_something_else_is_on(sound: Path, value: Any) -> None:
    assert not check_start(sound.read_bytes(), lambda path: set_value(path, "setting", "value", value) and None)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("request", "figures", '{"usage": 7, "seconds": {"total": "long"}, "speculation": [], "timings": null}'),
        ("request", "figures", "{}"),
        ("benchmark", "results", '{"methods": 7, "cells": 7}'),
        ("benchmark", "results", '{"methods": {"draft_model": []}, "cells": []}'),
        ("message", "calls", '[7, {"arguments": 7}, {}]'),
        ("download", "problem", "disk_{ull"),
        ("download", "state", "runnin"),
        ("setting", "source", ""),
        ("model_settings", "values", '{"temperature": "hot", "new": 1}'),
    ],
)
def test_what_another_version_may_have_written_is_shown_as_nothing(
    sound: Path, table: str, column: str, value: Any
) -> None:
    assert not check_start(sound.read_bytes(), lambda path: set_value(path, table, column, value) and None)


# --- pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("older", [False, True])
def test_a_store_with_any_bytes_in_a_page_opens_closed(sound: Path, examples: int, older: bool) -> None:
    content = (HOMES / "c324348.sqlite3" if older else sound).read_bytes()
    pages = [content[at : at + 4096] for at in range(0, len(content), 4096)]

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data(), st.integers(0, len(pages) - 1))
    def spoil(data: st.DataObject, number: int) -> None:
        written = [place for place, byte in enumerate(pages[number]) if byte] or [0]
        damaged = bytearray(content)
        for _ in range(data.draw(st.integers(1, 4))):
            place = number * 4096 + data.draw(st.sampled_from(written))
            some = data.draw(st.binary(min_size=1, max_size=8))
            damaged[place : place + len(some)] = some
        check_start(bytes(damaged[: len(content)]), may_be_open=older)

    spoil()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"CREATE TABLE api_key", b"CREATE TABL\xdf api_key"),
        (b"\tname VARCHAR NOT NULL", b"\tn\xdfme VARCHAR NOT NULL"),
        (b"\tscope VARCHAR", b"\tscopf VARCHAR"),
        (b"CREATE INDEX ix_request_model_id", b"CREATE INDEX \xff\xff_request_model_id"),
        (b"require_key", b"requirf_key"),
    ],
)
def test_a_schema_or_an_index_that_says_something_else_is_damage(sound: Path, before: bytes, after: bytes) -> None:
    content = sound.read_bytes()
    assert content.count(before) >= 1
    assert check_start(content.replace(before, after, 1))


def test_an_index_with_a_number_that_is_none_is_damage(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy.sqlite3"
    path.write_bytes(sound.read_bytes())
    assert set_value(path, "request", "created_at", 1.5)
    with closing(sqlite3.connect(path)) as file:
        (page,) = file.execute("SELECT rootpage FROM sqlite_master WHERE name = 'ix_request_created_at'").fetchone()
    content = bytearray(path.read_bytes())
    place = content.index(struct.pack(">d", 1.5), (page - 1) * 4096)
    assert place < page * 4096
    content[place : place + 8] = struct.pack(">d", float("nan"))
    assert check_start(bytes(content))


def test_a_store_that_is_cut_off_anywhere_opens_closed(sound: Path) -> None:
    content = sound.read_bytes()
    for length in (0, 1, 99, 100, 4096, len(content) // 2, len(content) - 4096):
        assert check_start(content[:length])


def test_a_locked_store_opens_where_other_machines_reach_it(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"damaged" * 1000)
    beyond = Settings(home=tmp_path, host="0.0.0.0")  # noqa: S104
    with closing(Store(tmp_path / FILE_NAME)) as store:
        assert not open_store(store, beyond)[2], "it lets nobody in"
        Accounts(store, hasher=PasswordHasher(1, 8, 1)).set_password("correct horse battery")
        assert open_store(store, beyond)[2], "and then asks for a key, as ever"


def test_an_older_store_with_a_value_that_is_none_is_set_aside_as_it_was() -> None:
    content = (HOMES / "c324348.sqlite3").read_bytes()
    for table, column in (("message", "content"), ("api_key", "name"), ("download", "repository")):
        assert check_start(content, lambda path, at=(table, column): set_value(path, *at, b"\xff") and None)  # type: ignore[misc]


def test_the_notice_names_the_column_and_never_the_value(sound: Path, tmp_path: Path) -> None:
    shutil.copy(sound, tmp_path / FILE_NAME)
    set_value(tmp_path / FILE_NAME, "message", "content", b"secret \xff")
    with closing(Store(tmp_path / FILE_NAME)) as store:
        notice, _, _ = open_store(store, Settings(home=tmp_path))
    assert "(message.content has an invalid value)" in notice
    assert "secret" not in notice


def test_a_number_too_large_for_a_column_is_an_error_of_the_store(tmp_path: Path) -> None:
    with closing(Store(tmp_path / FILE_NAME)) as store:
        for use in (
            lambda: DownloadRows(store).add(Download(repository="org/model", total_bytes=1 << 63)),
            lambda: Conversations(store).add(1 << 63, 0, [], ConversationHeader("Talk", "", {})),
        ):
            with pytest.raises(StoreUnavailable):
                use()
        assert DownloadRows(store).all() == []
