"""Bad requests: always an OpenAI error object with a 4xx status, never a stream, and the next good request works."""

import json
from typing import Any

import pytest

from tests.api.fakes import Site, chat_body, make_site, model

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "Hi"}


async def refused(site: Site, path: str, content: bytes | str, status: int = 400) -> dict[str, Any]:
    """Return the error object of a refused body; assert that the worker never got it and a good one still works."""
    response = await site.client.post(path, content=content, headers=JSON)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert site.worker.commands == []
    assert (await site.chat()).status_code == 200
    return error


BODIES = {
    "empty": b"",
    "string": b'"str"',
    "list": b"[]",
    "number": b"42",
    "null": b"null",
    "not json": b"{",
    "trailing": b"{} {}",
    "NaN": b'{"model": "demo-main", "temperature": NaN}',
    "Infinity": b'{"temperature": Infinity}',
    "-Infinity": b'{"temperature": -Infinity}',
    "1e999": b'{"temperature": 1e999}',
    "10^30": b'{"metadata": 1' + b"0" * 30 + b"}",
    "2^64 deep inside": b'{"tools": [{"type": "function", "function": {"parameters": {"a": 18446744073709551616}}}]}',
    "5000 digits": b'{"seed": ' + b"1" * 5000 + b"}",
    "duplicate key": b'{"n": 1, "n": 2}',
    "nested duplicate key": b'{"metadata": {"a": {"b": 1, "b": 2}}}',
    "byte-order mark": b"\xef\xbb\xbf{}",
    "UTF-16": json.dumps(chat_body()).encode("utf-16"),
    "invalid UTF-8": b'{"model": "\xff"}',
    "raw NUL": b'{"model": "\x00"}',
    "lone surrogate in key": b'{"\\udfff": 1}',
    "40000 deep lists": b'{"messages": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
    "40000 deep objects": b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
    "65 deep": b'{"metadata": ' + b"[" * 65 + b"]" * 65 + b"}",
}


@pytest.mark.parametrize("path", [CHAT, TEXT, "/api/load", "/api/unload"])
@pytest.mark.parametrize("content", BODIES.values(), ids=BODIES)
async def test_a_body_that_is_no_good_json(site: Site, path: str, content: bytes) -> None:
    assert (await refused(site, path, content))["code"] == "invalid_json"


SHARED: list[dict[str, Any]] = [
    {"model": 5},
    {"model": "x" * 301},
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": True},
    {"temperature": "1"},
    {"top_p": -0.1},
    {"top_p": 1.01},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": -1},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"presence_penalty": 2.5},
    {"frequency_penalty": -2.5},
    {"seed": 2**64},
    {"seed": -(2**63) - 1},
    {"seed": "5"},
    {"seed": True},
    {"seed": 1.0},
    {"max_tokens": 0},
    {"max_tokens": -2},
    {"max_tokens": 2**31},
    {"max_tokens": True},
    {"n": 0},
    {"n": 9},
    {"n": 10**15},
    {"stop": ["a", 1]},
    {"stop": ["a"] * 33},
    {"stop": ["a" * 257]},
    {"stop": {"a": 1}},
    {"logit_bias": []},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"٣": 1}},
    {"logit_bias": {"99999999999": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"1": "x"}},
    {"logit_bias": {"1": True}},
    {"logit_bias": {str(key): 1 for key in range(1025)}},
    {"stream": "yes"},
    {"stream": 1},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": "x"}},
    {"stream": True, "stream_options": 1},
    {"response_format": {"type": "json_object", "schema": "no"}},
    {"structured_outputs": {"regex": "a", "sound": 1}},
    {"structured_outputs": {"regex": ""}},
    {"guided_choice": []},
    {"guided_json": "{"},
    {"guided_regex": "a", "response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "sound"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": 123}}},
    {"response_format": {"type": 123}},
    {"response_format": {"type": ["text"]}},
    {"response_format": "hiccup"},
    {"speculation": "auto"},
    {"speculation": {"method": "magic"}},
    {"speculation": {"method": 5}},
    {"speculation": {"num_draft_tokens": 0}},
    {"speculation": {"num_draft_tokens": 65}},
    {"speculation": {"metod": "off"}},
    {"num_draft_tokens": 65},
    {"num_draft_tokens": True},
    {"draft_model": 1},
    {"draft_model": "off", "speculation": {"method": "draft_model"}},
    {"draft_model": "off", "speculation": {"method": "dflash"}},
]
MESSAGES: list[Any] = [
    None,
    "string",
    [],
    [123],
    [{}],
    [{"role": "user"}],
    [{"role": 123, "content": "x"}],
    [{"role": "alien", "content": "x"}],
    [{"role": "user", "content": 123}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"text": "x"}]}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": "x", "name": 5}],
    [USER, {}],
    [{"role": "user", "content": "x", "images": ["AAAA"]}],
    [{"role": "system", "content": "x", "images": {}}, USER],
    [USER] * 8193,
]


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


CHAT_ONLY: list[dict[str, Any]] = [
    *({"messages": messages} for messages in MESSAGES),
    {"logprobs": 1},
    {"top_logprobs": 2},
    {"logprobs": False, "top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    {"logprobs": True, "top_logprobs": 21, "stream": True},
    {"logprobs": True, "top_logprobs": -1},
    {"max_completion_tokens": 0},
    {"max_completion_tokens": -2},
    {"chat_template_kwargs": {"tokenize": False}},
    {"chat_template_kwargs": {"add_generation_prompt": False}},
    {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    {"chat_template_kwargs": {"messages": "x"}},
    {"chat_template_kwargs": {"__class__": 1}},
    {"chat_template_kwargs": {"a": [1]}},
    {"chat_template_kwargs": {f"a{key}": 1 for key in range(33)}},
    {"tools": "f"},
    {"tools": [{}]},
    {"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
    {"tools": [tool(type=5)]},
    {"tools": [tool(type="object", properties={"a": {"type": {"x": 1}}})]},
    {"tools": [tool(pattern=5)]},
    {"tools": [tool(pattern="(" * 3000)]},
    {"tools": [tool(description="x" * 70_000)], "tool_choice": "required"},
    {"tools": [tool(description="x" * 70_000)], "response_format": {"type": "json_object"}},
    {"tools": [tool(**nested(40))]},
    {"tools": [{"type": "custom", "custom": {}}]},
    {"tools": [tool()], "tool_choice": {"type": "allowed_tools"}},
    {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}},
    {"continue_final_message": True},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"tools": [tool()], "tool_choice": "maybe"},
    {"tool_choice": "required"},
    {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tools": [tool()], "tool_choice": {"type": "function"}},
    {"thinking": {"type": "enabled", "budget_tokens": -1}},
    {"reasoning_effort": "much"},
]
PROMPTS: list[Any] = [
    None,
    "",
    5,
    True,
    [],
    [""],
    [[]],
    [-1],
    [[-1]],
    [1.5],
    [True],
    [2**31],
    ["a", 1],
    ["a", [1]],
    [[1], ["a"]],
    [[[1]]],
    ["a"] * 2049,
    {"a": 1},
]
TEXT_ONLY: list[dict[str, Any]] = [
    *({"prompt": prompt} for prompt in PROMPTS),
    {"logprobs": 21},
    {"logprobs": 30, "stream": True},
    {"logprobs": True},
    {"echo": "yes"},
    {"echo": True, "max_tokens": -2},
    {"best_of": 3},
    {"suffix": "end", "echo": True},
    {"suffix": "end", "prompt": [1, 2]},
]
CASES = [
    *((CHAT, chat_body(), fields) for fields in (*SHARED, *CHAT_ONLY)),
    *((TEXT, {"model": "demo-main", "prompt": "Once"}, fields) for fields in (*SHARED, *TEXT_ONLY)),
]


@pytest.mark.parametrize(("path", "good", "bad"), CASES, ids=[f"{path[4:8]} {str(bad)[:50]}" for path, _, bad in CASES])
async def test_a_field_out_of_its_bounds(site: Site, path: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    for stream in ({}, {"stream": True}):
        body = good | stream | bad
        if stream and "stream_options" in bad:
            continue
        await refused(site, path, json.dumps(body))
        site.worker.commands.clear()


@pytest.mark.parametrize("missing", ["messages", "prompt"])
async def test_a_required_field_is_named(site: Site, missing: str) -> None:
    path = CHAT if missing == "messages" else TEXT
    error = await refused(site, path, b'{"model": "demo-main"}')
    assert error["param"] == missing


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/messages", {"max_tokens": 5, "messages": [USER], "stop_sequences": ["x"] * 99}, "stop_sequences"),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "sound"}}}, "text.format"),
        ("/api/chat", {"messages": [USER], "options": {"num_predict": 1 << 40}}, "options.num_predict"),
        ("/api/generate", {"prompt": "Hi", "options": {"repeat_penalty": "a"}}, "options.repeat_penalty"),
    ],
)
async def test_a_field_has_the_name_that_the_client_gave_it(
    site: Site, path: str, body: dict[str, Any], name: str
) -> None:
    answer = await site.client.post(path, json={"model": "demo-main"} | body)
    assert answer.status_code == 400
    assert name in answer.text


async def test_the_message_says_where_and_never_quotes_the_input(site: Site) -> None:
    error = await refused(site, CHAT, json.dumps(chat_body(messages=[USER, {"role": "secret!", "content": "x"}])))
    assert error["param"] == "messages"
    assert "messages.1.role" in error["message"]
    assert "secret" not in error["message"]
    missing = await refused(make_site(), CHAT, json.dumps(chat_body(response_format={"type": "json_schema"})))
    assert missing["param"] == "response_format"


SAID: list[tuple[dict[str, Any], str]] = [
    ({"speculation": {"metod": "off"}}, "speculation.metod: there is no such field"),
    ({"tool_choice": "required"}, "tool_choice asks for a call, but there are no tools"),
    *(
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]},
            "messages.0.content: this model reads text only",
        )
        for part in (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "file", "file": {"file_id": "f"}},
        )
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a valid string"),
]


@pytest.mark.parametrize(("bad", "said"), SAID, ids=[said for _, said in SAID])
async def test_what_is_not_understood_is_named(site: Site, bad: dict[str, Any], said: str) -> None:
    assert said in (await refused(site, CHAT, json.dumps(chat_body(**bad))))["message"]


@pytest.mark.parametrize(
    "kind",
    ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "application/jsonx"],
)
async def test_only_json_is_taken(site: Site, kind: str) -> None:
    body = json.dumps(chat_body())
    response = await site.client.post(CHAT, content=body, headers={"content-type": kind})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"
    assert (await site.chat()).status_code == 200


async def test_no_content_type_at_all(site: Site) -> None:
    assert (await site.client.post(CHAT)).status_code == 415


async def test_unknown_routes_and_methods_are_error_objects(site: Site) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/docs", 404),
        ("POST", "/v1/models", 405),
        ("DELETE", CHAT, 405),
        ("GET", CHAT, 405),
    ):
        response = await site.client.request(method, path, headers=JSON)
        assert response.status_code == status, path
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert "GET /v1/models, " in response.json()["error"]["message"], "it names what there is"
        assert "admin" not in response.json()["error"]["message"]


async def test_large_bodies() -> None:
    site = make_site(models=(model("demo-main"),))  # without a tokenizer, no text is checked against the context
    long = chat_body(messages=[{"role": "user", "content": "x" * 1_000_000}])
    assert (await site.client.post(CHAT, json=long)).status_code == 200

    async def pieces() -> Any:
        for _ in range(33):
            yield b" " * 1024 * 1024

    for content in (b" " * (32 * 1024 * 1024 + 1), pieces()):
        response = await site.client.post(CHAT, content=content, headers=JSON)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert response.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": {}, "text": ""}]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": {}, "text": ""}]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": ["x"]}]}]}),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [5]}]}),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}),
    ],
)
async def test_a_part_of_a_message_that_is_none_is_refused(site: Site, path: str, fields: dict[str, Any]) -> None:
    response = await site.client.post(path, json={"model": "demo-main", "max_tokens": 1} | fields)
    assert response.status_code == 400, response.text


async def test_a_switch_is_no_number_on_the_dashboard_either() -> None:
    site = make_site(api_key="sk-test")
    headers = {"x-api-key": "sk-test"}
    response = await site.client.post("/admin/api/worker/drain", json={"seconds": False}, headers=headers)
    assert response.status_code == 400
    assert site.worker.renewals == []


async def test_half_a_character_that_a_client_left_is_replaced_and_no_turn_is_refused(site: Site) -> None:
    cut = '"\\ud83d\\ude42 and \\ud83d"'
    body = f'{{"model": "demo-main", "messages": [{{"role": "user", "content": {cut}}}], "metadata": {{"a": {cut}}}}}'
    response = await site.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    (message,) = site.worker.commands[-1].messages or ()
    assert message["content"] == "\U0001f642 and \N{REPLACEMENT CHARACTER}"
