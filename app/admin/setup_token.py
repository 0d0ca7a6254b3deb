"""The one-time token of the first run: whoever can read what `serve` prints may choose the password.

Only its hash is kept, in memory, for half an hour; it works once.
"""

import hashlib
import secrets

from app.core.ports import Clock

TOKEN_BYTES = 32
VALID_SECONDS = 30 * 60


class SetupToken:
    """At most one token at a time. Times are seconds of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._digest = b""
        self._ends_at = 0.0

    def issue(self) -> str:
        """A new token in the place of the last one."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._digest = _digest(token)
        self._ends_at = self._clock() + VALID_SECONDS
        return token

    @property
    def is_valid(self) -> bool:
        """Whether there is a token that still works."""
        return bool(self._digest) and self._clock() < self._ends_at

    def matches(self, token: str) -> bool:
        """Whether this is the token, and in time."""
        return secrets.compare_digest(_digest(token), self._digest) and self.is_valid

    def spend(self) -> None:
        """It was used: it works no more."""
        self._digest = b""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
