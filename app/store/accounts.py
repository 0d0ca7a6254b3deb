"""The one person who may open the dashboard: a password, the browsers that signed in, and the API keys.

Everything is in the store, nothing in memory, so `paceline password` and `paceline keys` work beside a running server.
"""

import threading
import time
from collections.abc import Callable

from app.store.keys import Keys
from app.store.passwords import ScryptCost, check_password, hash_password, is_password
from app.store.sessions import Sessions
from app.store.store import Store
from app.store.tables import AccountRow

ACCOUNT = 1


class Accounts:
    """The account of a store. `clock` tells Unix seconds; `cost` is what one guess at the password costs."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time, cost: ScryptCost | None = None) -> None:
        self.sessions = Sessions(store, clock)
        self.keys = Keys(store, clock)
        self._store = store
        self._clock = clock
        self._cost = cost or ScryptCost()
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
        check_password(password)
        made = self._hashed(password)
        now = self._clock()
        with self._store.session() as session:
            if session.get(AccountRow, ACCOUNT) is not None:
                return False
            session.add(AccountRow(id=ACCOUNT, password_hash=made, created_at=now, changed_at=now))
        return True

    def set_password(self, password: str) -> None:
        """Make the account or change its password; every session ends. Raises `InvalidRequest` for a bad password.

        Nobody but the owner of the files, or somebody signed in, may call this: it also ends a lock-down.
        """
        check_password(password)
        self._replace(self._hashed(password))
        self._store.unlock()

    def is_password(self, password: str) -> bool:
        """Whether this is the password; takes the same time when there is no account. One at a time."""
        stored = None if self.is_locked_down else self._hash()
        with self._hashing:
            if stored is None:
                hash_password(password, self._cost)
                return False
            return is_password(password, stored)

    def _hashed(self, password: str) -> str:
        with self._hashing:
            return hash_password(password, self._cost)

    def _hash(self) -> str | None:
        if not self._store.exists:
            return None
        with self._store.reading() as session:
            row = session.get(AccountRow, ACCOUNT)
            return None if row is None else row.password_hash

    def _replace(self, made: str) -> None:
        now = self._clock()
        with self._store.session(vital=True) as session:
            row = session.get(AccountRow, ACCOUNT) or AccountRow(id=ACCOUNT, created_at=now)
            row.password_hash, row.changed_at = made, now
            session.add(row)
        self.sessions.end_all()
