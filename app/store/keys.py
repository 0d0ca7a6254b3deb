"""API keys: shown once when they are made; afterwards the store knows only their SHA-256.

Calls take milliseconds: make them in a thread.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from sqlalchemy import ColumnElement, func
from sqlmodel import col, select

from app.core.errors import InvalidRequest
from app.store.last_use import LastUse
from app.store.store import Store
from app.store.tables import KeyRow

PREFIX = "pl-"
KEY_BYTES = 32
HINT_CHARACTERS = 7
MAX_KEYS = 200
NAME_CHARACTERS = 80

Scope = Literal["inference", "admin"]


@dataclass(frozen=True, slots=True)
class Key:
    """What may be told about a key; `hint` is how it begins. Times are Unix seconds."""

    id: int
    name: str
    scope: Scope
    hint: str
    created_at: float
    used_at: float | None


class Keys:
    """The keys that were made and not revoked. `clock` tells Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._last_use = LastUse(store, KeyRow, "used_at")

    def create(self, name: str, scope: Scope) -> tuple[Key, str]:
        """A new key, and its text for this one time. Raises `InvalidRequest` for a name that says nothing."""
        name = " ".join(name.split())
        if not name or len(name) > NAME_CHARACTERS or not name.isprintable():
            raise InvalidRequest(
                f"Give the key a name of 1 to {NAME_CHARACTERS} characters.", parameter="name", code="invalid_name"
            )
        text = PREFIX + secrets.token_urlsafe(KEY_BYTES)
        row = KeyRow(
            name=name, digest=_digest(text), hint=text[:HINT_CHARACTERS], scope=scope, created_at=self._clock()
        )
        with self._store.session() as session:
            if session.exec(select(func.count()).select_from(KeyRow).where(_active())).one() >= MAX_KEYS:
                raise InvalidRequest(f"There are {MAX_KEYS} keys already: revoke one first.", code="too_many_keys")
            if session.exec(select(KeyRow.id).where(KeyRow.name == name, _active())).first() is not None:
                raise InvalidRequest(
                    f"There is a key called {name} already: choose another name, or revoke that one first.",
                    parameter="name",
                    code="name_taken",
                )
            session.add(row)
            session.flush()
            key = _key_of(row)
        return key, text

    def find(self, text: str) -> Key | None:
        """The key with this text, unless it was revoked; its use is noted once a minute."""
        if not self._store.exists:
            return None
        with self._store.reading() as session:
            row = session.exec(select(KeyRow).where(KeyRow.digest == _digest(text), _active())).one_or_none()
        if row is None:
            return None
        self._last_use.note(row.id, row.used_at, self._clock())
        return _key_of(row)

    def list(self) -> list[Key]:
        """Every key that opens something, the newest first."""
        if not self._store.exists:
            return []
        with self._store.reading() as session:
            rows = session.exec(select(KeyRow).where(_active()).order_by(col(KeyRow.id).desc())).all()
        return [_key_of(row) for row in rows]

    def revoke(self, key_id: int) -> bool:
        """End a key for good; False when there is none with this id. Its row stays, for the history of requests."""
        with self._store.session(vital=True) as session:
            row = session.exec(select(KeyRow).where(KeyRow.id == key_id, _active())).one_or_none()
            if row is None:
                return False
            row.revoked_at = self._clock()
            return True


def _active() -> ColumnElement[bool]:
    return col(KeyRow.revoked_at).is_(None)


def _key_of(row: KeyRow) -> Key:
    scope: Scope = "admin" if row.scope == "admin" else "inference"
    return Key(row.id or 0, row.name, scope, row.hint, row.created_at, row.used_at)


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
