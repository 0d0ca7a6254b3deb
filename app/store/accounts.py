"""The one person who may open the dashboard: a password, the browsers that signed in, and the API keys.

Everything is in the store, nothing in memory, so `paceline password` and `paceline keys` work beside a running server.
Of a password, length is all that is asked for, and that it is none of the first words anybody tries (NIST SP 800-63B).
"""

import base64
import hashlib
import logging
import secrets
import threading
import time
import unicodedata
from collections.abc import Callable

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlmodel import Session

from app.core.errors import InvalidRequest, StoreUnavailable
from app.store.callers import Keys, Sessions
from app.store.glance import LOCKED_DOWN
from app.store.store import Store
from app.store.tables import AccountRow, SettingRow

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
"""How the hashes of an earlier Paceline begin."""
SCRYPT_MEMORY_BYTES = 256 * 1024 * 1024

logger = logging.getLogger(__name__)


class Accounts:
    """The account of a store. `clock` tells Unix seconds; `hasher` says what one guess at the password costs."""

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
        """Whether the store was damaged: then nothing is open without a key until a new account is set up."""
        return self._store.locked_down

    @property
    def has_account(self) -> bool:
        """Whether somebody set a password that still counts."""
        return not self.is_locked_down and self._hash() is not None

    def set_up(self, password: str) -> bool:
        """Make the account; False when there is one already. Raises `InvalidRequest` for a bad password."""
        if self.is_locked_down:
            self.set_password(password)
            return True
        made = self._hashed(password)
        with self._store.session(vital=True) as session:
            if session.get(AccountRow, ACCOUNT) is not None:
                return False
            self._keep(session, made)
        return True

    def set_password(self, password: str) -> None:
        """Make the account or change its password; every session ends. Raises `InvalidRequest` for a bad password.

        Nobody but the owner of the files, or somebody signed in, may call this: it also ends a lock-down.
        """
        made = self._hashed(password)
        with self._store.session(vital=True) as session:
            self._keep(session, made)
            lock = session.get(SettingRow, LOCKED_DOWN)
            if lock is not None:
                session.delete(lock)
        self.sessions.end_all()

    def is_password(self, password: str) -> bool:
        """Whether this is the password; takes the same time when there is no account. One at a time."""
        stored = None if self.is_locked_down else self._hash()
        with self._hashing:
            if stored is None:
                self._hasher.hash(_normal(password))
                return False
            is_right = is_hash_of(stored, password, self._hasher)
        if is_right and (stored.startswith(SCRYPT) or self._hasher.check_needs_rehash(stored)):
            self._renew(stored, password)
        return is_right

    def _hashed(self, password: str) -> str:
        check_password(password)
        with self._hashing:
            return self._hasher.hash(_normal(password))

    def _hash(self) -> str | None:
        if not self._store.exists:
            return None
        with self._store.reading() as session:
            row = session.get(AccountRow, ACCOUNT)
            return None if row is None else row.password_hash

    def _keep(self, session: Session, made: str) -> None:
        now = self._clock()
        row = session.get(AccountRow, ACCOUNT) or AccountRow(id=ACCOUNT, created_at=now)
        row.password_hash, row.changed_at = made, now
        session.add(row)

    def _renew(self, stored: str, password: str) -> None:
        """The same password under a hash of today, unless it was changed meanwhile."""
        with self._hashing:
            made = self._hasher.hash(_normal(password))
        try:
            with self._store.session(vital=True) as session:
                row = session.get(AccountRow, ACCOUNT)
                if row is not None and row.password_hash == stored:
                    row.password_hash = made
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


def is_hash_of(stored: str, password: str, hasher: PasswordHasher) -> bool:
    """Whether `stored` was made of `password`, by argon2 or once by scrypt; a string that is no hash matches nothing.

    Takes a fifth of a second on purpose, so call it in a thread.
    """
    try:
        if not stored.startswith(SCRYPT):
            return hasher.verify(stored, _normal(password))
        _, n, r, p, salt, digest = stored.split("$")
        cost = {"n": int(n), "r": int(r), "p": int(p), "dklen": 32, "maxmem": SCRYPT_MEMORY_BYTES}
        made = hashlib.scrypt(_normal(password), salt=base64.b64decode(salt, validate=True), **cost)
        return secrets.compare_digest(made, base64.b64decode(digest, validate=True))
    except (VerificationError, InvalidHashError, ValueError):
        return False


def _normal(password: str) -> bytes:
    """Two keyboards may write one letter in two ways: NFKC makes them one. Overlong input costs no more than any."""
    return unicodedata.normalize("NFKC", password[: MAX_CHARACTERS + 1]).encode("utf-8", "surrogatepass")
