"""JSON that no client sends, on every route that takes a body or deletes."""

import asyncio
import json
import random
import re
import time
from typing import Any

import httpx2

from campaign.attack import RESTART_ROUTE, TurnContext
from campaign.chats import MODEL

SECONDS = 10.0
CLIENTS = 8
DEEP, MANY = 100_000, 100_000
METHODS = ("post", "put", "patch", "delete")
EXCLUDED_ROUTES = (RESTART_ROUTE, "/admin/api/worker/restart", "/admin/api/worker/drain")
"""Routes that end the server or the worker, whatever the body (others need both); the fuzzer calls the last two."""
WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1 << 31, 1 << 53, 1 << 63, -(1 << 63), 10**400, 0.5, 1e308, "", "x", "x" * 100_000),
    *([], {}, [[]], [None], {"": {}}, [{"role": "user"}], "\ud800", "\x00", "../../../etc/passwd", "1" * 5000),
)
"""Values that fit few fields."""
IDENTIFIERS = (
    "0",
    "-1",
    "999999",
    str(1 << 63),
    "9" * 400,
    "%00",
    "..%2f..%2fetc",
    "a" * 3000,
    "%F0%9F%A6%A9",
    MODEL,
    "%ff",
)
DOCUMENTS = (
    *(b"", b"null", b"[]", b'"text"', b"NaN", b"{} {}", b"{'model': 'x'}", b'{"model": "x",}', b"\xef\xbb\xbf{}"),
    b'{"temperature": NaN}',
    b'{"temperature": Infinity, "max_tokens": -Infinity}',
    b'{"temperature": 1e400, "seed": -1e400}',
    b'{"model": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
    b'{"model": "\xff\xfe\xc3"}',
    b'{"model": "a", "model": "b", "model": {"model": 1}}',
    "{}".encode("utf-16"),
)
"""Documents that are wrong whatever the route."""
LARGE_DOCUMENTS = (
    b'{"max_tokens": ' + b"9" * 100_000 + b"}",
    b"[" * DEEP,
    b"[" * DEEP + b"]" * DEEP,
    b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    b'{"model": "' + b"\\u0000" * 10_000 + b'"}',
    json.dumps({f"key{number}": number for number in range(MANY)}).encode(),
    json.dumps({"messages": [{}] * MANY}).encode(),
    json.dumps({"k" * 1_000_000: "v"}).encode(),
)
LARGE_SHARE, WHOLE_SHARE = 0.05, 0.4
"""Share of large documents, and share of documents that are wrong as a whole among the others."""


def operations(document: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Return method, path and field names of each route that changes something."""
    shapes = document.get("components", {}).get("schemas", {})
    found_operations = []
    for path, methods in document["paths"].items():
        for method in sorted(set(methods) & set(METHODS) if path not in EXCLUDED_ROUTES else ()):
            content = methods[method].get("requestBody", {}).get("content", {}).get("application/json", {})
            shape = content.get("schema", {})
            shape = shapes.get(shape.get("$ref", "").rpartition("/")[2], shape)
            found_operations.append((method.upper(), path, sorted(shape.get("properties", {}))))
    return found_operations


def hostile_body(rng: random.Random, fields: list[str]) -> bytes:
    """Return a document that is wrong as a whole, or one whose fields have values that do not fit."""
    if rng.random() < LARGE_SHARE:
        return rng.choice(LARGE_DOCUMENTS)
    if not fields or rng.random() < WHOLE_SHARE:
        return rng.choice(DOCUMENTS)
    chosen = rng.sample(fields, min(len(fields), rng.randint(1, 4)))
    body = {"model": MODEL, "max_tokens": 1} | {name: rng.choice(WRONG_VALUES) for name in chosen}
    return json.dumps(body).encode("utf-8", "surrogatepass")


async def hostile_bodies(context: TurnContext) -> None:
    """Send hostile bodies for some seconds, many at once."""
    async with context.server.client(context.server.admin_key) as admin:
        routes = operations((await admin.get("/openapi.json")).json())
        ends_at = time.monotonic() + SECONDS

        async def send() -> None:
            while time.monotonic() < ends_at:
                method, path, fields = context.rng.choice(routes)
                path = re.sub(r"\{[^}]*\}", lambda _: context.rng.choice(IDENTIFIERS), path)
                content = hostile_body(context.rng, fields)
                description = f"{method} {path[:80]} {content[:60]!r}"
                context.begin(description)
                try:
                    answer = await admin.request(
                        method, path, content=content, headers={"content-type": "application/json"}
                    )
                    context.findings.count_response(answer.status_code, answer.headers, answer.content, description)
                except httpx2.TransportError as error:
                    context.findings.tried += 1
                    context.findings.failures.append(f"{description}: no answer ({type(error).__name__})")

        await asyncio.gather(*(send() for _ in range(CLIENTS)))
