"""Errors as OpenAI error objects: the only place that defines the body of an error response.

The body is `{"error": {"message", "type", "param", "code"}}`, except for Anthropic's and Ollama's paths. Messages never
quote a prompt or a path on disk.
"""

import http
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import iter_route_contexts
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app.core.errors import (
    CONTEXT_OVERFLOW,
    HubProblem,
    InvalidRequest,
    PacelineError,
    translation_of,
)
from app.i18n.catalogs import Words

logger = logging.getLogger("paceline.errors")

MAX_MESSAGE_CHARACTERS = 2000
DASHBOARD_PATHS = ("/admin", "/static")
API_PREFIXES = ("/v1/", "/api/", "/metrics", "/health/", "/tokenize", "/detokenize", "/apply-template")
DASHBOARD_API = "/admin/api/"
HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed", 413: "request_too_large"}
ANTHROPIC = "/v1/messages"
OLLAMA = {f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings", "show", "tags", "version", "ps")}
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
OPENAI_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Rejected(PacelineError):
    """A refusal at the HTTP level, before the request is interpreted: a bad Host, a missing key, a body too large."""

    def __init__(
        self, status: int, message: str, code: str, *, close: bool = False, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(message, code=code, retry_after_seconds=retry_after_seconds)
        self.status = status
        self.kind = OPENAI_KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.close = close
        """Whether the connection is closed, because the rest of the body was not read."""


class ErrorPages(Protocol):
    """Renders errors for the dashboard; the instance in use is `app.state.pages`."""

    def words(self, request: Request) -> Words:
        """Return the dashboard's texts in the client's language."""

    def problem(self, request: Request, error: PacelineError) -> Response:
        """Return an error page in place of the requested one."""


def error_object(error: PacelineError, words: Words | None = None, path: str = "") -> dict[str, Any]:
    """Return the body of an error response, or of an error frame of a stream, in the format that clients of `path`
    expect. In OpenAI's format, the message is in the language of `words`."""
    if path.startswith(ANTHROPIC):
        kind = ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        problem = {"type": kind, "message": _anthropic_message(error)[:MAX_MESSAGE_CHARACTERS], "code": error.code}
        return {"type": "error", "error": problem}
    if path in OLLAMA:
        return {"error": error.message[:MAX_MESSAGE_CHARACTERS]}
    return {
        "error": {
            "message": localized_message(error, words)[:MAX_MESSAGE_CHARACTERS],
            "type": error.kind,
            "param": error.parameter,
            "code": error.code,
        }
    }


def _anthropic_message(error: PacelineError) -> str:
    """Return the message. `CONTEXT_OVERFLOW` gets the text of Anthropic's API: Claude Code compacts a conversation only
    when it receives that text."""
    if error.code != CONTEXT_OVERFLOW:
        return error.message
    return "prompt is too long: {required_tokens} tokens > {context_tokens} maximum".format_map(error.values)


def localized_message(error: PacelineError, words: Words | None) -> str:
    """Return the message in the language of `words`, by translation key or error code; without `words`, in English."""
    if words is None:
        return error.message
    if isinstance(error, HubProblem):
        return words(f"downloads.problem_{error.reason}", repository=error.repository)
    if error.translation_key:
        key = f"invalid.{error.translation_key}"
        return words(key if key in words.entries else "invalid.other", **error.values)
    key = f"error.{error.code}"
    return words(key if key in words.entries else "error.other", detail=error.message)


def words_for(request: Request) -> Words | None:
    """Return the translated texts for a request of the dashboard's scripts; None for all others, which get English."""
    pages: ErrorPages | None = getattr(request.app.state, "pages", None)
    is_command = getattr(getattr(request.state, "identity", None), "kind", "") == "command"
    is_script = request.url.path.startswith(DASHBOARD_API) and not is_command
    return pages.words(request) if pages is not None and is_script else None


def error_response(error: PacelineError, words: Words | None = None, path: str = "") -> Response:
    """Return the HTTP response for an error, with `Retry-After` in whole seconds if the error has one."""
    body = msgspec.json.encode(error_object(error, words, path))
    response = Response(body, error.status, media_type="application/json")
    if error.retry_after_seconds is not None:
        response.headers["retry-after"] = str(error.retry_after_seconds)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, Rejected) and error.close:
        response.headers["connection"] = "close"
    return response


def invalid_request(
    error: ValidationError | RequestValidationError, sent_as: Mapping[str, str] = MappingProxyType({})
) -> InvalidRequest:
    """Return the first problem of a failed validation as an error that never quotes the invalid value. `sent_as` maps
    the names of converted fields to the names that the client sent."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    location[:1] = [sent_as.get(name, name) for name in location[:1]]
    path = ".".join(location)[:200]
    is_unknown = first["type"] == "extra_forbidden"
    message = "there is no such field" if is_unknown else str(first["msg"]).removeprefix("Value error, ")
    translation_key, values = translation_of(first)
    return InvalidRequest(
        f"{path}: {message}" if path else message,
        parameter=location[0][:64] if location else None,
        translation_key=translation_key,
        values=values,
    )


def endpoints(app: FastAPI) -> list[str]:
    """Return `METHOD path` for each endpoint of the API, without those of the dashboard."""
    routes = [(route.path or "", route.methods or ()) for route in iter_route_contexts(app.routes)]
    public = [(path.replace(":path", ""), methods) for path, methods in routes if not path.startswith(DASHBOARD_PATHS)]
    return [f"{method} {path}" for path, methods in public for method in methods]


def methods_at(app: FastAPI, path: str) -> set[str]:
    """Return the methods that all routes together allow at `path`."""
    routes = [route for route in iter_route_contexts(app.routes) if route.path_regex.match(path)]
    return {method for route in routes for method in route.methods or ()}


def install_error_handlers(app: FastAPI) -> None:
    """Register handlers for everything that routes and their dependencies can raise."""

    @app.exception_handler(PacelineError)
    async def on_paceline_error(request: Request, error: PacelineError) -> Response:
        return _response(request, error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        """Return Starlette's own refusals (404, 405, 413) in our format."""
        phrase = http.HTTPStatus(error.status_code).phrase
        code = HTTP_CODES.get(error.status_code, phrase.lower().replace(" ", "_"))
        advice = f" Available: {', '.join(endpoints(app))}." if code in {"unknown_url", "method_not_allowed"} else ""
        response = _response(request, Rejected(error.status_code, f"{phrase}.{advice}", code))
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["allow"] = ", ".join(sorted(methods_at(app, request.scope["path"])))
        return response

    @app.exception_handler(RequestValidationError)
    async def on_invalid_parameters(request: Request, error: RequestValidationError) -> Response:
        return _response(request, invalid_request(error))

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
        return error_response(Rejected(499, "The client closed the connection.", "client_closed_request"))


def internal_error(request: Request) -> Response:
    """Return the response to a request whose handling failed unexpectedly."""
    return _response(request, PacelineError("Internal error: see the log of the server."))


def _response(request: Request, error: PacelineError) -> Response:
    """Return the error as a page for a browser, else as an object; the dashboard's scripts get the user's language."""
    pages: ErrorPages | None = getattr(request.app.state, "pages", None)
    path = request.scope["path"]
    is_navigation = gets_error_page(path, request.method) and "text/html" in request.headers.get("accept", "")
    if pages is not None and is_navigation and error.status >= 400:
        return pages.problem(request, error)
    return error_response(error, words_for(request), path)


def gets_error_page(path: str, method: str) -> bool:
    """Return whether a browser that sends such a request gets an error as a page."""
    return method == "GET" and not path.startswith((*API_PREFIXES, DASHBOARD_API))
