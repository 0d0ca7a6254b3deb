"""Alembic from inside the package: every migration in one transaction, sealed, or none of it."""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

from app.store import seal

FIRST = "0001"
"""The revision whose files say no revision: `create_all` made them."""


@cache
def revisions() -> tuple[str, ...]:
    """Every revision, the oldest first."""
    steps = ScriptDirectory.from_config(_config()).walk_revisions()
    return tuple(sorted(step.revision for step in steps))


def migrate(path: Path, *, adopt: bool = False, to: str | None = None) -> None:
    """Bring a file to a revision, the latest by default; `adopt`: it has the first one's tables, and says none."""
    target = to or revisions()[-1]
    engine = open_engine(path)
    try:
        with engine.begin() as connection:
            config = _config()
            config.attributes["connection"] = connection
            if adopt:
                command.stamp(config, FIRST)
            command.upgrade(config, target)
            connection.exec_driver_sql(f"PRAGMA user_version = {int(target)}")
            renew_seal(connection)
    finally:
        engine.dispose()


def renew_seal(connection: Connection) -> None:
    """Seal what the transaction of `connection` made of the guarded rows."""
    connection.exec_driver_sql(*seal.statement(seal.digest(lambda sql: connection.exec_driver_sql(sql).fetchall())))


def open_engine(path: Path, *, pooled: bool = False, busy_timeout_milliseconds: int = 5_000) -> Engine:
    """An engine whose transactions begin with `BEGIN IMMEDIATE`, unless the option `reading` says `BEGIN`."""

    def configure(connection: Any, _record: Any) -> None:
        """What every connection needs: the waiting time first, since switching to WAL may have to wait."""
        connection.isolation_level = None  # we say BEGIN ourselves, so that tables change within a transaction too
        always = "journal_mode = WAL", "foreign_keys = ON", "secure_delete = ON"  # what is deleted is overwritten
        for pragma in (f"busy_timeout = {busy_timeout_milliseconds}", *always):
            connection.execute(f"PRAGMA {pragma}")

    def begin(connection: Connection) -> None:
        is_reading = connection.get_execution_options().get("reading", False)
        connection.exec_driver_sql("BEGIN" if is_reading else "BEGIN IMMEDIATE")

    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url) if pooled else create_engine(url, poolclass=NullPool)
    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", begin)
    return engine


def _config() -> Config:
    config = Config()
    folder = str(files("app.store").joinpath("migrations"))
    config.set_main_option("script_location", folder.replace("%", "%%"))
    return config
