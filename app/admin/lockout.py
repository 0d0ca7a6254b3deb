"""What keeps guessers out: a one-time token for the first password, and pauses between attempts at the one there is.

The token is for whoever can read what `serve` prints; it works once, within half an hour. A password may be tried a few
times at once, then after pauses that double, by address and altogether. Each attempt counts before it is checked, so
that many at once gain nothing; attempts during a pause do not prolong it. Only so many addresses are remembered.
Whoever sits at this computer is held back by the own mistakes alone.
"""

import asyncio
import hashlib
import ipaddress
import math
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from app.core.ports import Clock
from app.serving.errors import Rejected

FREE_ATTEMPTS = 5
FREE_ATTEMPTS_ALTOGETHER = 30
LONGEST_PAUSE_SECONDS = 15 * 60
LONGEST_PAUSE_ALTOGETHER_SECONDS = 60
FORGET_SECONDS = 24 * 3600
MAX_ADDRESSES = 1024
LOOPBACK = "this computer"
TOKEN_BYTES = 32
VALID_SECONDS = 30 * 60


@dataclass(slots=True)
class _Tally:
    failures: int = 0
    next_at: float = 0.0
    seen_at: float = 0.0


class Lockout:
    """The attempts of one server process. Times are seconds of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._altogether = _Tally()
        self._by_address: OrderedDict[str, _Tally] = OrderedDict()
        self.guessing = asyncio.Lock()
        """Guesses wait here for each other, not in the threads that everybody needs."""

    def begin(self, address: str) -> None:
        """Count an attempt. Raises `Rejected` (429) when it comes too early."""
        now = self._clock()
        place = place_of(address)
        tally = self._tally(place, now)
        is_near = place == LOOPBACK
        wait = max(tally.next_at, 0.0 if is_near else self._altogether.next_at) - now
        if wait > 0:
            seconds = math.ceil(wait)
            raise Rejected(
                429, f"Too many attempts: try again in {seconds} s.", "too_many_attempts", retry_after_seconds=seconds
            )
        _count(tally, now, FREE_ATTEMPTS, LONGEST_PAUSE_SECONDS)
        if not is_near:
            self._forget(self._altogether, now)
            _count(self._altogether, now, FREE_ATTEMPTS_ALTOGETHER, LONGEST_PAUSE_ALTOGETHER_SECONDS)

    def succeed(self, address: str) -> None:
        """The attempt was right: this address begins anew."""
        place = place_of(address)
        self._by_address.pop(place, None)
        if place != LOOPBACK:
            self._altogether.failures = max(0, self._altogether.failures - 1)

    def _tally(self, place: str, now: float) -> _Tally:
        tally = self._by_address.setdefault(place, _Tally(seen_at=now))
        self._by_address.move_to_end(place)
        if len(self._by_address) > MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        self._forget(tally, now)
        return tally

    def _forget(self, tally: _Tally, now: float) -> None:
        if now - tally.seen_at >= FORGET_SECONDS:
            tally.failures, tally.next_at = 0, 0.0


def _count(tally: _Tally, now: float, free: int, longest_seconds: int) -> None:
    tally.failures += 1
    tally.seen_at = now
    over = tally.failures - free
    tally.next_at = now + min(2.0 ** min(over, 30), longest_seconds) if over >= 0 else 0.0


def place_of(address: str) -> str:
    """What counts as one address: this computer, an IPv4 address, or a whole IPv6 network of one customer."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    mapped = getattr(parsed, "ipv4_mapped", None)
    parsed = mapped or parsed
    if parsed.is_loopback:
        return LOOPBACK
    return str(parsed) if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))


class SetupToken:
    """At most one token at a time, of which only the hash is kept. Times are seconds of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._digest = b""
        self._ends_at = 0.0
        self.in_use = asyncio.Lock()
        """One set-up at a time."""

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
