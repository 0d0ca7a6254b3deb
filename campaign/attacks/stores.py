"""Stores with damaged bytes or values: `paceline serve` starts with each, and admits no client without a key."""

import contextlib
import random
import shutil
import sqlite3
from pathlib import Path

import httpx2

from app.store.accounts import Accounts
from app.store.conversations import Beginning, Conversations
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from app.store.tables import MessageRow
from campaign.attack import Arena
from campaign.server import end, launch

ANSWER_SECONDS = 60.0
PAGE_BYTES = 4096
VALUES: tuple[object, ...] = (
    *("trux", "NaN", "1e400", "", "\x00", "[", '{"a":', "null", "[[[[", '"x', "9" * 400, "é" * 1000),
    *(b"\xff\xfe\xdf", b"", -1, (1 << 63) - 1, 0.5, None),
)
"""Values that replace a stored one, without touching SQLite's own bytes."""


async def damaged_store(arena: Arena) -> None:
    """Damage one store, and start a server with it."""
    home = arena.server.folder / "damaged"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(home)
    home.mkdir()
    fill(home / FILE_NAME)
    damage = arena.chance.choice((damage_bytes, damage_pages, damage_value, damage_value, damage_protection))
    description = f"{damage.__name__}: {damage(home / FILE_NAME, arena.chance)}"
    arena.begin(description)
    arena.findings.tried += 1
    environment = {name: value for name, value in arena.server.environment.items() if name != "PACELINE_API_KEY"}
    environment["PACELINE_HOME"] = str(home)
    try:
        process, address = await launch(environment, home / "log")
    except RuntimeError as error:
        arena.findings.failures.append(f"{description}: {error}")
        return
    async with httpx2.AsyncClient(trust_env=False) as anybody:
        answer = await anybody.get(f"{address}/v1/models", timeout=ANSWER_SECONDS)
    arena.findings.expect(answer.status_code == 401, f"{description}: open without a key ({answer.status_code})")
    code = await end(process)
    arena.findings.expect(code == 0, f"{description}: `serve` ended with {code}")


def fill(path: Path) -> None:
    """Create a store with a bit of everything that requires keys."""
    with contextlib.closing(Store(path)) as store:
        accounts = Accounts(store)
        for number in range(5):
            accounts.keys.create(f"key {number}", "inference")
        StoredSettings(store).change_settings({"require_key": True, "theme": "dark", "max_rows": 4}, source="campaign")
        turns = [
            MessageRow(conversation_id=1, turn=f"t{number}", content="words " * 300, role="user") for number in range(5)
        ]
        conversations = Conversations(store)
        conversations.add(1, 0, turns, Beginning("Kept", "", {}))


def damage_bytes(path: Path, chance: random.Random) -> str:
    """Change some random bytes."""
    content = bytearray(path.read_bytes())
    places = [chance.randrange(len(content)) for _ in range(chance.choice((1, 4, 64)))]
    for place in places:
        content[place] = chance.randrange(256)
    path.write_bytes(content)
    return f"{len(places)} bytes, the first at {places[0]}"


def damage_pages(path: Path, chance: random.Random) -> str:
    """Overwrite a page with zeros or noise, or cut the file there."""
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content) // PAGE_BYTES) * PAGE_BYTES
    kind = chance.choice(("zeros", "noise", "cut"))
    content[at : at + PAGE_BYTES] = bytes(PAGE_BYTES) if kind == "zeros" else chance.randbytes(PAGE_BYTES)
    path.write_bytes(content[:at] if kind == "cut" else content)
    return f"{kind} at {at}"


def damage_value(path: Path, chance: random.Random) -> str:
    """Change one column of one row in a random table."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        filled = [name for name in tables if file.execute(f'SELECT 1 FROM "{name}"').fetchone()]  # noqa: S608
        table = chance.choice(filled)
        column = chance.choice([row[1] for row in file.execute(f'PRAGMA table_info("{table}")')])
        return set_value(file, table, column, chance)


def damage_protection(path: Path, chance: random.Random) -> str:
    """Change the setting that requires keys."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        return set_value(file, "setting", "value", chance, "WHERE name = 'require_key'")


def set_value(file: sqlite3.Connection, table: str, column: str, chance: random.Random, where: str = "") -> str:
    """Change one value; one that cannot be stored there is left as it was."""
    value = chance.choice(VALUES)
    rows = where or f'WHERE rowid = (SELECT rowid FROM "{table}" LIMIT 1)'  # noqa: S608
    with contextlib.suppress(sqlite3.IntegrityError, sqlite3.OperationalError), file:
        file.execute(f'UPDATE "{table}" SET "{column}" = ? {rows}', (value,))  # noqa: S608
    return f"{table}.{column} = {value!r:.40}"
