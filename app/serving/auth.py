"""Authorization, as a dependency of the whole application: a route is closed unless it is listed as public.

There are three kinds of routes. Public ones are open to everybody; `/admin…` needs a session or an API key of scope
`admin`. All others need an API key only if keys are required; `/api/load` and everything that unloads a model then need
scope `admin`, while any request may load the model that it names.
`identity_of` returns the caller of a request.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from fastapi import Request
from starlette.exceptions import HTTPException

from app.core.errors import StoreUnavailable
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
"""Paths of the public routes, which do their own checks; no path has a parameter."""
STATIC = "/static/"
ADMIN = "/admin"
ADMIN_JSON = "/admin/api/"
MAX_LOOKUPS = 4
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller. `name` is the key's name or the kind of access; `key_id` distinguishes keys of the same name."""

    kind: Literal["anonymous", "environment", "command", "key", "session"]
    name: str = ""
    scope: Scope = "inference"
    key_id: int = 0

    @property
    def owner(self) -> str:
        """Owner of the caller's requests in the worker: differs for callers that must be isolated from each other."""
        return f"{self.kind} {self.key_id}"


ANONYMOUS = Identity("anonymous")
ENVIRONMENT = Identity("environment", "PACELINE_API_KEY", "admin")
COMMAND = Identity("command", "command line", "admin")
SESSION = Identity("session", "dashboard", "admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """Accounts, keys and settings that decide who may access the server."""

    accounts: Accounts
    secret: str | None = None
    """Key from the environment; it grants full access."""
    local_key: str = field(default_factory=secrets.token_urlsafe)
    """Key that commands on this computer read from the server's file; it grants them full access."""
    requires_key: Callable[[], bool] = lambda: False
    """Whether the setting `require_key` is on, or other machines can reach the server."""
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(MAX_LOOKUPS, "access"))
    """Threads for look-ups alone: those that all share may wait for a disk that does not answer."""

    async def look_up(self, function: Callable[..., Found], *arguments: Any) -> Found:
        """Return the result of a function that reads the store."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    @property
    def is_key_required(self) -> bool:
        """Whether endpoints require a key."""
        return self.secret is not None or self.accounts.is_locked_down or self.requires_key()


async def authorize(request: Request) -> None:
    """Raise `Rejected` (401, 403) or redirect to the sign-in page, unless the caller may use this route."""
    request.state.identity = ANONYMOUS
    path = request.scope["path"]
    if is_public(getattr(request.scope.get("route"), "path", ""), path):
        return
    access_policy: AccessPolicy = request.app.state.access_policy
    keys = _offered_keys(request.scope["headers"])
    if keys and all(_is_secret(key, access_policy.secret) for key in keys):
        request.state.identity = ENVIRONMENT
        return
    if keys and is_local_request(request) and all(_is_secret(key, access_policy.local_key) for key in keys):
        request.state.identity = COMMAND
        return
    is_admin = path == ADMIN or path.startswith(ADMIN + "/")
    cookie = request.cookies.get(COOKIE, "") if is_admin and not keys else ""
    address = f"{quote(path)}?{request.scope['query_string'].decode('latin-1')}".removesuffix("?")
    authenticate = partial(_authenticate, is_admin=is_admin)
    request.state.identity = await access_policy.look_up(authenticate, access_policy, address, keys, cookie)


async def authorize_operator(request: Request) -> None:
    """Raise `Rejected` (403) if keys are required and the caller's scope is not `admin`: loaded models are shared."""
    access_policy: AccessPolicy = request.app.state.access_policy
    identity = identity_of(request)
    if identity.scope != "admin" and await access_policy.look_up(lambda: access_policy.is_key_required):
        advice = "This key is for inference: loading, pinning and unloading models takes a key of scope admin"
        raise Rejected(403, f"{advice} (`paceline keys create NAME --scope admin`).", "insufficient_scope", close=True)


async def is_authorized(request: Request) -> bool:
    """Return whether `authorize` still accepts an open request: its session may have ended since. Return False
    while the store cannot be read: the page then reconnects."""
    try:
        await authorize(request)
    except (Rejected, HTTPException, StoreUnavailable):
        return False
    return True


def is_public(template: str, path: str) -> bool:
    """Return whether a route is public: its template and the requested path must both be public.

    A router included under a prefix keeps its templates without the prefix, so neither is reliable alone.
    """
    if template.startswith(STATIC) and path.startswith(STATIC):
        return True
    return template == path and path in PUBLIC_PATHS


def identity_of(request: Request) -> Identity:
    """Return the caller, once `authorize` has accepted the request."""
    identity: Identity = request.state.identity
    return identity


def _authenticate(
    access_policy: AccessPolicy, address: str, keys: list[bytes], cookie: str, *, is_admin: bool
) -> Identity:
    """Return the caller, looked up in the store. Raises unless the caller may use the route."""
    identity = _key_owner(access_policy, keys)
    if is_admin:
        if cookie and not access_policy.accounts.is_locked_down and access_policy.accounts.sessions.is_open(cookie):
            return SESSION
        return _require_admin(access_policy, identity, address, has_ended=bool(cookie))
    if identity is None and access_policy.is_key_required:
        advice = "A valid API key is required: send `Authorization: Bearer <key>`."
        raise Rejected(401, advice, "invalid_api_key", close=True)
    return identity or ANONYMOUS


def _require_admin(
    access_policy: AccessPolicy, identity: Identity | None, address: str, *, has_ended: bool
) -> Identity:
    if identity is not None and identity.scope == "admin":
        return identity
    if identity is not None:
        raise Rejected(403, "This key is for inference only: use one of scope admin.", "insufficient_scope", close=True)
    if address.startswith(ADMIN_JSON):
        advice = "Sign in at /admin/login, or send an API key of scope admin."
        raise Rejected(401, advice, "not_signed_in", close=True)
    raise HTTPException(303, headers={"location": _sign_in_url(access_policy, address, has_ended=has_ended)})


def _sign_in_url(access_policy: AccessPolicy, address: str, *, has_ended: bool) -> str:
    """Return the sign-in address, which leads back to `address`; `has_ended`: the browser was signed in before."""
    if not access_policy.accounts.has_account:
        return "/admin/setup"
    reason = ["ended=1"] if has_ended else []
    next_page = [] if address in {ADMIN, ADMIN + "/"} else [f"next={quote(address)}"]
    return "?".join(part for part in ("/admin/login", "&".join([*reason, *next_page])) if part)


def _key_owner(access_policy: AccessPolicy, keys: list[bytes]) -> Identity | None:
    """Return the owner of `keys`; None without keys, for an unknown key, or if the owners differ."""
    owners: set[Identity | None] = set()
    for key in keys:
        key_row = (
            None if access_policy.accounts.is_locked_down else access_policy.accounts.keys.find(key.decode("latin-1"))
        )
        stored = None if key_row is None else Identity("key", key_row.name, key_row.scope, key_row.id)
        owners.add(ENVIRONMENT if _is_secret(key, access_policy.secret) else stored)
    return owners.pop() if len(owners) == 1 else None


def is_local_request(request: Request) -> bool:
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
