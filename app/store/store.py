"""The store: settings, accounts, downloads, requests and measurements, in one SQLite file that only its owner reads.

`session` is one transaction that may write, `reading` one that may not. The first use makes the file with its folder
and tables, or migrates an older one to the latest revision after a backup copy; reading makes none. Calls may come from
any thread and take milliseconds: make them in a thread. Any problem of the file raises `StoreUnavailable`; only
`start`, for the server, replaces a damaged file by a new, locked-down one. A reserve of disk space beside the file lets
a key be revoked on a full disk.
"""

import contextlib
import errno
import shlex
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import Session

from app.core.errors import StoreUnavailable
from app.machine.installation import this_installation
from app.store import database, glance
from app.store.glance import LOCKED_DOWN
from app.store.tables import SettingRow

FILE_NAME = glance.FILE_NAME
CHECKPOINT_SECONDS = 0.5
LOCKED_WORDS = "Paceline is locked down: every request needs a key until a new account is set up."
DAMAGED = "is damaged ({reason}): `paceline serve` sets it aside and starts locked down, with a new one"
FULL = "cannot be written, because the disk is full: make room, and try again"
NARROWED = "Other users could write into the folder of Paceline's state: from now on only you can."
NEWER = "was written by a newer Paceline ({reason})"


class Store:
    """One file. `clock` returns Unix seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._locked_down = True
        """False once the open file was seen not to be locked down."""

    @property
    def exists(self) -> bool:
        """Whether anything was ever stored. Raises `StoreUnavailable` where access is denied."""
        with self._explained():
            return database.is_there(self.path)

    @contextmanager
    def session(self, *, vital: bool = False) -> Iterator[Session]:
        """Open a transaction that may write: committed at the end, rolled back on any exception.

        A `vital` one protects a person: it must succeed on a full disk, too, so it may use the reserve, and leaves
        nothing only in the journal, whose damaged end SQLite drops silently.
        """
        with self._explained():
            engine = self._opened()
            with self._room() if vital else contextlib.nullcontext():
                with Session(engine, expire_on_commit=False) as session, session.begin():
                    yield session
                if vital:
                    self._checkpoint()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open a snapshot of the store, empty where nothing was ever stored; changes to its rows are not stored."""
        with self._explained():
            engine = self._opened() if self.exists else database.nothing()
            with Session(engine, expire_on_commit=False, autoflush=False) as session:
                session.connection(execution_options={"reading": True})
                yield session

    def start(self) -> str:
        """Open the file for a server. Return a notice, for people, of what was done about it; empty: nothing."""
        with self._explained(), self._lock:
            self.close()
            narrowed = NARROWED if database.is_writable_by_others(self.path.parent) else ""
            notice, self._engine = self._open(repair=True)
            return " ".join(part for part in (narrowed, notice, LOCKED_WORDS if self.locked_down else "") if part)

    def check(self) -> None:
        """Raise `StoreUnavailable` unless the file is sound, or absent, and its folder ours; change nothing."""
        with self._explained():
            database.check_owner(self.path)
            database.examine(self.path)

    @property
    def locked_down(self) -> bool:
        """Whether a damaged file was set aside and no new account was set up since. Cheap enough to ask often."""
        if not self.exists:
            return False
        if self._locked_down:  # nothing locks down an open file, and a new account unlocks it
            with self.reading() as session:
                self._locked_down = session.get(SettingRow, LOCKED_DOWN) is not None
        return self._locked_down

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        with self._lock:
            engine, self._engine = self._engine, None
            self._locked_down = True
        if engine is not None:
            engine.dispose()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of our own, of SQLite, of the disk or of a value in the file into `StoreUnavailable`."""
        try:
            yield
        except database.Damage as damage:
            raise self._unusable(DAMAGED.format(reason=damage)) from damage
        except database.NewerRevision as newer:
            why = NEWER.format(reason=newer)
            raise self._unusable(f"{why}: update Paceline", f"{why}: {self._way_back()}") from newer
        except (SQLAlchemyError, sqlite3.Error, OSError, ValueError, OverflowError) as error:
            if _is_full(error):
                raise self._unusable(FULL) from error
            self.close()
            notice = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
            reason = " ".join(str(notice).split())[:200]
            raise self._unusable(f"cannot be used ({reason}): check that it is yours and the disk has room") from error

    def _unusable(self, why: str, for_owner: str = "") -> StoreUnavailable:
        return StoreUnavailable(f"{self.path.name} {why}", for_owner=f"{self.path} {for_owner or why}")

    def _way_back(self) -> str:
        """Say what the owner of a newer file can do: update this Paceline, or return to the copy made before that."""
        copy, aside = database.readable_copy(self.path), database.free_name(self.path.with_name(f"{FILE_NAME}.newer"))
        update, move = this_installation().update, f"mv {shlex.quote(str(self.path))} {shlex.quote(str(aside))}"
        if database.is_open_elsewhere(self.path):  # its journal would be taken for the copy's
            return f"update this one with `{update}`, or stop the server that uses it, with `paceline stop`"
        if copy is None:
            return f"update this one with `{update}`, or begin anew with `{move}`"
        go_back = f"{move} && cp {shlex.quote(str(copy))} {shlex.quote(str(self.path))}"
        return f"update this one with `{update}`, or go back to what was here before it with `{go_back}`"

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Free the reserve meanwhile."""
        database.free_reserve(self.path)
        try:
            yield
        finally:
            database.fill_reserve(self.path)

    def _opened(self) -> Engine:
        with self._lock:
            if self._engine is None:
                _, self._engine = self._open(repair=False)
            return self._engine

    def _open(self, *, repair: bool) -> tuple[str, Engine]:
        """Open the file, on a full disk by the reserve; return what was done to it, for people, and its engine."""
        try:
            opened = self._open_once(repair=repair)
        except (SQLAlchemyError, sqlite3.Error, OSError):
            if not database.free_reserve(self.path):
                raise
            opened = self._open_once(repair=repair)
        database.fill_reserve(self.path)
        return opened

    def _open_once(self, *, repair: bool) -> tuple[str, Engine]:
        notice = self._prepare(repair=repair)
        engine = database.open_engine(self.path, pooled=True)
        with engine.connect().execution_options(reading=True) as connection:  # makes the journal, which takes room
            connection.exec_driver_sql("SELECT 1 FROM sqlite_master")
        return notice, engine

    def _prepare(self, *, repair: bool) -> str:
        """Make sure that the file is sound and of the latest revision; without `repair`, raise `Damage`."""
        with database.exclusive(self.path):
            database.make_private(self.path)
            try:
                return self._brought_up_to_date(database.examine(self.path))
            except database.Damage as damage:
                if not repair:
                    raise
                moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(self._clock()))
                new = database.build(self.path, locked_down_at=self._clock())
                aside = database.set_aside(self.path, new, moment)
                return f"{self.path.name} was damaged ({damage}) and is set aside as {aside.name}."

    def _brought_up_to_date(self, revision: str | None) -> str:
        latest = database.revisions()[-1]
        if revision is None:
            database.put(database.build(self.path), self.path)
        if revision in {None, latest}:
            return ""
        copy = database.back_up(self.path, latest)
        database.migrate(self.path, adopt=not revision)
        return f"{self.path.name} has a new form; the earlier one is kept as {copy}."

    def _checkpoint(self) -> None:
        with (
            contextlib.suppress(sqlite3.OperationalError),
            contextlib.closing(sqlite3.connect(self.path, timeout=CHECKPOINT_SECONDS)) as file,
        ):
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _is_full(error: Exception) -> bool:
    """Whether the disk, or the user's quota, is full."""
    cause = getattr(error, "orig", None) or error
    return getattr(cause, "errno", 0) in {errno.ENOSPC, errno.EDQUOT} or (
        getattr(cause, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
    )
