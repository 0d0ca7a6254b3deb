"""The file of the store: the checks that it is ours and sound, and how it is opened, migrated and replaced.

A file is renamed into place only when it is complete, with all its tables. An empty, partial or foreign file is
therefore damage, as is anything else at its path. Callers that make, migrate or replace a file hold `exclusive`.
"""

import contextlib
import os
import re
import shlex
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from sqlalchemy import JSON, URL, Column, Connection, Engine, Float, Integer, create_engine, event, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, StaticPool
from sqlmodel import SQLModel

from app.core.errors import StoreUnavailable
from app.machine.own_files import lock_file, open_regular_file, own_files, sync
from app.store import stored_json
from app.store.snapshot import LOCKED_DOWN
from app.store.tables import TABLES

MIGRATIONS = files("app.store").joinpath("migrations")
JOURNALS = ("-wal", "-shm", "-journal")
FIRST = "0001"
ADOPTED_TABLES = frozenset({"model_choice", "benchmark"})
"""Tables of a file of the first revision, in which no revision is recorded, since `create_all` made it."""
NOT_DAMAGE = frozenset({
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
})  # fmt: skip
"""Primary codes of errors that come from the disk or another program, not from the file's content."""
LATEST_SECONDS = 253_370_764_800.0
"""Unix seconds at the beginning of the year 9999: no later time can be shown."""
BUSY_TIMEOUT_MILLISECONDS = 5_000
LOCK_SECONDS = 10.0
"""Longest wait, in seconds, for another process that is opening, making or migrating the file."""
BACKUPS_KEPT = 3
RESERVE_BYTES = 256 * 1024
"""Size of the reserve, in bytes: several times the journal space of a change of keys, sessions or the password."""
PRIVATE = 0o600
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Damage(Exception):
    """The file cannot be used; the message says why."""


class NewerRevision(Exception):
    """A later Paceline wrote the file; the message names its revision."""


def examine(path: Path) -> str | None:
    """Return the revision of a sound file: "" if it records none, None if there is no file.

    Raises `Damage`, `NewerRevision`, and `OSError` or `sqlite3.Error` if the file cannot be read at all.
    """
    if not exists(path):
        return None
    _check_kind(path)
    return _examine_content(path)


def exists(path: Path) -> bool:
    """Return whether anything was ever stored, in the file or its journal. Raises `OSError` if access is denied."""
    for part in (path, _sibling(path, "-wal")):
        with contextlib.suppress(FileNotFoundError):
            if part.lstat().st_size or part == path:
                return True
    return False


def _check_kind(path: Path) -> None:
    """Raise `Damage` for a path on which SQLite would block, fail, or create a new database."""
    if not path.exists():
        is_link = path.is_symlink()
        raise Damage("it is a link to nothing" if is_link else "it is missing, but its journal exists")
    for part in (path, *(_sibling(path, suffix) for suffix in JOURNALS)):
        if part.exists() and not part.is_file():
            raise Damage(f"{'it' if part == path else part.name} is no file")
    if path.stat().st_uid != os.geteuid():
        raise Damage("it belongs to another user")
    if not path.stat().st_size:
        raise Damage("it is empty")


def _examine_content(path: Path) -> str:
    """Check every page, index, reference between rows, table and value in one snapshot; return the revision."""
    with (
        _raising_damage(),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None)) as file,
    ):
        file.execute("BEGIN")
        results = [str(row[0]) for row in file.execute("PRAGMA integrity_check(1)")]  # also compares indices with rows
        if results != ["ok"]:
            raise Damage(" ".join(results[:1]) or "its pages are damaged")
        if file.execute("PRAGMA foreign_key_check").fetchone() is not None:
            raise Damage("a row refers to a row that does not exist")
        revision = _examine_tables(file)
        if revision == revisions()[-1]:
            _examine_values(file)
        return revision


@contextmanager
def _raising_damage() -> Iterator[None]:
    """Turn errors about unreadable pages, texts and values into `Damage`."""
    try:
        yield
    except (sqlite3.DatabaseError, DBAPIError) as error:
        code = getattr(getattr(error, "orig", error), "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code & 0xFF in NOT_DAMAGE and code != sqlite3.SQLITE_IOERR_SHORT_READ:
            raise
        raise Damage("it is not a database" if code == sqlite3.SQLITE_NOTADB else "its pages are damaged") from error
    except ValueError as error:  # SQLite's own messages may quote invalid UTF-8
        raise Damage("it has invalid values") from error


def _examine_tables(file: sqlite3.Connection) -> str:
    names = {str(row[0]) for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "alembic_version" not in names:
        if names >= ADOPTED_TABLES and "setting" not in names:
            return ""
        raise Damage("it is not a database of Paceline")
    stated = [str(row[0]) for row in file.execute("SELECT version_num FROM alembic_version")]
    latest = revisions()[-1]
    if len(stated) == 1 and re.fullmatch(r"[0-9]{4}", stated[0]) and stated[0] > latest:
        raise NewerRevision(f"it has revision {stated[0]}, and this Paceline knows {latest}")
    if len(stated) != 1 or stated[0] not in revisions():
        raise Damage("its revision is damaged")
    if stated[0] == latest and (missing := sorted(TABLES - names)):
        raise Damage(f"the table {missing[0]} is missing")
    return stated[0]


def _examine_values(file: sqlite3.Connection) -> None:
    """Raise `Damage` unless every value of every row matches its column in `app/store/tables.py`.

    Indices are read too: for SQLite's own check, a NaN in an index equals any number.
    """
    file.text_factory = _text
    for columns, query in _queries():
        for row in file.execute(query):
            for column, value in zip(columns, row, strict=True):
                if not _is_value_of(column, value):
                    raise Damage(f"{column} has an invalid value")


@cache
def _queries() -> tuple[tuple[tuple[Column[Any], ...], str], ...]:
    """Return the columns of every table and of every index, each with the query that reads them."""
    reads = [
        (tuple(columns), order)
        for table in SQLModel.metadata.sorted_tables
        for columns, order in [(table.columns, ()), *((index.columns, tuple(index.columns)) for index in table.indexes)]
    ]
    dialect = sqlite.dialect()
    return tuple((columns, str(select(*columns).order_by(*order).compile(dialect=dialect))) for columns, order in reads)


def _text(raw: bytes) -> str | bytes:
    """Decode a text; return its bytes if it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _is_value_of(column: Column[Any], value: Any) -> bool:
    match column.type:
        case _ if value is None:
            return bool(column.nullable)
        case JSON():
            return _is_json(value, column.info["kind"])
        case Float():
            return isinstance(value, float) and 0 <= value < LATEST_SECONDS
        case Integer():
            return isinstance(value, int)
        case _:
            return isinstance(value, str)


def _is_json(value: Any, kind: Any) -> bool:
    try:
        stored_json.decode(value, kind)
    except ValueError:
        return False
    return True


@cache
def revisions() -> tuple[str, ...]:
    """Return every revision, oldest first: the numbers at the beginning of the migrations' file names."""
    names = (file.name for file in MIGRATIONS.joinpath("versions").iterdir())
    return tuple(sorted(name[:4] for name in names if re.match(r"[0-9]{4}_", name)))


def migrate(path: Path, *, adopt: bool = False, to: str | None = None) -> None:
    """Migrate a file to a revision, the latest by default. `adopt`: it has the first one's tables, but records none.

    All migrations happen in one transaction. Raises `Damage` if the file's values do not allow them.
    """
    from alembic import command  # takes a tenth of the start time, and few starts migrate
    from alembic.config import Config

    target, config = to or revisions()[-1], Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    engine = open_engine(path)
    try:
        with _raising_damage(), engine.begin() as connection:
            config.attributes["connection"] = connection
            if adopt:
                command.stamp(config, FIRST)
            command.upgrade(config, target)
            connection.exec_driver_sql(f"PRAGMA user_version = {int(target)}")  # for earlier versions, which read it
            if target == revisions()[-1]:
                _examine_values(cast("sqlite3.Connection", connection.connection.driver_connection))
    finally:
        engine.dispose()


def open_engine(path: Path, *, pooled: bool = False) -> Engine:
    """Return an engine whose transactions begin with `BEGIN IMMEDIATE`, or with `BEGIN` under the option `reading`."""

    def configure(connection: Any, _record: Any) -> None:
        """Set up a connection: the busy timeout first, since switching to WAL may have to wait."""
        connection.isolation_level = None  # we send BEGIN ourselves, so that schema changes are in a transaction too
        # Deleted data is overwritten, and macOS writes a checkpoint through to the medium.
        pragmas = "journal_mode = WAL", "foreign_keys = ON", "secure_delete = ON", "checkpoint_fullfsync = ON"
        for pragma in (f"busy_timeout = {BUSY_TIMEOUT_MILLISECONDS}", *pragmas):
            connection.execute(f"PRAGMA {pragma}")

    def begin(connection: Connection) -> None:
        is_read_only = connection.get_execution_options().get("reading", False)
        connection.exec_driver_sql("BEGIN" if is_read_only else "BEGIN IMMEDIATE")

    url = URL.create("sqlite", database=str(path))
    json = {"json_serializer": stored_json.encode, "json_deserializer": stored_json.decode}
    engine = create_engine(url, **json) if pooled else create_engine(url, poolclass=NullPool, **json)
    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", begin)
    return engine


@cache
def empty_engine() -> Engine:
    """Return an in-memory engine with all tables and no rows, to read from before anything is stored."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    SQLModel.metadata.create_all(engine)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON")
    return engine


def check_owner(path: Path, user: int | None = None) -> None:
    """Raise `StoreUnavailable` if the folder of the file is shared by everybody or belongs to another user."""
    folder = path.parent
    if not folder.is_dir():
        return
    status, advice = folder.stat(), "set PACELINE_HOME to a folder of your own"
    if status.st_mode & stat.S_ISVTX and status.st_mode & OTHERS_WRITE:
        why = "is shared by everybody"
    elif status.st_uid != (os.geteuid() if user is None else user):
        why = "belongs to another user"
        if os.access(path, os.F_OK):
            advice = f"run `sudo chown -R $(id -un) {shlex.quote(str(folder))}` if it is yours, or {advice}"
    else:
        return
    raise StoreUnavailable(f"The folder of Paceline's state {why}", private_message=f"{folder} {why}: {advice}")


def is_writable_by_others(folder: Path) -> bool:
    """Return whether other users may write into the folder."""
    return folder.is_dir() and bool(folder.stat().st_mode & OTHERS_WRITE)


@contextmanager
def exclusive(path: Path, wait_seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Keep out other processes that open, make or migrate this file; from here on only we can write to its folder.

    Raises `StoreUnavailable` if another process, perhaps a suspended one, takes longer than `wait_seconds`.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(path)
    if is_writable_by_others(path.parent):
        path.parent.chmod(0o700)
    descriptor = open_regular_file(_sibling(path, ".lock"), os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        if not lock_file(descriptor, wait_seconds):
            why = "is being opened by another Paceline process that has stopped responding: end it, and try again"
            raise StoreUnavailable(f"{path.name} {why}", private_message=f"{path} {why}")
        yield
    finally:
        os.close(descriptor)


def free_reserve(path: Path) -> bool:
    """Free the reserved disk space; return whether there was any."""
    try:
        _sibling(path, ".reserve").unlink()
    except OSError:
        return False
    return True


def fill_reserve(path: Path) -> None:
    """Reserve disk space again, as much as is available."""
    with contextlib.suppress(OSError):
        descriptor = open_regular_file(_sibling(path, ".reserve"), os.O_WRONLY | os.O_CREAT, PRIVATE)
        with os.fdopen(descriptor, "wb", buffering=0) as reserve:
            while (missing_bytes := RESERVE_BYTES - os.fstat(descriptor).st_size) > 0:
                reserve.seek(0, os.SEEK_END)
                reserve.write(os.urandom(min(missing_bytes, 4096)))  # zeros might be compressed to nothing


def make_private(path: Path) -> None:
    """Let only the owner read and write the file and those of its journals that exist."""
    for part in (path, *(_sibling(path, suffix) for suffix in JOURNALS)):
        if part.is_file() and part.stat().st_uid == os.geteuid() and stat.S_IMODE(part.stat().st_mode) != PRIVATE:
            part.chmod(PRIVATE)


def build(path: Path, *, locked_down_at: float | None = None) -> Path:
    """Make a file with every table beside `path`; return its temporary name. `locked_down_at` is in Unix seconds."""
    temporary = _sibling(path, ".new")
    for leftover in (temporary, _sibling(temporary, "-wal"), _sibling(temporary, "-shm")):
        leftover.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))
    migrate(temporary)
    if locked_down_at is not None:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as file:
            row = (LOCKED_DOWN, "true", "damage", locked_down_at)
            file.execute("INSERT INTO setting (name, value, source, updated_at) VALUES (?, ?, ?, ?)", row)
    return temporary


def replace_durably(new: Path, path: Path) -> None:
    """Rename the new file to `path`, atomically and durably."""
    sync(new)
    new.replace(path)
    sync(path.parent)


def set_aside(path: Path, new: Path, moment: str) -> Path:
    """Rename the damaged file, replace it with `new` and return its new name; there is a file at `path` throughout."""
    aside = unused_name(_sibling(path, f".damaged-{moment}"))
    if path.is_file() and not path.is_symlink() and path.stat().st_uid == os.geteuid():
        try:
            os.link(path, aside)
        except OSError:  # a file system without links
            shutil.copy2(path, aside)
    elif os.path.lexists(path):
        path.rename(aside)
    for suffix in JOURNALS:
        with contextlib.suppress(FileNotFoundError):
            _sibling(path, suffix).rename(_sibling(aside, suffix))
    replace_durably(new, path)
    return aside


def back_up(path: Path, revision: str) -> Path:
    """Copy a sound file before it is migrated to `revision`; delete older copies beyond the last few."""
    copy = _sibling(path, f".before-{revision}")
    temporary = _sibling(copy, ".new")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(temporary)) as target:
        source.backup(target)
    replace_durably(temporary, copy)
    for old in _copies(path)[:-BACKUPS_KEPT]:
        old.unlink(missing_ok=True)
    return copy


def is_open_elsewhere(path: Path) -> bool:
    """Return whether another process has the just examined file open: the last to close it removes the journal."""
    return _sibling(path, "-wal").exists()


def readable_copy(path: Path) -> Path | None:
    """Return the latest of the copies made before an upgrade that this version can read; None: there is none."""
    for copy in reversed(_copies(path)):
        with contextlib.suppress(Damage, NewerRevision, OSError, sqlite3.Error):
            examine(copy)
            return copy
    return None


def _copies(path: Path) -> list[Path]:
    """List the copies made before upgrades, the latest last."""
    names = own_files(path.parent, rf"{re.escape(path.name)}\.before-[0-9]+")
    return sorted(names, key=lambda copy: copy.lstat().st_mtime_ns)


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def unused_name(path: Path) -> Path:
    """Return this path, or the first numbered variant of it that does not exist."""
    names = (path if number == 1 else _sibling(path, f"-{number}") for number in range(1, 1000))
    return next(name for name in names if not os.path.lexists(name))
