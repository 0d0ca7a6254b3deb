"""The OpenAPI document: every route with its body, its responses and every error that it can end with.

FastAPI knows paths, parameters and the responses that routes declare with `success`. Bodies are the schemas of
`BodyReader`; errors are those common to all requests, and those that a route declares with `problems`.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import RouteContext, iter_route_contexts
from pydantic import BaseModel, ConfigDict, create_model
from pydantic.json_schema import models_json_schema

from app.serving.auth import ADMIN, ADMIN_JSON, COOKIE, is_public
from app.serving.errors import ANTHROPIC, OLLAMA, gets_error_page
from app.serving.gate import SAFE_METHODS, BodyReader

REFERENCE = "#/components/schemas/{model}"
STATUSES = {
    303: "Redirects to the page to sign in at.",
    400: "Malformed, out of range or impossible; `param` names the field.",
    401: "A valid API key is required, or for the dashboard a session.",
    403: "Not for this key, this host, this address or another page.",
    404: "The named resource does not exist.",
    408: "The request did not arrive in time.",
    409: "The resource is in use, is gone, or has changed.",
    413: "The body is too large, or has too many values.",
    414: "The address is too long.",
    415: "Content-Type must be application/json, without a Content-Encoding.",
    422: "There is no such setting, or its value is invalid.",
    429: "Too many at once: come back after `Retry-After` seconds.",
    431: "The headers are too large or too many.",
    499: "It was cancelled on the dashboard.",
    500: "An internal error; the log of the server has the details.",
    502: "The model hub returned an error.",
    503: "Not now: the worker, the model, its memory, the store or the hub is unavailable; `code` says which, "
    "`Retry-After` when to come back, if known.",
    505: "Only HTTP/1.1 and HTTP/1.0 are spoken.",
}
ALWAYS = (400, 403, 408, 413, 414, 431, 500, 503, 505)
"""Error statuses that any request can get."""
KEYS: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
}

EVENTS = "text/event-stream"

Responses = dict[int | str, dict[str, Any]]


def shape(name: str, fields: Mapping[str, Any], about: str = "") -> Any:
    """Return the model of an object; nullable fields may be missing, and there may be additional fields."""
    kinds: dict[str, Any] = {
        field: (kind, None if NoneType in get_args(kind) else ...) for field, kind in fields.items()
    }
    return create_model(name, __config__=ConfigDict(extra="allow"), __doc__=about, **kinds)


Problem = shape("Problem", {"message": str, "type": str, "code": str}, "`message` is for people, `code` for programs.")
Error = shape("Error", {"error": Problem}, "In OpenAI's error format; `param` names the field.")
AnthropicError = shape("AnthropicError", {"type": str, "error": Problem}, "An error in Anthropic's format.")
OllamaError = shape("OllamaError", {"error": str}, "An error in Ollama's format.")


def success(answer: type[BaseModel] | None = None, media_type: str = "") -> Responses:
    """Return the 200 response of a route: an object, a stream or file of `media_type`, or both."""
    content: dict[str, Any] = {media_type: {}} if media_type else {}
    return {200: {"content": content} | ({} if answer is None else {"model": answer})}


def problems(*statuses: int) -> Responses:
    """Return the error responses of a route, in addition to those of `ALWAYS`."""
    return {status: {"description": STATUSES[status]} for status in statuses}


ANSWERED = problems(409, 429, 499)
"""Additional errors of a request that a model answers."""
HUB = problems(404, 422, 502)
"""Additional errors of a request that queries the hub."""


def document(app: FastAPI) -> dict[str, Any]:
    """Return the application's OpenAPI document, built once."""
    if app.openapi_schema is None:
        app.openapi_schema = _document(app)
    return app.openapi_schema


def _document(app: FastAPI) -> dict[str, Any]:
    openapi = get_openapi(title=app.title, version=app.version, routes=app.routes)
    operations = [(route, method) for route in iter_route_contexts(app.routes) for method in route.methods or ()]
    bodies = {_body(route): None for route, _ in operations} | dict.fromkeys((Error, AnthropicError, OllamaError))
    schemas = [(body, "validation") for body in bodies if body is not None]
    references, shared = models_json_schema(schemas, ref_template=REFERENCE)  # type: ignore[arg-type]
    for route, method in operations:
        operation = openapi["paths"][route.path_format][method.lower()]
        body = _body(route)
        if body is not None:
            content = {"application/json": {"schema": references[body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        operation["responses"] = _responses(route, method, operation["responses"])
        operation["security"] = _security(route)
    openapi["components"]["schemas"] = openapi["components"].get("schemas", {}) | shared["$defs"]
    openapi["components"]["securitySchemes"] = KEYS
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's schemas of its 422, which is a 400 here
        openapi["components"]["schemas"].pop(unused, None)
    return openapi


def _body(route: RouteContext) -> type[BaseModel] | None:
    calls = (dependency.call for dependency in route.dependant.dependencies)
    return next((call.schema for call in calls if isinstance(call, BodyReader)), None)


def _responses(route: RouteContext, method: str, declared: dict[str, Any]) -> dict[str, Any]:
    path = str(route.path)
    declared_statuses = {str(status) for status in route.responses}
    body = _body(route)
    is_closed = not is_public(path, path)
    is_page = is_closed and path.startswith(ADMIN) and not path.startswith(ADMIN_JSON)
    names_something = "{" in path or (body is not None and "model" in body.model_fields)
    conditional = {401: is_closed, 303: is_page, 404: names_something, 415: method not in SAFE_METHODS}
    statuses = [*ALWAYS, *(status for status, applies in conditional.items() if applies)]
    retained = {
        status: response for status, response in declared.items() if int(status) < 400 or status in declared_statuses
    }
    responses = {str(status): response for status, response in problems(*statuses).items()} | retained
    name = "AnthropicError" if path.startswith(ANTHROPIC) else "OllamaError" if path in OLLAMA else "Error"
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REFERENCE.format(model=name)}}}
    if gets_error_page(path, method):
        content["text/html"] = {"schema": {"type": "string"}}
    return {
        status: response | ({"content": content} if int(status) >= 400 else {})
        for status, response in sorted(responses.items())
    }


def _security(route: RouteContext) -> list[dict[str, list[str]]]:
    path = str(route.path)
    if is_public(path, path):
        return []
    keys: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]
    return [*keys, {"session": []} if path.startswith(ADMIN) else {}]
