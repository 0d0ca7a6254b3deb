"""The seal: a digest of the schema and of every row that protects the server, kept in the store itself.

SQLite notices a broken page, but not a changed letter in it: `true` may become `tsue`, a revoked key may live
again. The digest changes with every such byte. It is renewed in the transaction that changes a guarded row, and it
protects against damage, not against somebody who may write the file.
"""

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

Read = Callable[[str], Sequence[Sequence[Any]]]
"""Runs one query and gives its rows."""

GUARDED = {
    "setting": ("name", "value", "source", "updated_at"),
    "model_settings": ("model_id", '"values"', "source", "updated_at"),
    "account": ("id", "password_hash", "created_at", "changed_at"),
    "api_key": ("id", "name", "digest", "hint", "scope", "created_at", "revoked_at"),
}
"""Table -> columns, the primary key first; when a key was last used is not worth a seal."""
SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY type, name"


def digest(read: Read) -> str:
    """The digest of what the queries find."""
    found = [SCHEMA, *(f"SELECT {', '.join(names)} FROM {table} ORDER BY 1" for table, names in GUARDED.items())]  # noqa: S608
    content = [[list(row) for row in read(query)] for query in found]
    return sha256(json.dumps(content, default=repr).encode()).hexdigest()


def is_intact(read: Read) -> bool:
    """Whether the digest in the store is that of its rows."""
    return [tuple(row) for row in read("SELECT id, digest FROM seal")] == [(1, digest(read))]


def statement(value: str) -> tuple[str, tuple[str]]:
    """SQL and its parameters: put this digest into the store."""
    return "INSERT OR REPLACE INTO seal (id, digest) VALUES (1, ?)", (value,)
