"""A field that Paceline ignores is named in the answer, unless it would have no effect here (F11, F18, F21)."""

import logging
from typing import Any

import pytest

from tests.api.fakes import Site

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": USER},
    "/api/chat": {"messages": USER},
    "/api/generate": {"prompt": "Hi"},
    "/tokenize": {"messages": USER},
    "/apply-template": {"messages": USER},
}
TOLD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"top_logprobs": 5}, "top_logprobs"),
    ("/v1/responses", {"conversation": "conv_1"}, "conversation"),
    ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, "prompt"),
    ("/v1/responses", {"truncation": "auto"}, "truncation"),
    ("/v1/responses", {"include": ["message.output_text.logprobs"]}, "include"),
    ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
    ("/v1/responses", {"max_tool_calls": 3}, "max_tool_calls"),
    ("/v1/responses", {"max_tokens": 3}, "max_tokens"),
    ("/v1/responses", {"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions"),
    ("/v1/chat/completions", {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ("/v1/chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}, "chat_template"),
    ("/v1/chat/completions", {"temprature": 0.1}, "temprature"),
    ("/v1/completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ("/v1/messages", {"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers"),
    ("/v1/messages", {"container": "c"}, "container"),
    ("/v1/messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ("/v1/messages/count_tokens", {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ("/api/generate", {"context": [1, 2, 3]}, "context"),
    ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
    ("/api/generate", {"raw": True, "context": [1]}, "context"),
    ("/api/generate", {"suffix": ")", "system": "Be brief."}, "system"),
    ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat"),
    ("/api/chat", {"top_logprobs": 3}, "top_logprobs"),
    ("/tokenize", {"add_special_tokens": True}, "add_special_tokens"),
    ("/apply-template", {"chat_template": "x"}, "chat_template"),
]
SILENT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"metadata": {"a": "b"}, "user": "me", "store": True, "service_tier": "auto"}),
    ("/v1/chat/completions", {"safety_identifier": "x", "prompt_cache_key": "x", "prediction": {"type": "content"}}),
    ("/v1/chat/completions", {"modalities": ["text"], "verbosity": "medium", "functions": [], "audio": None}),
    ("/v1/responses", {"store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "x"}),
    ("/v1/responses", {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "medium"}}),
    ("/v1/responses", {"truncation": "disabled", "client_metadata": {"a": "b"}, "conversation": None}),
    ("/v1/messages", {"metadata": {"user_id": "x"}, "service_tier": "auto", "system": [
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    ]}),
    ("/v1/messages", {"diagnostics": {"previous_message_id": "msg_1"}, "safeguards": {"a": 1}}),
    ("/v1/messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    ("/v1/messages/count_tokens", {"max_tokens": 9, "stream": True, "temperature": 0.5, "stop_sequences": ["x"]}),
    ("/v1/responses", {"prompt_cache_options": {"mode": "implicit"}}),
    ("/v1/responses", {"reasoning": {"effort": "low", "context": "auto", "mode": "standard"}}),
    ("/v1/chat/completions", {"metadata": {"tags": ["a"]}}),
    ("/api/chat", {"options": {"num_ctx": 8192, "num_gpu": 1, "temperature": 0.5}}),
    ("/api/generate", {"context": [], "template": "", "images": []}),
]  # fmt: skip


async def warned(site: Site, path: str, fields: dict[str, Any]) -> list[str]:
    answer = await site.client.post(path, json={"model": "demo-main", "stream": False} | GOOD[path] | fields)
    assert answer.status_code == 200, answer.text
    return [warning["parameter"] for warning in answer.json().get("warnings", ())]


@pytest.mark.parametrize(("path", "fields", "name"), TOLD, ids=[f"{path} {name}" for path, _, name in TOLD])
async def test_a_field_that_is_ignored_is_told(site: Site, path: str, fields: dict[str, Any], name: str) -> None:
    assert await warned(site, path, fields) == [name]


@pytest.mark.parametrize(("path", "fields"), SILENT, ids=[f"{path} {[*fields]}" for path, fields in SILENT])
async def test_what_would_change_nothing_here_is_passed_over(site: Site, path: str, fields: dict[str, Any]) -> None:
    assert await warned(site, path, fields) == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
async def test_it_is_told_in_streams_too_and_once(site: Site, path: str, stream: bool) -> None:
    body = {"model": "demo-main", "stream": stream, "made_up": 1} | GOOD[path]
    text = (await site.client.post(path, json=body)).text
    assert text.count('"parameter":"made_up"') == 1


async def test_each_kind_is_in_the_log_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for number in range(3):
        assert (await site.chat(functions=[{"name": "f"}], temprature=number + 1)).status_code == 200
    assert caplog.text.count("functions is ignored") == 1
    assert caplog.text.count("temprature is ignored") == 1


async def test_embeddings_and_reranks_tell_it_as_well(site: Site) -> None:
    for path in ("/v1/embeddings", "/api/embed"):
        body = {"model": "demo-main", "input": ["a", "b"], "late_chunking": True}
        answer = (await site.client.post(path, json=body)).json()
        assert [warning["parameter"] for warning in answer["warnings"]] == ["late_chunking"]


async def test_a_raw_prompt_beside_a_system_prompt_is_refused(site: Site) -> None:
    fields = {"prompt": "Hi", "raw": True, "system": "Be brief."}
    refused = await site.client.post("/api/generate", json={"model": "demo-main"} | fields)
    assert refused.status_code == 400
    assert "put system into it" in refused.text


@pytest.mark.parametrize(("path", "field"), [("/api/embed", "input"), ("/api/embeddings", "prompt")])
async def test_what_cannot_be_embedded_is_refused_by_its_own_name(site: Site, path: str, field: str) -> None:
    refused = await site.client.post(path, json={"model": "demo-main", field: None})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith(field), refused.text


async def test_thousands_of_unknown_fields_fill_neither_the_answer_nor_the_log(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for batch in range(12):
        fields: dict[str, Any] = {f"x{batch}_{number}": 1 for number in range(1000)}
        assert len((await site.chat(**fields)).json()["warnings"]) == 32
    assert caplog.text.count("logged once") == 256
