"""Browsers that signed in: random ids that live in their cookie, of which the store knows only the SHA-256.

A session ends after seven days without use and thirty days in any case. Calls take milliseconds: make them in a thread.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from sqlmodel import Session, col, delete, select

from app.store.last_use import LastUse
from app.store.store import Store
from app.store.tables import SessionRow

ID_BYTES = 32
IDLE_SECONDS = 7 * 24 * 3600.0
ABSOLUTE_SECONDS = 30 * 24 * 3600.0
MAX_SESSIONS = 50
"""More end the ones that were used least recently."""
BROWSER_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """One signed-in browser; `id` tells it apart and opens nothing. Times are Unix seconds."""

    id: str
    browser: str
    created_at: float
    seen_at: float
    is_current: bool


class Sessions:
    """The sessions of the one account. `clock` tells Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._last_use = LastUse(store, SessionRow, "seen_at")

    def begin(self, browser: str, *, instead_of: str | None = None) -> str:
        """A new session and the secret for its cookie; `instead_of` is the secret of the one that ends for it."""
        secret = secrets.token_urlsafe(ID_BYTES)
        now = self._clock()
        row = SessionRow(id=_digest(secret), created_at=now, seen_at=now, browser=browser[:BROWSER_CHARACTERS])
        with self._store.session(vital=True) as session:
            if instead_of is not None:
                session.exec(delete(SessionRow).where(col(SessionRow.id) == _digest(instead_of)))
            self._forget_expired(session)
            newest = select(SessionRow.id).order_by(col(SessionRow.seen_at).desc()).limit(MAX_SESSIONS - 1)
            session.exec(delete(SessionRow).where(col(SessionRow.id).not_in(newest)))
            session.add(row)
        return secret

    def is_open(self, secret: str) -> bool:
        """Whether this secret belongs to a session that has not ended; its use is noted once a minute."""
        now = self._clock()
        if not self._store.exists:
            return False
        with self._store.reading() as session:
            row = session.get(SessionRow, _digest(secret))
        if row is None or not _is_alive(row, now):
            return False
        self._last_use.note(row.id, row.seen_at, now)
        return True

    def end(self, secret: str) -> None:
        """Sign this one browser out."""
        with self._store.session(vital=True) as session:
            session.exec(delete(SessionRow).where(col(SessionRow.id) == _digest(secret)))

    def end_all(self, *, but: str | None = None) -> None:
        """Sign every browser out, except the one with the secret `but`."""
        with self._store.session(vital=True) as session:
            session.exec(delete(SessionRow).where(col(SessionRow.id) != (_digest(but) if but else "")))

    def list(self, current: str | None = None) -> list[BrowserSession]:
        """The sessions that are open, the last used first; `current` is the secret of the one that asks."""
        now = self._clock()
        own = _digest(current) if current else ""
        if not self._store.exists:
            return []
        with self._store.reading() as session:
            rows = session.exec(select(SessionRow).order_by(col(SessionRow.seen_at).desc())).all()
        return [
            BrowserSession(row.id[:12], row.browser, row.created_at, row.seen_at, row.id == own)
            for row in rows
            if _is_alive(row, now)
        ]

    def _forget_expired(self, session: Session) -> None:
        now = self._clock()
        for row in session.exec(select(SessionRow)).all():
            if not _is_alive(row, now):
                session.delete(row)


def _is_alive(row: SessionRow, now: float) -> bool:
    return now - row.seen_at < IDLE_SECONDS and now - row.created_at < ABSOLUTE_SECONDS


def _digest(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
