"""The store: what was chosen for each model and what was measured, in one SQLite file that only its owner reads.

Reading never makes the file; the first write makes it with its folder and tables. Calls may come from any thread and
take milliseconds: make them in a thread. What is wrong with the file ends in one `StoreUnavailable`.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import Session, SQLModel, create_engine, select

from app.core.choices import ModelChoice
from app.core.errors import StoreUnavailable
from app.store.tables import BenchmarkRow, ModelSettingsRow, SettingRow

FILE_NAME = "paceline.sqlite3"
BUSY_TIMEOUT_MILLISECONDS = 5_000
LOCKED_DOWN = "locked_down"
"""The row of the setting table that keeps the server closed; no setting is called so."""
LISTS = ("drafts", "methods")
"""Fields of a choice that are lists in the table and tuples outside."""


class Store:
    """One file. `clock` tells Unix seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._engine: Engine | None = None

    def choice(self, model_id: str) -> ModelChoice | None:
        """What was chosen for a model; None when nothing was."""
        if not self.path.exists():
            return None
        with self.session() as session:
            row = session.get(ModelSettingsRow, model_id)
            return None if row is None else _choice_of(row)

    def save_choice(self, model_id: str, choice: ModelChoice, *, source: str) -> None:
        """Keep a choice in the place of an earlier one; `source` says who chose."""
        values = {name: value for name, value in asdict(choice).items() if value is not None}
        row = ModelSettingsRow(model_id=model_id, source=source, updated_at=self._clock(), values=values)
        with self.session() as session:
            session.merge(row)

    def forget_choice(self, model_id: str) -> None:
        """Go back to the usual way. Models without a choice are fine."""
        if not self.path.exists():
            return
        with self.session() as session:
            row = session.get(ModelSettingsRow, model_id)
            if row is not None:
                session.delete(row)

    def save_benchmark(
        self, model_id: str, *, versions: Mapping[str, Any], machine: Mapping[str, Any], results: Mapping[str, Any]
    ) -> None:
        """Keep what was measured; all three are plain JSON values."""
        row = BenchmarkRow(
            model_id=model_id,
            created_at=self._clock(),
            versions=dict(versions),
            machine=dict(machine),
            results=dict(results),
        )
        with self.session() as session:
            session.add(row)

    def benchmarks(self, model_id: str) -> list[BenchmarkRow]:
        """What was measured for a model, the latest first."""
        if not self.path.exists():
            return []
        wanted = select(BenchmarkRow).where(BenchmarkRow.model_id == model_id)
        with self.session() as session:
            return sorted(session.exec(wanted), key=lambda row: (row.created_at, row.id or 0), reverse=True)

    @property
    def locked_down(self) -> bool:
        """Whether a damaged file was set aside and nobody set up a new account since."""
        if not self.path.exists():
            return False
        with self.session() as session:
            return session.get(SettingRow, LOCKED_DOWN) is not None

    def unlock(self) -> None:
        """A new account was set up: the server may serve as its settings say."""
        with self.session() as session:
            row = session.get(SettingRow, LOCKED_DOWN)
            if row is not None:
                session.delete(row)

    def close(self) -> None:
        """Let go of the file; the next call opens it again."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """One transaction: committed at the end, rolled back on any exception."""
        try:
            with Session(self._opened(), expire_on_commit=False) as session, session.begin():
                yield session
        except (SQLAlchemyError, sqlite3.Error, OSError, ValueError) as error:
            self.close()
            reason = " ".join(str(getattr(error, "orig", None) or error).split())[:200]
            raise StoreUnavailable(
                f"{self.path} cannot be used ({reason}): check that it is yours and the disk has room; "
                "if it is damaged, move it away and Paceline makes a new one, without your choices"
            ) from error

    def _opened(self) -> Engine:
        with self._lock:
            if self._engine is None:
                self._make_file()
                engine = create_engine(URL.create("sqlite", database=str(self.path)))
                event.listen(engine, "connect", _configure)
                SQLModel.metadata.create_all(engine)
                self._engine = engine
            return self._engine

    def _make_file(self) -> None:
        """The file and its folder for nobody else; SQLite gives its journal the same mode."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)


def _configure(connection: Any, _record: Any) -> None:
    """What every connection needs: the waiting time first, since switching to WAL may have to wait."""
    for pragma in (f"busy_timeout = {BUSY_TIMEOUT_MILLISECONDS}", "journal_mode = WAL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _choice_of(row: ModelSettingsRow) -> ModelChoice:
    values: dict[str, Any] = {field.name: row.values.get(field.name) for field in fields(ModelChoice)}
    lists = {name: tuple(values[name]) for name in LISTS if values[name] is not None}
    return ModelChoice(**{**values, **lists})
