"""Guards against guessing: a one-time code for setting the first password, and pauses between password attempts.

The code goes to the person who sees the output of `serve`; it works once, within half an hour. The first few attempts
are free; after that, each attempt doubles the pause, per address and overall. An attempt counts before it is checked,
so that parallel attempts gain nothing; attempts during a pause do not prolong it. The number of remembered addresses is
bounded. Attempts from elsewhere never delay attempts from this computer.
"""

import asyncio
import hashlib
import ipaddress
import math
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from app.core.clock import Clock
from app.serving.errors import Rejected

FREE_ATTEMPTS = 5
FREE_ATTEMPTS_OVERALL = 30
LONGEST_PAUSE_SECONDS = 15 * 60
LONGEST_PAUSE_OVERALL_SECONDS = 60
FORGET_SECONDS = 24 * 3600
MAX_ADDRESSES = 1024
LOOPBACK = "this computer"
TOKEN_BYTES = 32
VALID_SECONDS = 30 * 60
ENTRY_SECONDS, MAX_OPEN_CODES = 60.0, 8
"""Validity of a sign-in address for the owner, in seconds, and limit on open codes of one kind (entry or set-up)."""


@dataclass(slots=True)
class _Tally:
    failures: int = 0
    next_at: float = 0.0
    last_attempt_at: float = 0.0


class Lockout:
    """Password attempts at one server process. Times are seconds of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._overall = _Tally()
        self._by_address: OrderedDict[str, _Tally] = OrderedDict()
        self.guessing = asyncio.Lock()
        """Lock that serializes guesses, so that they do not occupy threads that other requests need."""

    def begin(self, address: str) -> None:
        """Count an attempt. Raises `Rejected` (429) during a pause."""
        now = self._clock()
        key = address_key(address)
        tally = self._tally(key, now)
        is_local = key == LOOPBACK
        wait = max(tally.next_at, 0.0 if is_local else self._overall.next_at) - now
        if wait > 0:
            seconds = math.ceil(wait)
            raise Rejected(
                429, f"Too many attempts: try again in {seconds} s.", "too_many_attempts", retry_after_seconds=seconds
            )
        _count(tally, now, FREE_ATTEMPTS, LONGEST_PAUSE_SECONDS)
        if not is_local:
            self._reset_if_old(self._overall, now)
            _count(self._overall, now, FREE_ATTEMPTS_OVERALL, LONGEST_PAUSE_OVERALL_SECONDS)

    def succeed(self, address: str) -> None:
        """Clear the failures of this address after a correct attempt."""
        key = address_key(address)
        self._by_address.pop(key, None)
        if key != LOOPBACK:
            self._overall.failures = max(0, self._overall.failures - 1)

    def _tally(self, key: str, now: float) -> _Tally:
        tally = self._by_address.setdefault(key, _Tally(last_attempt_at=now))
        self._by_address.move_to_end(key)
        if len(self._by_address) > MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        self._reset_if_old(tally, now)
        return tally

    def _reset_if_old(self, tally: _Tally, now: float) -> None:
        if now - tally.last_attempt_at >= FORGET_SECONDS:
            tally.failures, tally.next_at = 0, 0.0


def _count(tally: _Tally, now: float, free: int, longest_seconds: int) -> None:
    tally.failures += 1
    tally.last_attempt_at = now
    over = tally.failures - free
    tally.next_at = now + min(2.0 ** min(over, 30), longest_seconds) if over >= 0 else 0.0


def address_key(address: str) -> str:
    """Return the key by which attempts are counted: this computer, an IPv4 address, or an IPv6 /64 (one customer)."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    mapped = getattr(parsed, "ipv4_mapped", None)
    parsed = mapped or parsed
    if parsed.is_loopback:
        return LOOPBACK
    return str(parsed) if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))


class OneTimeCodes:
    """Codes that work once, within `valid_seconds`. Only the newest `max_open` are valid, and only hashes are kept.

    Times are seconds of `clock`.
    """

    def __init__(self, clock: Clock, *, valid_seconds: float = VALID_SECONDS, max_open: int = 1) -> None:
        self._clock = clock
        self._valid_seconds = valid_seconds
        self._max_open = max_open
        self._open: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self.setup_lock = asyncio.Lock()
        """Lock that allows one set-up at a time."""

    def issue(self, purpose: str = "") -> str:
        """Return a new code for `purpose`; beyond `max_open`, the oldest code is revoked."""
        code = secrets.token_urlsafe(TOKEN_BYTES)
        self._open[_digest(code)] = (self._clock() + self._valid_seconds, purpose)
        while len(self._open) > self._max_open:
            self._open.popitem(last=False)
        return code

    def matches(self, code: str) -> bool:
        """Return whether this is a valid code."""
        ends_at, _ = self._open.get(_digest(code), (-math.inf, ""))
        return self._clock() < ends_at

    def redeem(self, code: str) -> str | None:
        """Revoke a code and return its purpose, or None if it was not valid."""
        is_open = self.matches(code)
        _, purpose = self._open.pop(_digest(code), (0.0, ""))
        return purpose if is_open else None


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).digest()
