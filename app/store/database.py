"""The file of the store: is it ours and sound, and if not, how a new one takes its place.

A file is only ever put into place whole, with all its tables: an empty, partial or foreign one is damage. Whoever calls
these functions holds `exclusive`, except for `examine`, which changes nothing.
"""

import contextlib
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.store import migrating, seal
from app.store.tables import TABLES

MAGIC = b"SQLite format 3\x00"
HEADER_BYTES = 100
ADOPTED_TABLES = frozenset({"model_choice", "benchmark"})
"""What a file of the first revision has; such a file may say no revision."""
NOT_DAMAGE = frozenset({
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
})  # fmt: skip
"""Primary codes that tell of the disk or of another program, not of the file's content."""
BACKUPS_KEPT = 3
LOCKED_DOWN = "locked_down"
"""The row of the setting table that keeps the server closed; no setting is called so."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What a file is. `reason` says why it is damaged or newer; `revision` is that of a sound one."""

    state: Literal["absent", "sound", "damaged", "newer"]
    reason: str = ""
    revision: str = ""
    says_revision: bool = True


class Damage(Exception):
    """Found while reading the file."""


def examine(path: Path) -> Examined:
    """Look at a file and everything in it. Raises `OSError` or `sqlite3.Error` where it cannot be read at all."""
    if not path.exists():
        if _size_bytes(_beside(path, "-wal")):
            return Examined("damaged", "it is gone, and its journal is still there")
        return Examined("absent")
    try:
        _check_size(path)
        return _examine_content(path)
    except Damage as damage:
        return Examined("damaged", str(damage))


def _check_size(path: Path) -> None:
    """What SQLite would take for a new database."""
    if not path.is_file():
        raise OSError(f"{path.name} is no file")
    if (size_bytes := _size_bytes(path)) < HEADER_BYTES:
        raise Damage("it is no database" if size_bytes else "it is empty")


def _check_header(file: sqlite3.Connection) -> None:
    """What SQLite would read and then refuse to write.

    SQLite reads it for us: opening the file here and closing it again would end all the locks that SQLite holds on it
    in this process (POSIX), and another process would then take the journal away from under it.
    """
    header = file.serialize()[:HEADER_BYTES]
    if not header.startswith(MAGIC):
        raise Damage("it is no database")
    if not {header[18], header[19]} <= {1, 2}:
        raise Damage("its header is damaged")


def _examine_content(path: Path) -> Examined:
    """Every page, every table and the seal, as one moment shows them."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None)) as file:
            file.execute("BEGIN")
            found = [str(row[0]) for row in file.execute("PRAGMA integrity_check(1)")]
            if found != ["ok"]:
                raise Damage(" ".join(found[:1]) or "its pages are damaged")
            _check_header(file)
            return _examine_tables(file)
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code & 0xFF in NOT_DAMAGE and code != sqlite3.SQLITE_IOERR_SHORT_READ:
            raise
        raise Damage("it is no database" if code == sqlite3.SQLITE_NOTADB else str(error)) from error
    except UnicodeError as error:
        raise Damage("it has text that is none") from error


def _examine_tables(file: sqlite3.Connection) -> Examined:
    def read(query: str) -> Sequence[Sequence[Any]]:
        return file.execute(query).fetchall()

    names = {str(row[0]) for row in read("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "alembic_version" not in names:
        if names >= ADOPTED_TABLES and "setting" not in names:
            return Examined("sound", revision=migrating.FIRST, says_revision=False)
        raise Damage("it is not a database of Paceline")
    said = [str(row[0]) for row in read("SELECT version_num FROM alembic_version")]
    number = int(read("PRAGMA user_version")[0][0])
    if len(said) != 1 or not said[0].isdigit() or int(said[0]) != number:
        raise Damage("its revision is damaged")
    if said[0] not in migrating.revisions():
        if number <= int(migrating.revisions()[-1]):
            raise Damage("its revision is damaged")
        return Examined("newer", f"it has revision {said[0]}, and this Paceline knows {migrating.revisions()[-1]}")
    if missing := sorted(TABLES - names):
        raise Damage(f"the table {missing[0]} is missing")
    if not seal.is_intact(read):
        raise Damage("a row that protects the server was changed")
    return Examined("sound", revision=said[0])


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Alone among all processes that open, make or migrate this file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(_beside(path, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def build(path: Path, *, locked_down_at: float | None = None) -> Path:
    """A new file with every table, under a temporary name beside `path`, which is the answer."""
    temporary = _beside(path, ".new")
    for leftover in (temporary, _beside(temporary, "-wal"), _beside(temporary, "-shm")):
        leftover.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    migrating.migrate(temporary)
    if locked_down_at is not None:
        _lock_down(temporary, locked_down_at)
    return temporary


def _lock_down(path: Path, at: float) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        row = (LOCKED_DOWN, "true", "damage", at)
        file.execute("BEGIN IMMEDIATE")
        file.execute("INSERT INTO setting (name, value, source, updated_at) VALUES (?, ?, ?, ?)", row)
        file.execute(*seal.statement(seal.digest(lambda query: file.execute(query).fetchall())))
        file.execute("COMMIT")


def put(new: Path, path: Path) -> None:
    """The new file takes the name `path`, at once and for good."""
    _sync(new)
    new.replace(path)
    _sync(path.parent)


def set_aside(path: Path, new: Path, moment: str) -> Path:
    """The damaged file gets a name of its own and `new` takes its place; there is never no file in between."""
    aside = _free_name(_beside(path, f".damaged-{moment}"))
    if path.exists():
        try:
            os.link(path, aside)
        except OSError:  # a file system without links
            shutil.copy2(path, aside)
    for suffix in ("-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            _beside(path, suffix).replace(_beside(aside, suffix))
    put(new, path)
    return aside


def back_up(path: Path, revision: str) -> Path:
    """A copy of a sound file before it is brought to `revision`; older copies beyond the last few are deleted."""
    copy = _beside(path, f".before-{revision}")
    temporary = _beside(copy, ".new")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(temporary)) as target:
        source.backup(target)
    put(temporary, copy)
    copies = sorted(path.parent.glob(f"{path.name}.before-*"), key=lambda each: each.stat().st_mtime_ns)
    for old in copies[:-BACKUPS_KEPT]:
        old.unlink(missing_ok=True)
    return copy


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _free_name(path: Path) -> Path:
    names = (path if number == 1 else _beside(path, f"-{number}") for number in range(1, 1000))
    return next(name for name in names if not name.exists())


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
