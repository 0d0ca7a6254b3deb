"""An older file is backed up and migrated, a newer one is left alone; migrations make the tables of the code."""

import json
import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlmodel import SQLModel

from app.core.errors import StoreUnavailable
from app.model_settings import ModelSettings
from app.store import database
from app.store.rows import StoredMeasurements, StoredSettings
from app.store.store import FILE_NAME, Store

FIRST_SCHEMA = """
CREATE TABLE model_choice (
    model_id VARCHAR NOT NULL, drafts JSON, methods JSON, num_draft_tokens INTEGER, policy VARCHAR, acceptance VARCHAR,
    prompt_lookup_min INTEGER, prompt_lookup_max INTEGER, source VARCHAR NOT NULL, updated_at FLOAT NOT NULL,
    PRIMARY KEY (model_id));
CREATE TABLE benchmark (
    id INTEGER NOT NULL, model_id VARCHAR NOT NULL, created_at FLOAT NOT NULL, versions JSON NOT NULL,
    machine JSON NOT NULL, results JSON NOT NULL, PRIMARY KEY (id));
CREATE INDEX ix_benchmark_model_id ON benchmark (model_id);
INSERT INTO model_choice VALUES
    ('big', '["draft"]', NULL, 7, 'single', NULL, NULL, NULL, 'paceline bench', 5.0),
    ('none', '[]', '["ngram"]', NULL, NULL, 'rejection', 2, 4, 'a person', 6.0);
INSERT INTO benchmark VALUES (1, 'big', 3.0, '{"mlx": "1"}', '{}', '{"rate": 20}');
"""
"""Schema that `create_all` made before there were migrations, with some rows."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / FILE_NAME
    with closing(sqlite3.connect(path)) as file:
        file.executescript(FIRST_SCHEMA)
    return path


def test_the_migrations_make_the_tables_that_the_code_declares(tmp_path: Path) -> None:
    path = database.build(tmp_path / FILE_NAME)
    engine = database.open_engine(path)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, SQLModel.metadata) == []
        assert context.get_current_revision() == database.revisions()[-1]


def test_a_file_from_before_migrations_keeps_what_is_in_it(old: Path) -> None:
    store = Store(old)
    assert (
        store.start()
        == f"{FILE_NAME} was migrated to a new format; the old file is kept as {old}.before-{database.revisions()[-1]}."
    )
    assert StoredSettings(store).models() == {
        "big": ModelSettings(drafts=("draft",), num_draft_tokens=7, policy="single"),
        "none": ModelSettings(
            drafts=(), methods=("ngram",), acceptance="rejection", prompt_lookup_min=2, prompt_lookup_max=4
        ),
    }
    assert [(row.created_at, row.results) for row in StoredMeasurements(store).of("big")] == [(3.0, {"rate": 20})]
    assert not store.locked_down
    assert Store(old).start() == "", "once is enough"


def test_the_copy_is_the_file_as_it_was_and_for_the_owner_only(old: Path) -> None:
    StoredSettings(Store(old)).save_model("new", ModelSettings(pinned=True), source="a person")
    copy = old.with_name(f"{FILE_NAME}.before-{database.revisions()[-1]}")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with closing(sqlite3.connect(copy)) as file:
        chosen = file.execute("SELECT model_id, drafts FROM model_choice ORDER BY 1").fetchall()
        tables = {row[0] for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert [(name, json.loads(drafts)) for name, drafts in chosen] == [("big", ["draft"]), ("none", [])]
    assert "model_settings" not in tables


def test_the_last_three_copies_are_kept(old: Path) -> None:
    mine = [old.with_name(f"{FILE_NAME}.before-{name}") for name in ("0001.mine", "my-move", "0001")]
    for copy in mine[:2]:
        copy.write_bytes(b"somebody's own")
        os.utime(copy, (0, 0))
    mine[2].symlink_to(mine[0])
    for revision in ("0002", "0003", "0004", "0005"):
        database.back_up(old, revision)
    assert {path.name for path in old.parent.glob("*.before-*")} == {
        *(path.name for path in mine),
        *(f"{FILE_NAME}.before-{revision}" for revision in ("0003", "0004", "0005")),
    }


def test_an_older_file_with_values_that_are_none_is_set_aside_whole(old: Path) -> None:
    with closing(sqlite3.connect(old)) as file:
        file.execute("UPDATE model_choice SET drafts = '[\"dra' WHERE model_id = 'big'")
        file.commit()
    with pytest.raises(StoreUnavailable, match="`paceline serve` sets it aside"):
        StoredSettings(Store(old)).models()
    assert "locked down" in Store(old).start()
    (aside,) = old.parent.glob(f"{FILE_NAME}.damaged-*")
    with closing(sqlite3.connect(aside)) as file:
        tables = {row[0] for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables == {"model_choice", "benchmark"}


def test_a_file_of_a_newer_paceline_is_told_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    store = Store(path)
    store.start()
    store.close()
    with closing(sqlite3.connect(path)) as file:
        file.executescript("UPDATE alembic_version SET version_num = '0999'; PRAGMA user_version = 999")
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = path.read_bytes()
    for use in (Store(path).start, Store(path).check, lambda: StoredSettings(Store(path)).models()):
        with pytest.raises(StoreUnavailable, match=r"newer Paceline .* revision 0999"):
            use()
    assert path.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == [FILE_NAME, f"{FILE_NAME}.lock", f"{FILE_NAME}.reserve"]
