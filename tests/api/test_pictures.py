"""No API ignores a picture, a sound or a file: each is refused while models here read text only (F21), or told."""

from typing import Any

import pytest

from tests.api.fakes import Site

pytestmark = pytest.mark.anyio

URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]


def items(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, *parts]}]


def result(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [*blocks]}]}]


OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [INPUT]}
OLLAMA = [{"role": "user", "content": "x", "images": ["AAAA"]}]
SEEN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": user(URL)}),
    ("/v1/chat/completions", {"messages": user({"type": "image", "image": "AAAA"})}),
    ("/v1/chat/completions", {"messages": user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})}),
    ("/v1/chat/completions", {"messages": user({"type": "file", "file": {"file_id": "f"}})}),
    ("/v1/chat/completions", {"messages": OLLAMA}),
    ("/tokenize", {"messages": user(URL)}),
    ("/apply-template", {"messages": user(URL)}),
    ("/v1/responses", {"input": items(INPUT)}),
    ("/v1/responses", {"input": items({"type": "input_file", "file_id": "f"})}),
    ("/v1/messages", {"messages": user(BLOCK)}),
    ("/v1/messages", {"messages": user(PDF)}),
    ("/v1/messages", {"messages": user(), "system": [BLOCK]}),
    ("/v1/messages/count_tokens", {"messages": user(BLOCK)}),
    ("/api/chat", {"messages": OLLAMA}),
    ("/api/generate", {"prompt": "What is it?", "images": ["AAAA"]}),
    ("/api/generate", {"prompt": "What is it?", "images": ["AAAA"], "raw": True}),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "fields"), SEEN, ids=[f"{path} {str(fields)[:90]}" for path, fields in SEEN])
async def test_a_picture_is_refused(site: Site, path: str, fields: dict[str, Any], stream: bool) -> None:
    body = {"model": "demo-main", "max_tokens": 9, "stream": stream} | fields
    answer = await site.client.post(path, json=body)
    assert (answer.status_code, "text only" in answer.text) == (400, True), answer.text
    assert site.worker.commands == []


RESULTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [*user(), {"role": "tool", "tool_call_id": "a", "content": [URL]}]}),
    ("/v1/responses", {"input": [*items(), OUTPUT]}),
    ("/v1/responses", {"input": [*items(), OUTPUT | {"type": "custom_tool_call_output"}]}),
    ("/v1/messages", {"messages": result(BLOCK)}),
    ("/v1/messages", {"messages": result({"type": "text", "text": "x"}, BLOCK)}),
    ("/v1/messages/count_tokens", {"messages": result(BLOCK)}),
]


@pytest.mark.parametrize(("path", "fields"), RESULTS, ids=[f"{path} {str(fields)[-90:]}" for path, fields in RESULTS])
async def test_a_picture_in_the_result_of_a_tool_is_left_out_and_told(
    site: Site, path: str, fields: dict[str, Any]
) -> None:
    """An agent cannot take a result back: refused, its session could never go on."""
    answer = await site.client.post(path, json={"model": "demo-main", "max_tokens": 9} | fields)
    assert answer.status_code == 200, answer.text
    assert "left_out_part" in answer.text or path.endswith("count_tokens")
    if site.worker.commands:
        (text,) = [
            message["content"] for message in site.worker.commands[0].messages or [] if message["role"] == "tool"
        ]
        assert text.endswith("[left out: this model reads text only, no images, sound or files]")


TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}, "D"),
    ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "D"}]}}, "D"),
    ({"type": "document", "title": "T", "context": "from Ann", "source": {"type": "text", "data": "D"}},
     "T\nfrom Ann\nD"),
    ({"type": "search_result", "source": "http://x", "title": "T", "content": [{"type": "text", "text": "D"}]},
     "T\nhttp://x\nD"),
    ({"type": "tool_reference", "tool_name": "grep"}, "grep"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "text"), TEXTS, ids=[str(block)[:60] for block, _ in TEXTS])
async def test_documents_that_are_text_are_read(site: Site, block: dict[str, Any], text: str) -> None:
    for messages, content in ((user(block), f"What is it?\n\n{text}"), (result(block), text)):
        body = {"model": "demo-main", "max_tokens": 9, "messages": messages}
        answer = await site.client.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        assert (site.worker.commands[-1].messages or [])[0]["content"] == content


BLOCKS: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "error", "error_code": "x"}},
    {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "x", "input": {}},
    {"type": "made_up_next_year"},
]


@pytest.mark.parametrize("block", BLOCKS, ids=[block["type"] for block in BLOCKS])
async def test_blocks_of_what_anthropic_runs_are_left_out_and_named(site: Site, block: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, block]}
    turns = [*user(), said, {"role": "assistant", "content": [block]}, {"role": "user", "content": "And?"}]
    answer = await site.client.post("/v1/messages", json={"model": "demo-main", "max_tokens": 9, "messages": turns})
    assert answer.status_code == 200, answer.text
    contents = [message["content"] for message in site.worker.commands[-1].messages or ()]
    assert contents == ["What is it?", "I look.", "And?"]
    [warning] = answer.json()["warnings"]
    assert (warning["code"], block["type"] in warning["message"]) == ("left_out_block", True)


UNKNOWN_BLOCK = {"type": "made_up_next_year", "text": "lost"}
READ_BLOCK = {"type": "text", "text": "read"}


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [READ_BLOCK, UNKNOWN_BLOCK]},
        {"messages": user({"type": "tool_result", "tool_use_id": "t", "content": [READ_BLOCK, UNKNOWN_BLOCK]})},
        {"messages": user({"type": "tool_result", "tool_use_id": "t", "content": UNKNOWN_BLOCK})},
        {"messages": user({"type": "search_result", "title": "T", "content": [READ_BLOCK, UNKNOWN_BLOCK]})},
        {"messages": user({"type": "document", "source": {"type": "content", "content": [READ_BLOCK, UNKNOWN_BLOCK]}})},
    ],
    ids=["system", "a tool's result", "its only block", "a search result", "a document"],
)
async def test_a_block_that_is_left_out_within_another_one_is_named_too(site: Site, fields: dict[str, Any]) -> None:
    body = {"model": "demo-main", "max_tokens": 9, "messages": user()} | fields
    answer = await site.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert [warning["code"] for warning in answer.json()["warnings"]] == ["left_out_block"]
    assert "made_up_next_year" in answer.json()["warnings"][0]["message"]
