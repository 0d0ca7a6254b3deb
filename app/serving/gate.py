"""Checks before a route runs: the gate in front of all routes, and the parsing of JSON bodies.

Loopback is not a trust boundary: any web page can reach it. A request must name an allowed host (DNS rebinding) and
must not come from a foreign page, whether to write or to read (CSRF), except when a person follows a link. Pages of
the allowed origins may also call the API, with CORS headers, but never the dashboard.

Bodies are parsed more strictly than usual: UTF-8 without a byte-order mark, no NaN or infinity, integers of at most
64 bits, no duplicate keys; lone surrogates in strings become U+FFFD. Unknown keys are ignored, as OpenAI does. What a
body costs is bounded by its number of values: each takes up to 300 times the memory of its text, and blocks all streams
while it is parsed.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.core.errors import InvalidRequest, PacelineError
from app.core.request import MAX_DRAFT_TOKENS
from app.serving.auth import identity_of
from app.serving.context import Result, context_of
from app.serving.errors import OLLAMA, Rejected, error_response, internal_error, invalid_request

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
MAX_HEADER_BYTES = 32 * 1024
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
WRITING_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
KNOWN_METHODS = SAFE_METHODS | WRITING_METHODS
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
DEFAULT_HEADERS = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""Headers added to every response that does not set them itself."""
ADMIN_HEADERS = (*DEFAULT_HEADERS, (b"cache-control", b"no-store"))
"""Default headers of the dashboard: its responses are for one person and may contain secrets."""

MAX_BODY_BYTES = 32 * 1024 * 1024
MIN_BYTES_PER_SECOND = 16 * 1024
"""Rate at which received bytes extend the deadline: slow uploads pass, a byte now and then does not."""
MAX_JSON_DEPTH = 64
MAX_MEMBERS = 10_000
"""Limit on the members of one JSON object: validation would report every unknown one."""
MAX_CONTAINERS = 50_000
"""Limit on the objects and lists of a body: six for each of 8,192 messages."""
MAX_VALUES = 2_000_000
"""Limit on all values of a body; the ids of a prompt of a million tokens are below it."""
COUNTED_BYTES = 64 * 1024
"""Bytes in which values are counted without a pause for other threads."""
THREAD_THRESHOLD_BYTES, THREAD_THRESHOLD_CONTAINERS = 256 * 1024, 5_000
"""Smallest bodies that are parsed in a thread, so that other streams are not held up."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

logger = logging.getLogger("paceline.gate")

Headers = Mapping[bytes, list[bytes]]
"""Values of each header by lower-case name; empty for a missing one."""
BodyModel = TypeVar("BodyModel", bound=BaseModel)
DraftTokens = Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]


def _end_lists_early(schema: Any) -> None:
    """Make each list in a core schema end its validation at the first wrong item."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = schema.values()
    elif not isinstance(schema, list | tuple):
        return
    for part in schema:
        _end_lists_early(part)


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(
        strict=True,
        allow_inf_nan=False,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        regex_engine="rust-regex",
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema. Only the first error is reported; one for each item of a list would take gigabytes."""
        schema = handler(source)
        _end_lists_early(schema)
        return schema


class Gate:
    """ASGI middleware that refuses bad requests before any route sees them, and all websockets."""

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: Callable[[], Collection[str]],
        allowed_origins: Callable[[], Collection[str]],
        on_response: Callable[[str, str, int], None],
    ) -> None:
        self._app = app
        self._on_response = on_response
        self._allowed_hosts = allowed_hosts
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or respond with an error object."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _normalized(scope)
        path, headers, has_begun = scope["path"], _headers_of(scope), False
        is_allowed_page = self._is_allowed_page(path, headers[b"origin"])

        async def send_with_defaults(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = _with_defaults(message.get("headers", ()), path)
                self._count(scope, message["status"])
            await send(message)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                self._check(scope, headers, is_allowed_page=is_allowed_page)
            except PacelineError as error:
                await error_response(error, path=path)(scope, receive, send)
                return
            try:
                await self._app(scope, receive, send)
            except Exception:
                if has_begun:
                    raise
                logger.exception("%s %s failed", scope["method"], path)
                await internal_error(Request(scope))(scope, receive, send)

        app: ASGIApp = answer
        if is_allowed_page:  # outside of `answer`, so that the page can read errors too
            origins, methods = self._allowed_origins(), ("GET", "POST", "DELETE")
            app = CORSMiddleware(answer, origins, methods, allow_headers=("*",), allow_private_network=True)
        await app(scope, receive, send_with_defaults)

    def _is_allowed_page(self, path: str, origins: Sequence[bytes]) -> bool:
        """Return whether a page of an allowed origin sends the request, to a path that such pages may use."""
        is_open = path == "/v1" or path.startswith("/v1/")
        return is_open and len(origins) == 1 and origins[0].decode("latin-1") in self._allowed_origins()

    def _count(self, scope: Scope, status: int) -> None:
        endpoint = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
        self._on_response(endpoint, method, status)

    def _check(self, scope: Scope, headers: Headers, *, is_allowed_page: bool) -> None:
        method = scope["method"]
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise headers_too_large()
        self._check_host(headers)
        _check_framing(scope.get("http_version", "1.1"), headers)
        if not (is_allowed_page or _is_followed_link(method, headers)):
            _check_origin(headers)
        has_body = headers[b"transfer-encoding"] or headers[b"content-length"] not in ([], [b"0"])
        if method in WRITING_METHODS and (method != "DELETE" or has_body):
            _check_content_type(headers, may_be_any=scope["path"] in OLLAMA and not headers[b"origin"])

    def _check_host(self, headers: Headers) -> None:
        values = headers[b"host"]
        match = HOST.fullmatch(values[0]) if len(values) == 1 else None
        if match is None or int(match.group(2) or 0) > 65535:
            raise Rejected(400, "Exactly one valid Host header is required.", "invalid_host", close=True)
        name = match.group(1).decode("ascii").lower()
        if name not in LOOPBACK_HOSTS and name not in self._allowed_hosts():
            advice = "This Host is not allowed: use 127.0.0.1 or localhost, or add the name to PACELINE_ALLOWED_HOSTS."
            raise Rejected(403, advice, "host_not_allowed", close=True)


def _normalized(scope: Scope) -> Scope:
    """Return `scope` with HEAD as GET, whose body the server omits, and no trailing slash in the path. The dashboard's
    requests keep their method and path, static files their path. CONNECT has no path; the route `/` refuses it.
    Backslashes are removed from cookies: ours have none, and some Python versions unescape them in quadratic time."""
    path = "/" if scope["method"] == "CONNECT" else scope["path"]
    headers = [(name, value.replace(b"\\", b"") if name == b"cookie" else value) for name, value in scope["headers"]]
    scope = {**scope, "headers": headers}
    if path.startswith("/admin"):
        return scope
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "path": path if path.startswith("/static/") else path.rstrip("/") or "/", "method": method}


def _headers_of(scope: Scope) -> Headers:
    headers: Headers = defaultdict(list)
    for name, value in scope["headers"]:
        headers[name.lower()].append(value)
    return headers


def _with_defaults(headers: Iterable[tuple[bytes, bytes]], path: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of a response, plus the date and those default headers that it does not set itself."""
    given = list(headers)
    present = {name.lower() for name, _ in given}
    defaults = ADMIN_HEADERS if path.startswith("/admin") else DEFAULT_HEADERS
    date = (b"date", formatdate(usegmt=True).encode())
    return [*given, *((name, value) for name, value in defaults if name not in present), date]


def _check_framing(version: str, headers: Headers) -> None:
    values, encodings = headers[b"content-length"], headers[b"transfer-encoding"]
    if version not in {"1.0", "1.1"}:
        raise Rejected(505, "Only HTTP/1.1 and HTTP/1.0 are spoken here.", "invalid_http", close=True)
    if encodings and (values or version == "1.0"):
        advice = "A body has either a Content-Length or, in HTTP/1.1, a Transfer-Encoding."
        raise Rejected(400, advice, "invalid_http", close=True)
    if len(values) > 1 or any(not number.isdigit() or len(number) > 19 for number in values):
        raise Rejected(400, "Content-Length is not a valid number.", "invalid_content_length", close=True)
    if values and int(values[0]) > MAX_BODY_BYTES:
        raise _too_large(MAX_BODY_BYTES)


def _is_followed_link(method: str, headers: Headers) -> bool:
    """Return whether this is a top-level navigation, or a preflight, which is never granted."""
    is_document = headers[b"sec-fetch-mode"] == [b"navigate"] and headers[b"sec-fetch-dest"] == [b"document"]
    return method == "OPTIONS" or (method == "GET" and is_document)


def _check_origin(headers: Headers) -> None:
    """Refuse requests from other web pages; programs send neither `Origin` nor `Sec-Fetch-Site`, and pass."""
    origins, host = headers[b"origin"], headers[b"host"][0].lower()
    own_origins = {b"http://" + host, b"https://" + host}
    is_foreign = len(origins) > 1 or any(origin.lower() not in own_origins for origin in origins)
    sites = {site.strip().lower() for site in headers[b"sec-fetch-site"]}
    if is_foreign or not sites <= {b"same-origin", b"none"}:
        raise Rejected(403, "Requests from other web pages are refused.", "cross_origin", close=True)


def _check_content_type(headers: Headers, *, may_be_any: bool) -> None:
    """Refuse bodies that say that they are not JSON. Ollama reads JSON of any type, and its clients rely on it; a page,
    which could send a form, names its origin."""
    values = headers[b"content-type"]
    kind, _, parameters = (values[0] if len(values) == 1 else b"").lower().partition(b";")
    is_json = kind.strip() == b"application/json" and parameters.strip() in {b"", b"charset=utf-8", b'charset="utf-8"'}
    if not (is_json or may_be_any):
        raise Rejected(415, "Content-Type must be application/json.", "unsupported_media_type", close=True)
    if not {encoding.strip().lower() for encoding in headers[b"content-encoding"]} <= {b"", b"identity"}:
        raise Rejected(415, "Send the body without a Content-Encoding.", "unsupported_media_type", close=True)


@dataclass(frozen=True, slots=True)
class BodyReader:
    """A dependency that reads the body as `schema`; the OpenAPI document uses the same schema."""

    schema: type[BaseModel]

    async def __call__(self, request: Request) -> BaseModel:
        """Return the body. Raises `InvalidRequest`, or `Rejected` with 408 (too slow) or 413 (too large)."""
        max_bytes = getattr(self.schema, "max_bytes", MAX_BODY_BYTES)
        raw = await _read(request, context_of(request).body_timeout_seconds, max_bytes)
        request.state.has_large_body = (
            len(raw) >= THREAD_THRESHOLD_BYTES or _count(raw)[0] >= THREAD_THRESHOLD_CONTAINERS
        )
        return await where_parsed(request, parse, raw, self.schema)


async def where_parsed(request: Request, function: Callable[..., Result], *arguments: Any) -> Result:
    """Return the result of `function`, which does something with each value of the body of `request`: called in the
    parser's thread if the body is large."""
    if request.state.has_large_body:
        return await context_of(request).parser.run(identity_of(request).owner, function, *arguments)
    return function(*arguments)


if TYPE_CHECKING:
    JsonBody = Annotated[BodyModel, BodyReader]
else:

    class JsonBody:
        """`JsonBody[Schema]` is a route parameter for the body, read once the caller is authorized."""

        def __class_getitem__(cls, schema: type[BaseModel]) -> Any:
            """Return the annotation for FastAPI."""
            return Annotated[schema, Depends(BodyReader(schema))]


def parse(raw: bytes | bytearray, schema: type[BodyModel]) -> BodyModel:
    """Parse and validate a body. Raises `InvalidRequest`."""
    return validated(parse_json(raw, getattr(schema, "max_containers", MAX_CONTAINERS)), schema)


def validated(value: Any, schema: type[BodyModel], sent_as: Mapping[str, str] = MappingProxyType({})) -> BodyModel:
    """Validate plain values as `schema`. Raises `InvalidRequest`, which names a field as the client sent it."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise invalid_request(error, sent_as) from None


def parse_json(raw: bytes | bytearray, max_containers: int = MAX_CONTAINERS) -> Any:
    """Parse a body into plain Python values. Raises `InvalidRequest`, or `Rejected` with 413 for too many values."""
    if not raw:
        raise InvalidRequest("The body is empty: send a JSON object.", code="invalid_json")
    _check_values(raw, max_containers)
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_reject_duplicates, parse_float=_parse_finite, parse_constant=_parse_finite
        )
        value = _for_channel(value)
    except InvalidRequest:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"The body is not valid JSON in UTF-8: {why[:200]}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    if _count(raw)[0] > MAX_JSON_DEPTH:
        _check_depth(value)
    return value


def _check_values(raw: bytes | bytearray, max_containers: int) -> None:
    """Refuse a body of too many values. The slower count, without strings, follows only where it matters."""
    containers, values = _count(raw)
    pieces = _without_strings(raw) if containers > max_containers or values > MAX_VALUES else ()
    containers, values = 0, 0
    for piece in pieces:
        more_containers, more_values = _count(piece)
        containers, values = containers + more_containers, values + more_values
        if containers > max_containers or values > MAX_VALUES:
            limit = f"{max_containers:,} objects and lists, or {MAX_VALUES:,} values"
            raise Rejected(413, f"The body has more than {limit}.", "request_too_large")


def _count(text: bytes | bytearray) -> tuple[int, int]:
    """Return the numbers of objects and lists, and of all values, as if no string contained brackets or commas."""
    containers = text.count(b"{") + text.count(b"[")
    return containers, containers + text.count(b",")


def _without_strings(raw: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """Yield a JSON text without its strings, piece by piece."""
    text = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    is_within = False
    for start in range(0, len(text), COUNTED_BYTES):
        parts = text[start : start + COUNTED_BYTES].split(b'"')
        yield b"".join(parts[is_within::2])
        is_within ^= len(parts) % 2 == 0


def _for_channel(value: Any) -> Any:
    """Return a body that msgpack can encode; lone surrogates in its strings become U+FFFD. Raises ValueError or
    OverflowError for integers beyond 64 bits, and for names with lone surrogates."""
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        value = _with_whole_characters(value)
        msgspec.msgpack.encode(value)
    return value


def _with_whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {name: _with_whole_characters(member) for name, member in value.items()}
    return [_with_whole_characters(item) for item in value] if isinstance(value, list) else value


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_MEMBERS:
        raise InvalidRequest(f"An object in the body has more than {MAX_MEMBERS:,} members.", code="invalid_json")
    members = dict(pairs)
    if len(members) != len(pairs):
        raise InvalidRequest("An object in the body names a key twice.", code="invalid_json")
    return members


def _parse_finite(number: str) -> float:
    if not math.isfinite(parsed := float(number)):
        raise ValueError("a number is not finite")
    return parsed


def _check_depth(value: Any, levels: int = MAX_JSON_DEPTH) -> None:
    if levels == 0:
        raise InvalidRequest(f"The body is nested deeper than {MAX_JSON_DEPTH} levels.", code="invalid_json")
    for nested in value.values() if isinstance(value, dict) else value:
        if isinstance(nested, dict | list):
            _check_depth(nested, levels - 1)


async def _read(request: Request, timeout_seconds: float, max_bytes: int) -> bytearray:
    chunks = bytearray()
    try:
        async with asyncio.timeout(timeout_seconds) as deadline:
            began = asyncio.get_running_loop().time()
            async for chunk in request.stream():
                chunks += chunk
                if len(chunks) > max_bytes:
                    raise _too_large(max_bytes)
                deadline.reschedule(began + timeout_seconds + len(chunks) / MIN_BYTES_PER_SECOND)
    except TimeoutError:
        raise Rejected(408, "The body did not arrive in time.", "request_timeout", close=True) from None
    return chunks


def headers_too_large() -> Rejected:
    """Return the error for headers over one of the limits."""
    return Rejected(431, "The headers are too large or too many.", "headers_too_large", close=True)


def configure_malloc() -> None:
    """Make glibc free a large body's memory immediately: by default it keeps twice the largest body's forever."""
    with contextlib.suppress(AttributeError):  # only glibc has it
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, 1 << 20)  # 1 MiB: memory of single reads is kept


def _too_large(max_bytes: int) -> Rejected:
    """Return the error for a body over the limit."""
    limit = max_bytes // 1024 // 1024
    return Rejected(413, f"The body is larger than {limit} MiB.", "request_too_large", close=True)
