"""Stores with damaged bytes or values: `paceline serve` starts with each, and admits no client without a key."""

import contextlib
import random
import shutil
import sqlite3
from pathlib import Path

import httpx2

from app.store.accounts import Accounts
from app.store.conversations import ConversationHeader, Conversations
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from app.store.tables import MessageRow
from campaign.attack import TurnContext
from campaign.server import launch, shut_down

ANSWER_SECONDS = 60.0
PAGE_BYTES = 4096
VALUES: tuple[object, ...] = (
    *("trux", "NaN", "1e400", "", "\x00", "[", '{"a":', "null", "[[[[", '"x', "9" * 400, "é" * 1000),
    *(b"\xff\xfe\xdf", b"", -1, (1 << 63) - 1, 0.5, None),
)
"""Values that replace a stored one, without touching SQLite's own bytes."""


async def damaged_store(context: TurnContext) -> None:
    """Damage one store, and start a server with it."""
    home = context.server.folder / "damaged"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(home)
    home.mkdir()
    fill_store(home / FILE_NAME)
    damage = context.rng.choice((damage_bytes, damage_pages, damage_value, damage_value, damage_protection))
    description = f"{damage.__name__}: {damage(home / FILE_NAME, context.rng)}"
    context.begin(description)
    context.findings.tried += 1
    environment = {name: value for name, value in context.server.environment.items() if name != "PACELINE_API_KEY"}
    environment["PACELINE_HOME"] = str(home)
    try:
        process, address = await launch(environment, home / "log")
    except RuntimeError as error:
        context.findings.failures.append(f"{description}: {error}")
        return
    async with httpx2.AsyncClient(trust_env=False) as anybody:
        answer = await anybody.get(f"{address}/v1/models", timeout=ANSWER_SECONDS)
    context.findings.expect(answer.status_code == 401, f"{description}: open without a key ({answer.status_code})")
    code = await shut_down(process)
    context.findings.expect(code == 0, f"{description}: `serve` ended with {code}")


def fill_store(path: Path) -> None:
    """Create a store that requires keys and has rows in several tables."""
    with contextlib.closing(Store(path)) as store:
        accounts = Accounts(store)
        for number in range(5):
            accounts.keys.create(f"key {number}", "inference")
        StoredSettings(store).change_settings({"require_key": True, "theme": "dark", "max_rows": 4}, source="campaign")
        turns = [
            MessageRow(conversation_id=1, turn=f"t{number}", content="words " * 300, role="user") for number in range(5)
        ]
        conversations = Conversations(store)
        conversations.add(1, 0, turns, ConversationHeader("Kept", "", {}))


def damage_bytes(path: Path, rng: random.Random) -> str:
    """Change some random bytes."""
    content = bytearray(path.read_bytes())
    offsets = [rng.randrange(len(content)) for _ in range(rng.choice((1, 4, 64)))]
    for offset in offsets:
        content[offset] = rng.randrange(256)
    path.write_bytes(content)
    return f"{len(offsets)} bytes, the first at {offsets[0]}"


def damage_pages(path: Path, rng: random.Random) -> str:
    """Overwrite a page with zeros or noise, or cut the file there."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content) // PAGE_BYTES) * PAGE_BYTES
    kind = rng.choice(("zeros", "noise", "cut"))
    content[start : start + PAGE_BYTES] = bytes(PAGE_BYTES) if kind == "zeros" else rng.randbytes(PAGE_BYTES)
    path.write_bytes(content[:start] if kind == "cut" else content)
    return f"{kind} at {start}"


def damage_value(path: Path, rng: random.Random) -> str:
    """Change one column of one row in a random table."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        filled_tables = [name for name in tables if file.execute(f'SELECT 1 FROM "{name}"').fetchone()]  # noqa: S608
        table = rng.choice(filled_tables)
        column = rng.choice([row[1] for row in file.execute(f'PRAGMA table_info("{table}")')])
        return set_value(file, table, column, rng)


def damage_protection(path: Path, rng: random.Random) -> str:
    """Change the setting that requires keys."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        return set_value(file, "setting", "value", rng, "WHERE name = 'require_key'")


def set_value(file: sqlite3.Connection, table: str, column: str, rng: random.Random, where: str = "") -> str:
    """Change one value, unless its column cannot store the new one."""
    value = rng.choice(VALUES)
    rows = where or f'WHERE rowid = (SELECT rowid FROM "{table}" LIMIT 1)'  # noqa: S608
    with contextlib.suppress(sqlite3.IntegrityError, sqlite3.OperationalError), file:
        file.execute(f'UPDATE "{table}" SET "{column}" = ? {rows}', (value,))  # noqa: S608
    return f"{table}.{column} = {value!r:.40}"
