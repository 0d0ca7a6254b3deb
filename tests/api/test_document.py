"""The OpenAPI document: every route is in it, with its body, its answers and its errors."""

from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from jsonschema import Draft202012Validator

from app.serving.document import document
from tests.api.fakes import Site, make_site

pytestmark = pytest.mark.anyio

DOCUMENT = document(make_site().app)
WITH_BODY = {"post", "put", "patch"}
BODILESS = {
    "/admin/api/logout",
    "/admin/api/downloads/{download_id}/{verb}",
    "/api/cache/clear",
    "/admin/api/prefixes/clear",
}


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    ]


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"components": DOCUMENT["components"]}


def test_every_route_is_in_it_and_says_what_it_does(site: Site) -> None:
    routes = {
        (route.path_format, method.lower())
        for route in iter_route_contexts(site.app.routes)
        for method in route.methods or ()
    }
    assert {(path, method) for path, method, _ in operations()} == routes
    assert [path for path, _, operation in operations() if not operation["description"]] == []


def test_every_body_has_a_schema() -> None:
    bare = {path for path, method, operation in operations() if method in WITH_BODY and "requestBody" not in operation}
    assert bare == BODILESS
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_null_is_absent_in_every_field_of_a_client_that_may_be_left_out() -> None:
    """Clients that were generated from a schema send unset fields as null."""
    refusing = []
    for path, method, operation in operations():
        if "requestBody" not in operation or not path.startswith(("/v1/", "/api/")):
            continue
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]
        optional = schema["properties"].keys() - schema.get("required", ())
        for name in sorted(optional):
            validator = Draft202012Validator(resolved(schema["properties"][name]))
            if not validator.is_valid(None):
                refusing.append(f"{method} {path}: {name}")
    assert refusing == []


def test_every_operation_tells_its_errors_in_the_shape_of_its_clients() -> None:
    for path, method, operation in operations():
        statuses = set(operation["responses"])
        assert {"400", "403", "431", "500", "503"} <= statuses, path
        assert ("401" in statuses) == bool(operation["security"]), path
        assert ("415" in statuses) == (method != "get"), path
        assert all(answer["description"] for answer in operation["responses"].values()), path
    shapes = {
        path: DOCUMENT["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat")
    }
    assert [shape.rpartition("/")[2] for shape in shapes.values()] == ["Error", "AnthropicError", "OllamaError"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Once"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "stream": False}),
        ("/api/generate", {"prompt": "Hi", "stream": False}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/api/embed", {"input": "Hi"}),
    ],
)
async def test_answers_are_as_it_says(site: Site, path: str, body: dict[str, Any]) -> None:
    response = await site.client.post(path, json=body | {"model": "demo-main"})
    documented = DOCUMENT["paths"][path]["post"]["responses"][str(response.status_code)]["content"]["application/json"]
    assert response.status_code == 200, response.text
    Draft202012Validator(resolved(documented["schema"])).validate(response.json())


async def test_it_is_served_to_whoever_may_call(site: Site) -> None:
    assert (await site.client.get("/openapi.json")).json() == DOCUMENT
