"""The gate in front of every route: Host, Origin, Content-Type and header caps, decided on the raw ASGI scope.

Loopback is not a trust boundary: any web page can reach it. A request must name a host that we allow (DNS
rebinding) and must not come from a foreign page, be it to change or to read something (CSRF), except that a person may
follow a link to us. Only pages of the allowed origins may call the endpoint, with CORS headers; never the dashboard.
"""

import re
from collections.abc import Callable, Collection
from email.utils import formatdate

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.core.errors import PacelineError
from app.serving.body import MAX_BODY_BYTES, too_large
from app.serving.errors import Rejected, error_response

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
MAX_HEADER_BYTES = 32 * 1024
MAX_HEADER_COUNT = 100
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
KNOWN_METHODS = SAFE_METHODS | {"POST", "PUT", "PATCH", "DELETE"}
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
DEFAULT_HEADERS = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""Sent with every answer that does not set them itself."""
ADMIN_HEADERS = (*DEFAULT_HEADERS, (b"cache-control", b"no-store"))
"""The same for the dashboard: what it tells is for one person, and may be a secret."""

Headers = list[tuple[bytes, bytes]]


class Gate:
    """ASGI middleware that refuses what no route should see; websockets are refused altogether."""

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: Callable[[], Collection[str]],
        allowed_origins: Callable[[], Collection[str]],
        answered: Callable[[str, str, int], None],
    ) -> None:
        self._app = app
        self._answered = answered
        self._allowed_hosts = allowed_hosts
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with an error object."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _settled(scope)
        headers = list(scope["headers"])
        allowed_origins = self._allowed_origins() if _is_endpoint(scope["path"]) else ()
        is_allowed_page = _origin(headers) in allowed_origins

        async def send_with_defaults(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message.get("headers", ())}
                defaults = ADMIN_HEADERS if scope["path"].startswith("/admin") else DEFAULT_HEADERS
                missing = [(name, value) for name, value in defaults if name not in present]
                date = (b"date", formatdate(usegmt=True).encode())
                message["headers"] = [*message.get("headers", ()), *missing, date]
                self._count(scope, message["status"])
            await send(message)

        try:
            self._check(scope["method"], headers, is_allowed_page=is_allowed_page)
        except PacelineError as error:
            await error_response(error)(scope, receive, send_with_defaults)
            return
        app = self._app
        if is_allowed_page:
            methods = ("GET", "POST")
            app = CORSMiddleware(app, allowed_origins, methods, allow_headers=("*",), allow_private_network=True)
        await app(scope, receive, send_with_defaults)

    def _count(self, scope: Scope, status: int) -> None:
        endpoint = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
        self._answered(endpoint, method, status)

    def _check(self, method: str, headers: Headers, *, is_allowed_page: bool) -> None:
        _check_header_size(headers)
        host = self._check_host(headers)
        _check_length(headers)
        if not (is_allowed_page or _is_followed_link(method, headers)):
            _check_origin(headers, host)
        if method not in SAFE_METHODS and (method != "DELETE" or _has_body(headers)):
            _check_content_type(headers)

    def _check_host(self, headers: Headers) -> str:
        values = _all(headers, b"host")
        match = HOST.fullmatch(values[0]) if len(values) == 1 else None
        if match is None or int(match.group(2) or 0) > 65535:
            raise Rejected(400, "Exactly one valid Host header is required.", "invalid_host", close=True)
        name = match.group(1).decode("ascii").lower()
        if name not in LOOPBACK_HOSTS and name not in self._allowed_hosts():
            advice = "This Host is not allowed: use 127.0.0.1 or localhost, or add the name to PACELINE_ALLOWED_HOSTS."
            raise Rejected(403, advice, "host_not_allowed", close=True)
        return values[0].decode("ascii").lower()


def _settled(scope: Scope) -> Scope:
    """The same without a slash at the end, and HEAD as a GET, whose body the server leaves out; the dashboard's own
    addresses stay as they are, and so do the names of its files."""
    path = scope["path"]
    if path.startswith("/admin"):
        return scope
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "path": path if path.startswith("/static/") else path.rstrip("/") or "/", "method": method}


def _is_endpoint(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")


def _origin(headers: Headers) -> str:
    """Where the page that asks is from; empty without one, or with several."""
    origins = _all(headers, b"origin")
    return origins[0].decode("latin-1") if len(origins) == 1 else ""


def _all(headers: Headers, wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name.lower() == wanted]


def _check_header_size(headers: Headers) -> None:
    size = sum(len(name) + len(value) for name, value in headers)
    if size > MAX_HEADER_BYTES or len(headers) > MAX_HEADER_COUNT:
        raise Rejected(431, "The headers are too large or too many.", "headers_too_large", close=True)


def _check_length(headers: Headers) -> None:
    values = _all(headers, b"content-length")
    if not values:
        return
    if len(values) > 1 or not values[0].isdigit() or len(values[0]) > 19:
        raise Rejected(400, "Content-Length is not a valid number.", "invalid_content_length", close=True)
    if int(values[0]) > MAX_BODY_BYTES:
        raise too_large()


def _has_body(headers: Headers) -> bool:
    return bool(_all(headers, b"transfer-encoding")) or _all(headers, b"content-length") not in ([], [b"0"])


def _is_followed_link(method: str, headers: Headers) -> bool:
    """Whether a browser shows the answer to a person as a page of its own; a preflight asks for what it never gets."""
    if method == "OPTIONS":
        return True
    destinations = _all(headers, b"sec-fetch-dest")
    return method == "GET" and _all(headers, b"sec-fetch-mode") == [b"navigate"] and destinations == [b"document"]


def _check_origin(headers: Headers, host: str) -> None:
    """Refuse what a browser sends from another page; programs send neither header and pass."""
    origins = _all(headers, b"origin")
    own = {f"http://{host}".encode(), f"https://{host}".encode()}
    foreign_origin = len(origins) > 1 or (len(origins) == 1 and origins[0].lower() not in own)
    foreign_site = any(
        value.strip().lower() not in {b"same-origin", b"none"} for value in _all(headers, b"sec-fetch-site")
    )
    if foreign_origin or foreign_site:
        raise Rejected(403, "Requests from other web pages are refused.", "cross_origin", close=True)


def _check_content_type(headers: Headers) -> None:
    values = _all(headers, b"content-type")
    kind, _, parameters = (values[0] if len(values) == 1 else b"").lower().partition(b";")
    if kind.strip() != b"application/json" or parameters.strip() not in {b"", b"charset=utf-8", b'charset="utf-8"'}:
        raise Rejected(415, "Content-Type must be application/json.", "unsupported_media_type", close=True)
