"""The store: settings, accounts, downloads, requests and measurements, in one SQLite file that only its owner reads.

`session` is a transaction that may write, `read_session` one that may not. The first write creates the folder, the file
and its tables; reading creates nothing. The first use of an older file makes a backup copy and migrates the file to the
latest revision. Calls may come from any thread; they take milliseconds, so keep them off the event loop. Any problem
with the file raises `StoreUnavailable`; only `start`, for the server, replaces a damaged file with a new, locked-down
one. Reserved disk space beside the file allows a key to be revoked even on a full disk.
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
from app.store import database, snapshot
from app.store.snapshot import LOCKED_DOWN
from app.store.tables import SettingRow

FILE_NAME = snapshot.FILE_NAME
CHECKPOINT_SECONDS = 0.5
LOCKED_NOTICE = "Paceline is locked down: every request needs a key until a new account is set up."
DAMAGED = "is damaged ({reason}): `paceline serve` sets it aside and starts locked down, with a new one"
DISK_FULL = "cannot be written, because the disk is full: make room, and try again"
PERMISSIONS_NOTICE = "Other users could write into the folder of Paceline's state: from now on only you can."
NEWER = "was written by a newer Paceline ({reason})"
PASSING = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT})
"""Primary codes of errors after which the file stays open: to open it again, all of it is examined, while others wait.
"""


class Store:
    """One store file. `clock` returns Unix seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._locked_down = True
        """Whether the open file may be locked down; False once that has been ruled out."""

    @property
    def exists(self) -> bool:
        """Whether anything was ever stored. Raises `StoreUnavailable` where access is denied."""
        with self._translating_errors():
            return database.exists(self.path)

    @contextmanager
    def session(self, *, vital: bool = False) -> Iterator[Session]:
        """Open a transaction that may write: committed at the end, rolled back on any exception.

        A `vital` transaction protects a person. It must succeed on a full disk, too, so it may use the reserve. It also
        leaves nothing only in the journal, because SQLite silently drops a journal's damaged end.
        """
        with self._translating_errors():
            engine = self._open_engine()
            with self._freeing_reserve() if vital else contextlib.nullcontext():
                with Session(engine, expire_on_commit=False) as session, session.begin():
                    yield session
                if vital:
                    self._checkpoint()

    @contextmanager
    def read_session(self) -> Iterator[Session]:
        """Open a snapshot of the store, empty if nothing was ever stored; changes to its rows are not stored."""
        with self._translating_errors():
            engine = self._open_engine() if self.exists else database.empty_engine()
            with Session(engine, expire_on_commit=False, autoflush=False) as session:
                session.connection(execution_options={"reading": True})
                yield session

    def start(self) -> str:
        """Open the file for a server. Return a notice for people, of a repair for example, or an empty string."""
        with self._translating_errors(), self._lock:
            self.close()
            permissions_notice = PERMISSIONS_NOTICE if database.is_writable_by_others(self.path.parent) else ""
            notice, self._engine = self._open(repair=True)
            return " ".join(
                part for part in (permissions_notice, notice, LOCKED_NOTICE if self.locked_down else "") if part
            )

    def check(self) -> None:
        """Raise `StoreUnavailable` unless the folder is ours and the file is sound or absent. Changes nothing."""
        with self._translating_errors():
            database.check_owner(self.path)
            database.examine(self.path)

    @property
    def locked_down(self) -> bool:
        """Whether a damaged file was set aside and no account has been set up since. Cheap enough for every request."""
        if not self.exists:
            return False
        if self._locked_down:  # False is final: nothing locks down an open file. True is not: a new account unlocks it
            with self.read_session() as session:
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
    def _translating_errors(self) -> Iterator[None]:
        """Translate our own errors and those of SQLite, the disk or a stored value into `StoreUnavailable`."""
        try:
            yield
        except database.Damage as damage:
            raise self._unusable(DAMAGED.format(reason=damage)) from damage
        except database.NewerRevision as newer:
            why = NEWER.format(reason=newer)
            raise self._unusable(f"{why}: update Paceline", f"{why}: {self._downgrade_advice()}") from newer
        except (SQLAlchemyError, sqlite3.Error, OSError, ValueError, OverflowError) as error:
            if _is_full(error):
                raise self._unusable(DISK_FULL) from error
            if _sqlite_code(error) not in PASSING:
                self.close()
            notice = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
            reason = " ".join(str(notice).split())[:200]
            raise self._unusable(f"cannot be used ({reason}): check that it is yours and the disk has room") from error

    def _unusable(self, why: str, for_owner: str = "") -> StoreUnavailable:
        return StoreUnavailable(f"{self.path.name} {why}", private_message=f"{self.path} {for_owner or why}")

    def _downgrade_advice(self) -> str:
        """Return advice for the owner of a newer file: update Paceline, or restore the copy made before the upgrade."""
        copy, aside = database.readable_copy(self.path), database.unused_name(self.path.with_name(f"{FILE_NAME}.newer"))
        update, move = this_installation().update, f"mv {shlex.quote(str(self.path))} {shlex.quote(str(aside))}"
        if database.is_open_elsewhere(self.path):  # its journal would be applied to the copy
            return f"update this one with `{update}`, or stop the server that uses it, with `paceline stop`"
        if copy is None:
            return f"update this one with `{update}`, or begin anew with `{move}`"
        go_back = f"{move} && cp {shlex.quote(str(copy))} {shlex.quote(str(self.path))}"
        return f"update this one with `{update}`, or go back to what was here before it with `{go_back}`"

    @contextmanager
    def _freeing_reserve(self) -> Iterator[None]:
        """Free the reserve for the duration of the block."""
        database.free_reserve(self.path)
        try:
            yield
        finally:
            database.fill_reserve(self.path)

    def _open_engine(self) -> Engine:
        with self._lock:
            if self._engine is None:
                _, self._engine = self._open(repair=False)
            return self._engine

    def _open(self, *, repair: bool) -> tuple[str, Engine]:
        """Open the file, if need be with the reserved space; return a notice for people of changes, and the engine."""
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
        with engine.connect().execution_options(reading=True) as connection:  # makes the journal, which uses disk space
            connection.exec_driver_sql("SELECT 1 FROM sqlite_master")
        return notice, engine

    def _prepare(self, *, repair: bool) -> str:
        """Make the file sound and of the latest revision; return a notice of it. Raises `Damage` without `repair`."""
        with database.exclusive(self.path):
            database.make_private(self.path)
            try:
                return self._migrated(database.examine(self.path))
            except database.Damage as damage:
                if not repair:
                    raise
                moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(self._clock()))
                new = database.build(self.path, locked_down_at=self._clock())
                aside = database.set_aside(self.path, new, moment)
                return f"{self.path.name} was damaged ({damage}) and is set aside as {aside.name}."

    def _migrated(self, revision: str | None) -> str:
        latest = database.revisions()[-1]
        if revision is None:
            database.replace_durably(database.build(self.path), self.path)
        if revision in {None, latest}:
            return ""
        copy = database.back_up(self.path, latest)
        database.migrate(self.path, adopt=not revision)
        return f"{self.path.name} was migrated to a new format; the old file is kept as {copy}."

    def _checkpoint(self) -> None:
        with (
            contextlib.suppress(sqlite3.OperationalError),
            contextlib.closing(sqlite3.connect(self.path, timeout=CHECKPOINT_SECONDS)) as file,
        ):
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _is_full(error: Exception) -> bool:
    """Return whether an error means that the disk, or the user's quota, is full."""
    cause = getattr(error, "orig", None) or error
    return getattr(cause, "errno", 0) in {errno.ENOSPC, errno.EDQUOT} or _sqlite_code(error) == sqlite3.SQLITE_FULL


def _sqlite_code(error: Exception) -> int:
    """Return SQLite's primary code for an error; 0 if it is not from SQLite."""
    return int(getattr(getattr(error, "orig", None) or error, "sqlite_errorcode", 0)) & 0xFF
