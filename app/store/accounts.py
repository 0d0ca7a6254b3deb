"""The one account of the dashboard: its password, the browsers that signed in, and the API keys.

The secrets of sessions and keys are random; the store has only their SHA-256. A session ends after seven days without
use, and after thirty days in any case; a key ends when it is revoked. The time of last use is written at most once a
minute. All of this is in the store, not in memory, so `paceline password` and `paceline keys` work while a server runs.
A password must only be long enough and not one of those that attackers try first (NIST SP 800-63B).
"""

import base64
import hashlib
import logging
import secrets
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from hashlib import sha256

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlalchemy import ColumnElement, func
from sqlmodel import Session, col, delete, select

from app.core.errors import InvalidRequest, StoreUnavailable
from app.store.snapshot import LOCKED_DOWN
from app.store.store import Store
from app.store.tables import AccountRow, KeyRow, Scope, SessionRow, SettingRow

SECRET_BYTES = 32
IDLE_SECONDS = 7 * 24 * 3600.0
ABSOLUTE_SECONDS = 30 * 24 * 3600.0
MAX_SESSIONS = 50
"""Maximum number of open sessions; beyond it, a new session ends the least recently used one."""
BROWSER_CHARACTERS = 200
PREFIX = "pl-"
HINT_CHARACTERS = 7
MAX_KEYS = 200
NAME_CHARACTERS = 80
WRITE_INTERVAL_SECONDS = 60.0
MAX_TRACKED = 1000

logger = logging.getLogger("paceline.accounts")


def digest_of(secret: str) -> str:
    """Return the digest of a secret; the store keeps only this."""
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class LastUse:
    """Records in `column` when a row was last used.

    A failed write never fails the use itself: on a full disk or a busy file, only the timestamp is lost.
    """

    def __init__(self, store: Store, table: type[SessionRow] | type[KeyRow], column: str) -> None:
        self._store = store
        self._table = table
        self._column = column
        self._attempted_at: dict[str | int, float] = {}

    def record(self, row_id: str | int, used_at: float | None, now: float) -> None:
        """Record that the row was used `now`; `used_at` is the stored time of its last use."""
        if used_at is not None and now - used_at < WRITE_INTERVAL_SECONDS:
            return
        if now - self._attempted_at.get(row_id, now - WRITE_INTERVAL_SECONDS) < WRITE_INTERVAL_SECONDS:
            return
        if len(self._attempted_at) >= MAX_TRACKED:
            self._attempted_at.clear()
        self._attempted_at[row_id] = now
        try:
            with self._store.session() as session:
                row = session.get(self._table, row_id)
                if row is not None:
                    setattr(row, self._column, now)
        except StoreUnavailable as error:
            logger.warning("The time of last use could not be stored: %s", error.message)


class Sessions:
    """The signed-in browsers of the one account. `clock` returns Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._last_use = LastUse(store, SessionRow, "seen_at")

    def begin(self, browser: str, *, replacing: str | None = None) -> str:
        """Begin a session and return the secret for its cookie; the session with the secret `replacing` ends."""
        secret = secrets.token_urlsafe(SECRET_BYTES)
        now = self._clock()
        row = SessionRow(id=digest_of(secret), created_at=now, seen_at=now, browser=browser[:BROWSER_CHARACTERS])
        with self._store.session(vital=True) as session:
            if replacing is not None:
                session.exec(delete(SessionRow).where(col(SessionRow.id) == digest_of(replacing)))
            self._delete_expired(session)
            newest = select(SessionRow.id).order_by(col(SessionRow.seen_at).desc()).limit(MAX_SESSIONS - 1)
            session.exec(delete(SessionRow).where(col(SessionRow.id).not_in(newest)))
            session.add(row)
        return secret

    def is_open(self, secret: str) -> bool:
        """Return whether this secret belongs to a session that has not ended, and record its use."""
        now = self._clock()
        with self._store.read_session() as session:
            row = session.get(SessionRow, digest_of(secret))
        if row is None or not _is_alive(row, now):
            return False
        self._last_use.record(row.id, row.seen_at, now)
        return True

    def end(self, secret: str) -> None:
        """Sign this one browser out."""
        with self._store.session(vital=True) as session:
            session.exec(delete(SessionRow).where(col(SessionRow.id) == digest_of(secret)))

    def end_all(self) -> None:
        """Sign every browser out."""
        with self._store.session(vital=True) as session:
            session.exec(delete(SessionRow))

    def list(self) -> Sequence[SessionRow]:
        """Return the open sessions, most recently used first."""
        now = self._clock()
        with self._store.read_session() as session:
            rows = session.exec(select(SessionRow).order_by(col(SessionRow.seen_at).desc())).all()
        return [row for row in rows if _is_alive(row, now)]

    def _delete_expired(self, session: Session) -> None:
        now = self._clock()
        for row in session.exec(select(SessionRow)).all():
            if not _is_alive(row, now):
                session.delete(row)


def _is_alive(row: SessionRow, now: float) -> bool:
    return now - row.seen_at < IDLE_SECONDS and now - row.created_at < ABSOLUTE_SECONDS


class Keys:
    """The API keys that are not revoked; each is shown once, when it is made. `clock` returns Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._last_use = LastUse(store, KeyRow, "used_at")

    def create(self, name: str, scope: Scope) -> tuple[KeyRow, str]:
        """Make a key and return its row and text. Raises `InvalidRequest` for a bad name or too many keys."""
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
        """Return the key with this text, unless it was revoked, and record its use."""
        if not text.startswith(PREFIX):
            return None
        with self._store.read_session() as session:
            row = session.exec(select(KeyRow).where(KeyRow.digest == digest_of(text), _active())).one_or_none()
        if row is not None:
            self._last_use.record(row.id, row.used_at, self._clock())
        return row

    def list(self) -> Sequence[KeyRow]:
        """Return every active key, newest first."""
        with self._store.read_session() as session:
            return session.exec(select(KeyRow).where(_active()).order_by(col(KeyRow.id).desc())).all()

    def revoke(self, key_id: int) -> bool:
        """End a key for good; return False when there is none with this id. Its row is kept for the request history."""
        with self._store.session(vital=True) as session:
            row = session.exec(select(KeyRow).where(KeyRow.id == key_id, _active())).one_or_none()
            if row is None:
                return False
            row.revoked_at = self._clock()
            return True


def _active() -> ColumnElement[bool]:
    return col(KeyRow.revoked_at).is_(None)


ACCOUNT = 1
MIN_CHARACTERS = 8
MAX_CHARACTERS = 1024
OBVIOUS_WORDS = """
password password1 passw0rd 12345678 123456789 1234567890 87654321 11111111 00000000 qwertyui qwertyuiop qwerty123
1q2w3e4r iloveyou sunshine princess football baseball superman starwars trustno1 letmein1 welcome1 admin123
administrator changeme paceline
"""
OBVIOUS = frozenset(OBVIOUS_WORDS.split())
SCRYPT = "scrypt$"
"""Prefix of the hashes that an earlier Paceline wrote."""
SCRYPT_MEMORY_BYTES = 256 * 1024 * 1024


class Accounts:
    """The account of a store. `clock` returns Unix seconds; `hasher` sets the cost of a guess at the password."""

    def __init__(
        self, store: Store, *, clock: Callable[[], float] = time.time, hasher: PasswordHasher | None = None
    ) -> None:
        self.sessions = Sessions(store, clock)
        self.keys = Keys(store, clock)
        self._store = store
        self._clock = clock
        self._hasher = hasher or PasswordHasher()
        self._hashing = threading.Lock()

    @property
    def is_locked_down(self) -> bool:
        """Whether the store was damaged: every request then needs a key until a new account is set up."""
        return self._store.locked_down

    @property
    def has_account(self) -> bool:
        """Whether a valid password is set."""
        return not self.is_locked_down and self._hash() is not None

    def set_up(self, password: str) -> bool:
        """Make the account; return False when there is one already. Raises `InvalidRequest` for a bad password."""
        if self.is_locked_down:
            self.set_password(password)
            return True
        new_hash = self._new_hash(password)
        with self._store.session(vital=True) as session:
            if session.get(AccountRow, ACCOUNT) is not None:
                return False
            self._save(session, new_hash)
        return True

    def set_password(self, password: str) -> None:
        """Make the account or change its password; every session ends. Raises `InvalidRequest` for a bad password.

        Callers allow this only to the owner of the files or to a signed-in person, since it also ends a lock-down.
        """
        new_hash = self._new_hash(password)
        with self._store.session(vital=True) as session:
            self._save(session, new_hash)
            lock = session.get(SettingRow, LOCKED_DOWN)
            if lock is not None:
                session.delete(lock)
            session.exec(delete(SessionRow))

    def is_password(self, password: str) -> bool:
        """Return whether this is the password. Checks one at a time, and takes as long when there is no account."""
        stored = None if self.is_locked_down else self._hash()
        with self._hashing:
            if stored is None:
                self._hasher.hash(_normalized(password))
                return False
            is_correct = matches_hash(stored, password, self._hasher)
        if is_correct and (stored.startswith(SCRYPT) or self._hasher.check_needs_rehash(stored)):
            self._rehash(stored, password)
        return is_correct

    def _new_hash(self, password: str) -> str:
        check_password(password)
        with self._hashing:
            return self._hasher.hash(_normalized(password))

    def _hash(self) -> str | None:
        with self._store.read_session() as session:
            row = session.get(AccountRow, ACCOUNT)
            return None if row is None else row.password_hash

    def _save(self, session: Session, new_hash: str) -> None:
        now = self._clock()
        row = session.get(AccountRow, ACCOUNT) or AccountRow(id=ACCOUNT, created_at=now)
        row.password_hash, row.changed_at = new_hash, now
        session.add(row)

    def _rehash(self, stored: str, password: str) -> None:
        """Hash the same password again with the current parameters, unless it was changed meanwhile."""
        with self._hashing:
            new_hash = self._hasher.hash(_normalized(password))
        try:
            with self._store.session(vital=True) as session:
                row = session.get(AccountRow, ACCOUNT)
                if row is not None and row.password_hash == stored:
                    row.password_hash = new_hash
        except StoreUnavailable as error:
            logger.warning("The hash of the password could not be renewed: %s", error.message)


def check_password(password: str) -> None:
    """Raise `InvalidRequest` for a password that may not be chosen."""
    if len(password) < MIN_CHARACTERS:
        raise InvalidRequest(
            f"Choose a password of at least {MIN_CHARACTERS} characters.", parameter="password", code="password_short"
        )
    if len(password) > MAX_CHARACTERS:
        raise InvalidRequest("This password is too long.", parameter="password", code="password_long")
    folded = password.strip().lower()
    if folded in OBVIOUS or len(set(folded)) < 3:
        raise InvalidRequest(
            "This password is one of the first that anybody tries: choose another.",
            parameter="password",
            code="password_obvious",
        )


def matches_hash(stored: str, password: str, hasher: PasswordHasher) -> bool:
    """Return whether `stored` is a hash of `password`, by argon2 or formerly scrypt; False if it is no hash at all.

    Takes a fifth of a second on purpose, so call it in a thread.
    """
    try:
        if not stored.startswith(SCRYPT):
            return hasher.verify(stored, _normalized(password))
        _, n, r, p, salt, digest = stored.split("$")
        cost = {"n": int(n), "r": int(r), "p": int(p), "dklen": 32, "maxmem": SCRYPT_MEMORY_BYTES}
        computed = hashlib.scrypt(_normalized(password), salt=base64.b64decode(salt, validate=True), **cost)
        return secrets.compare_digest(computed, base64.b64decode(digest, validate=True))
    except (VerificationError, InvalidHashError, ValueError, TypeError, OverflowError):
        return False


def _normalized(password: str) -> bytes:
    """Normalise to NFKC, since keyboards may write one letter in two ways, and cut overlong input to bound its cost."""
    return unicodedata.normalize("NFKC", password[: MAX_CHARACTERS + 1]).encode("utf-8", "surrogatepass")
