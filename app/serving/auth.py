"""Authorization, as a dependency of the whole application: a route is closed unless it is listed as public.

There are three kinds of routes: public ones; `/admin…`, for a session or an API key of scope `admin`; and all others,
for any API key where one is required, of scope `admin` where they change the models in memory. `identity_of` returns
the caller of a request.

Two things keep guessers out: a one-time code for setting the first password, and pauses between password attempts.
The code goes to the person who sees the output of `serve`; it works once, within half an hour. The first few attempts
are free; after that, the pause doubles with each one, per address and overall. An attempt counts before it is checked,
so that parallel ones gain nothing; attempts during a pause do not prolong it. The number of remembered addresses is
bounded. Attempts from elsewhere never delay those from this computer.
"""

import asyncio
import hashlib
import ipaddress
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from fastapi import Request
from starlette.exceptions import HTTPException

from app.core.clock import Clock
from app.core.setting_texts import is_loopback
from app.serving.errors import Rejected
from app.store.accounts import Accounts
from app.store.tables import Scope

COOKIE = "paceline_session"
PUBLIC_PATHS = frozenset(
    {
        "/",
        "/health",
        "/health/live",
        "/health/ready",
        "/admin/login",
        "/admin/setup",
        "/admin/enter",
        "/admin/api/login",
        "/admin/api/setup",
        "/admin/api/enter",
    }
)
"""Paths of the public routes, which do their own checks. None has a parameter."""
STATIC = "/static/"
ADMIN = "/admin"
ADMIN_JSON = "/admin/api/"


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller. `name` is the key's name or the way in; `key_id` distinguishes keys of the same name."""

    kind: Literal["anonymous", "environment", "command", "key", "session"]
    name: str = ""
    scope: Scope = "inference"
    key_id: int = 0

    @property
    def owner(self) -> str:
        """Owner for the worker: it differs between callers that must not learn of each other."""
        return f"{self.kind} {self.key_id}"


ANONYMOUS = Identity("anonymous")
ENVIRONMENT = Identity("environment", "PACELINE_API_KEY", "admin")
COMMAND = Identity("command", "command line", "admin")
SESSION = Identity("session", "dashboard", "admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Accounts, keys and settings that decide whether a caller is let in."""

    accounts: Accounts
    secret: str | None = None
    """Key from the environment; it grants full access."""
    own_key: str = field(default_factory=secrets.token_urlsafe)
    """Key that commands on this computer read from the server's file; it grants them full access."""
    requires_key: Callable[[], bool] = lambda: False
    """Whether the setting `require_key` is on, or other machines can reach the server."""

    @property
    def is_closed(self) -> bool:
        """Whether endpoints require a key."""
        return self.secret is not None or self.accounts.is_locked_down or self.requires_key()


async def authorize(request: Request) -> None:
    """Raise `Rejected` (401, 403) or redirect to the sign-in page, unless the caller may use this route."""
    request.state.identity = ANONYMOUS
    path = request.scope["path"]
    if is_public(getattr(request.scope.get("route"), "path", ""), path):
        return
    door: Door = request.app.state.door
    keys = _offered_keys(request.scope["headers"])
    if keys and all(_is_secret(key, door.secret) for key in keys):
        request.state.identity = ENVIRONMENT
        return
    if keys and is_from_here(request) and all(_is_secret(key, door.own_key) for key in keys):
        request.state.identity = COMMAND
        return
    is_admin = path == ADMIN or path.startswith(ADMIN + "/")
    cookie = request.cookies.get(COOKIE, "") if is_admin and not keys else ""
    request.state.identity = await asyncio.to_thread(_admit, door, path, keys, cookie, is_admin=is_admin)


async def authorize_operator(request: Request) -> None:
    """Raise `Rejected` (403) unless the caller is an admin, where keys are required: loaded models are shared."""
    door: Door = request.app.state.door
    identity = identity_of(request)
    if identity.scope != "admin" and await asyncio.to_thread(lambda: door.is_closed):
        advice = "This key is for inference: loading, pinning and unloading models takes a key of scope admin"
        raise Rejected(403, f"{advice} (`paceline keys create NAME --scope admin`).", "insufficient_scope", close=True)


async def is_let_in(request: Request) -> bool:
    """Return whether `authorize` would let the request in now: its session may have ended since."""
    try:
        await authorize(request)
    except (Rejected, HTTPException):
        return False
    return True


def is_public(template: str, path: str) -> bool:
    """Return whether a route is public: its template and the requested path must both say so.

    A router included under a prefix keeps its own templates, so neither is reliable alone.
    """
    if template.startswith(STATIC) and path.startswith(STATIC):
        return True
    return template == path and path in PUBLIC_PATHS


def identity_of(request: Request) -> Identity:
    """Return the caller, once `authorize` has let the request in."""
    identity: Identity = request.state.identity
    return identity


def _admit(door: Door, path: str, keys: list[bytes], cookie: str, *, is_admin: bool) -> Identity:
    """Return the caller, looked up in the store. Raises unless it may use the route."""
    identity = _key_owner(door, keys)
    if is_admin:
        if cookie and not door.accounts.is_locked_down and door.accounts.sessions.is_open(cookie):
            return SESSION
        return _admin(door, identity, path, has_ended=bool(cookie))
    if identity is None and door.is_closed:
        advice = "A valid API key is required: send `Authorization: Bearer <key>`."
        raise Rejected(401, advice, "invalid_api_key", close=True)
    return identity or ANONYMOUS


def _admin(door: Door, identity: Identity | None, path: str, *, has_ended: bool) -> Identity:
    if identity is not None and identity.scope == "admin":
        return identity
    if identity is not None:
        raise Rejected(403, "This key is for inference only: use one of scope admin.", "insufficient_scope", close=True)
    if path.startswith(ADMIN_JSON):
        advice = "Sign in at /admin/login, or send an API key of scope admin."
        raise Rejected(401, advice, "not_signed_in", close=True)
    raise HTTPException(303, headers={"location": _entrance(door, path, has_ended=has_ended)})


def _entrance(door: Door, path: str, *, has_ended: bool) -> str:
    """Return the sign-in address, which leads back to `path`; `has_ended`: the browser was signed in before."""
    if not door.accounts.has_account:
        return "/admin/setup"
    reason = ["ended=1"] if has_ended else []
    place = [] if path in {ADMIN, ADMIN + "/"} else [f"next={quote(path)}"]
    return "?".join(part for part in ("/admin/login", "&".join([*reason, *place])) if part)


def _key_owner(door: Door, keys: list[bytes]) -> Identity | None:
    """Return the owner of `keys`; None without keys, for an unknown one, or if they have different owners."""
    owners: set[Identity | None] = set()
    for key in keys:
        key_row = None if door.accounts.is_locked_down else door.accounts.keys.find(key.decode("latin-1"))
        kept = None if key_row is None else Identity("key", key_row.name, key_row.scope, key_row.id)
        owners.add(ENVIRONMENT if _is_secret(key, door.secret) else kept)
    return owners.pop() if len(owners) == 1 else None


def is_from_here(request: Request) -> bool:
    """Return whether the request comes from this computer: from loopback, or from the address it was sent to."""
    client, server = request.scope.get("client"), request.scope.get("server")
    return client is not None and (is_loopback(client[0]) or (server is not None and client[0] == server[0]))


def _is_secret(key: bytes, secret: str | None) -> bool:
    if secret is None:
        return False
    return secrets.compare_digest(hashlib.sha256(key).digest(), hashlib.sha256(secret.encode()).digest())


def _offered_keys(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    keys = [value.strip() for name, value in headers if name.lower() == b"x-api-key"]
    for name, value in headers:
        if name.lower() == b"authorization":
            scheme, _, key = value.partition(b" ")
            keys.append(key.strip() if scheme.lower() == b"bearer" else b"")
    return keys


# --- guessing ---------------------------------------------------------------------------------------------------

FREE_ATTEMPTS = 5
FREE_ATTEMPTS_ALTOGETHER = 30
LONGEST_PAUSE_SECONDS = 15 * 60
LONGEST_PAUSE_ALTOGETHER_SECONDS = 60
FORGET_SECONDS = 24 * 3600
MAX_ADDRESSES = 1024
LOOPBACK = "this computer"
TOKEN_BYTES = 32
VALID_SECONDS = 30 * 60
ENTRY_SECONDS, ENTRIES = 60.0, 8
"""Seconds that a sign-in address for this server's owner works, and most open codes of one kind (entry or set-up)."""


@dataclass(slots=True)
class _Tally:
    failures: int = 0
    next_at: float = 0.0
    seen_at: float = 0.0


class Lockout:
    """Password attempts at one server process. Times are seconds of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._altogether = _Tally()
        self._by_address: OrderedDict[str, _Tally] = OrderedDict()
        self.guessing = asyncio.Lock()
        """Serializes guesses, so that they do not occupy threads that other requests need."""

    def begin(self, address: str) -> None:
        """Count an attempt. Raises `Rejected` (429) if it comes too early."""
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
        """Clear the failures of this address after a correct attempt."""
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
    """Return what counts as one address: this computer, an IPv4 address, or an IPv6 /64, which one customer owns."""
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
    """Codes that work once, within `valid_seconds`. Only the newest `most` are valid, and only hashes are kept.

    Times are seconds of `clock`.
    """

    def __init__(self, clock: Clock, *, valid_seconds: float = VALID_SECONDS, most: int = 1) -> None:
        self._clock = clock
        self._valid_seconds = valid_seconds
        self._most = most
        self._open: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self.in_use = asyncio.Lock()
        """Allows one set-up at a time."""

    def issue(self, purpose: str = "") -> str:
        """Return a new code for `purpose`; beyond `most`, the oldest code is revoked."""
        code = secrets.token_urlsafe(TOKEN_BYTES)
        self._open[_digest(code)] = (self._clock() + self._valid_seconds, purpose)
        while len(self._open) > self._most:
            self._open.popitem(last=False)
        return code

    def matches(self, code: str) -> bool:
        """Return whether this is a valid code."""
        ends_at, _ = self._open.get(_digest(code), (-math.inf, ""))
        return self._clock() < ends_at

    def spend(self, code: str) -> str | None:
        """Revoke a code and return its purpose, or None if it was not valid."""
        is_open = self.matches(code)
        _, purpose = self._open.pop(_digest(code), (0.0, ""))
        return purpose if is_open else None


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).digest()
