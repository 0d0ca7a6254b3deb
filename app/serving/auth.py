"""Who may call: a dependency of the whole application, so that a route is closed unless it is listed as public.

Without `PACELINE_API_KEY` the server binds to loopback only and asks for no key. With one, every route that is not
public needs `Authorization: Bearer <key>` or `x-api-key: <key>`.
"""

import hashlib
import secrets

from fastapi import Request

from app.serving.context import context_of
from app.serving.errors import Rejected

PUBLIC_PATHS = frozenset({"/", "/static/{name}", "/health/live", "/health/ready"})
"""Route templates (never the path that was asked for) that need no key."""


async def authorize(request: Request) -> None:
    """Raise `Rejected` with 401 unless the route is public, no key is set, or the right key came along."""
    secret = context_of(request).settings.api_key
    if secret is None or getattr(request.scope.get("route"), "path", None) in PUBLIC_PATHS:
        return
    expected = hashlib.sha256(secret.get_secret_value().encode()).digest()
    offered = _offered_keys(request.scope["headers"])
    matches = [secrets.compare_digest(hashlib.sha256(key).digest(), expected) for key in offered]
    if not matches or not all(matches):
        advice = "A valid API key is required: send `Authorization: Bearer <key>`."
        raise Rejected(401, advice, "invalid_api_key", close=True)


def _offered_keys(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    keys = [value.strip() for name, value in headers if name.lower() == b"x-api-key"]
    for name, value in headers:
        if name.lower() == b"authorization":
            scheme, _, key = value.partition(b" ")
            keys.append(key.strip() if scheme.lower() == b"bearer" else b"")
    return keys
