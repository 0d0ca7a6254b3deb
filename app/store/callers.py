"""Who may come in: browsers that signed in and API keys, by random secrets of which the store knows only the SHA-256.

A session ends after seven days without use and thirty days in any case; a key when it is revoked. When one was last
used is written at most once a minute. Calls take milliseconds: make them in a thread.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from hashlib import sha256

from sqlalchemy import ColumnElement, func
from sqlmodel import Session, col, delete, select

from app.core.errors import InvalidRequest, StoreUnavailable
from app.store.store import Store
from app.store.tables import KeyRow, Scope, SessionRow

SECRET_BYTES = 32
IDLE_SECONDS = 7 * 24 * 3600.0
ABSOLUTE_SECONDS = 30 * 24 * 3600.0
MAX_SESSIONS = 50
"""More end the ones that were used least recently."""
BROWSER_CHARACTERS = 200
PREFIX = "pl-"
HINT_CHARACTERS = 7
MAX_KEYS = 200
NAME_CHARACTERS = 80
NOTE_SECONDS = 60.0
MAX_REMEMBERED = 1000

logger = logging.getLogger(__name__)


def digest_of(secret: str) -> str:
    """What the store knows of a secret."""
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class LastUse:
    """Writes when a row was last used, in its `column`, and never in the way of the use itself.

    A full disk or a busy file costs the note, not the request.
    """

    def __init__(self, store: Store, table: type[SessionRow] | type[KeyRow], column: str) -> None:
        self._store = store
        self._table = table
        self._column = column
        self._tried_at: dict[str | int, float] = {}

    def note(self, row_id: str | int, used_at: float | None, now: float) -> None:
        """The row was used `now`; `used_at` is what it says."""
        if used_at is not None and now - used_at < NOTE_SECONDS:
            return
        if now - self._tried_at.get(row_id, now - NOTE_SECONDS) < NOTE_SECONDS:
            return
        if len(self._tried_at) >= MAX_REMEMBERED:
            self._tried_at.clear()
        self._tried_at[row_id] = now
        try:
            with self._store.session() as session:
                row = session.get(self._table, row_id)
                if row is not None:
                    setattr(row, self._column, now)
        except StoreUnavailable as error:
            logger.warning("A last use could not be written: %s", error.message)


class Sessions:
    """The browsers of the one account. `clock` tells Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._last_use = LastUse(store, SessionRow, "seen_at")

    def begin(self, browser: str, *, instead_of: str | None = None) -> str:
        """A new session and the secret for its cookie; `instead_of` is the secret of the one that ends for it."""
        secret = secrets.token_urlsafe(SECRET_BYTES)
        now = self._clock()
        row = SessionRow(id=digest_of(secret), created_at=now, seen_at=now, browser=browser[:BROWSER_CHARACTERS])
        with self._store.session(vital=True) as session:
            if instead_of is not None:
                session.exec(delete(SessionRow).where(col(SessionRow.id) == digest_of(instead_of)))
            self._forget_expired(session)
            newest = select(SessionRow.id).order_by(col(SessionRow.seen_at).desc()).limit(MAX_SESSIONS - 1)
            session.exec(delete(SessionRow).where(col(SessionRow.id).not_in(newest)))
            session.add(row)
        return secret

    def is_open(self, secret: str) -> bool:
        """Whether this secret belongs to a session that has not ended; its use is noted."""
        now = self._clock()
        if not self._store.exists:
            return False
        with self._store.reading() as session:
            row = session.get(SessionRow, digest_of(secret))
        if row is None or not _is_alive(row, now):
            return False
        self._last_use.note(row.id, row.seen_at, now)
        return True

    def end(self, secret: str) -> None:
        """Sign this one browser out."""
        with self._store.session(vital=True) as session:
            session.exec(delete(SessionRow).where(col(SessionRow.id) == digest_of(secret)))

    def end_all(self, *, but: str | None = None) -> None:
        """Sign every browser out, except the one with the secret `but`."""
        with self._store.session(vital=True) as session:
            session.exec(delete(SessionRow).where(col(SessionRow.id) != (digest_of(but) if but else "")))

    def list(self) -> Sequence[SessionRow]:
        """The sessions that are open, the last used first."""
        now = self._clock()
        if not self._store.exists:
            return []
        with self._store.reading() as session:
            rows = session.exec(select(SessionRow).order_by(col(SessionRow.seen_at).desc())).all()
        return [row for row in rows if _is_alive(row, now)]

    def _forget_expired(self, session: Session) -> None:
        now = self._clock()
        for row in session.exec(select(SessionRow)).all():
            if not _is_alive(row, now):
                session.delete(row)


def _is_alive(row: SessionRow, now: float) -> bool:
    return now - row.seen_at < IDLE_SECONDS and now - row.created_at < ABSOLUTE_SECONDS


class Keys:
    """The keys that were made and not revoked, each shown once when it is made. `clock` tells Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._last_use = LastUse(store, KeyRow, "used_at")

    def create(self, name: str, scope: Scope) -> tuple[KeyRow, str]:
        """A new key, and its text for this one time. Raises `InvalidRequest` for a name that says nothing."""
        name = " ".join(name.split())
        if not name or len(name) > NAME_CHARACTERS or not name.isprintable():
            raise InvalidRequest(
                f"Give the key a name of 1 to {NAME_CHARACTERS} characters.", parameter="name", code="invalid_name"
            )
        text = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        row = KeyRow(
            name=name, digest=digest_of(text), hint=text[:HINT_CHARACTERS], scope=scope, created_at=self._clock()
        )
        with self._store.session(vital=True) as session:
            if session.exec(select(func.count()).select_from(KeyRow).where(_active())).one() >= MAX_KEYS:
                raise InvalidRequest(f"There are {MAX_KEYS} keys already: revoke one first.", code="too_many_keys")
            if session.exec(select(KeyRow.id).where(KeyRow.name == name, _active())).first() is not None:
                raise InvalidRequest(
                    f"There is a key called {name} already: choose another name, or revoke that one first.",
                    parameter="name",
                    code="name_taken",
                )
            session.add(row)
        return row, text

    def find(self, text: str) -> KeyRow | None:
        """The key with this text, unless it was revoked; its use is noted."""
        if not text.startswith(PREFIX) or not self._store.exists:
            return None
        with self._store.reading() as session:
            row = session.exec(select(KeyRow).where(KeyRow.digest == digest_of(text), _active())).one_or_none()
        if row is not None:
            self._last_use.note(row.id, row.used_at, self._clock())
        return row

    def list(self) -> Sequence[KeyRow]:
        """Every key that opens something, the newest first."""
        if not self._store.exists:
            return []
        with self._store.reading() as session:
            return session.exec(select(KeyRow).where(_active()).order_by(col(KeyRow.id).desc())).all()

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
