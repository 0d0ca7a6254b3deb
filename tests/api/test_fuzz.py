"""Random bodies on chat, completions and the control routes: no answer is a 5xx, except for an unavailable model."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.chat import ChatBody
from app.api.completions import CompletionBody
from app.api.control import LoadBody, NamedModel
from tests.api.fakes import chat_body, make_site

pytestmark = pytest.mark.anyio

SCHEMAS = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/api/load": LoadBody,
    "/api/unload": NamedModel,
    "/api/release": NamedModel,
}
GOOD = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": "demo-main", "prompt": "x"},
    "/api/load": {"model": "demo-main"},
    "/api/unload": {"model": "demo-main"},
    "/api/release": {"model": "demo-main"},
}

SITE = make_site()

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["demo-main", "demo-draft", "off", "auto", "text", "function", "user", "assistant"])
)
words = st.text(max_size=6) | st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "method", "parameters", "include_usage", "0", "12"]
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=12
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    """Draw a route, and a good body with up to four random fields, or, one time in ten, any value as the body."""
    path = draw(st.sampled_from(sorted(SCHEMAS)))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(values)
    fields = st.sampled_from(sorted(SCHEMAS[path].model_fields)) | words
    return path, GOOD[path] | draw(st.dictionaries(fields, values, max_size=4))


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(request=requests())
async def test_random_json(request: tuple[str, Any]) -> None:
    path, body = request
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    response = await SITE.client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code < 500 or response.json()["error"]["code"] == "model_unavailable", response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(path=st.sampled_from(sorted(SCHEMAS)), content=st.binary(max_size=64))
async def test_random_bytes(path: str, content: bytes) -> None:
    response = await SITE.client.post(path, content=content, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
