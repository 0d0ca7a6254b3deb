"""The input of a model: tokens, text and the prompt of a chat, through the endpoints of llama.cpp and vLLM."""

from typing import Any

import httpx2 as httpx

from tests.serving.conftest import Server

TEXT = "count with me: one two three 你好"


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "demo-assistant"} | body, timeout=60)


def test_text_becomes_tokens_and_text_again(server: Server) -> None:
    answer = post(server, "/tokenize", content=TEXT).json()
    assert answer["count"] == len(answer["tokens"]) > 5
    assert answer["max_model_len"] > 0
    assert post(server, "/tokenize", prompt=TEXT).json() == answer
    assert post(server, "/detokenize", tokens=answer["tokens"]).json()["content"] == TEXT


def test_a_chat_becomes_the_prompt_of_its_template(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    prompt = post(server, "/apply-template", messages=messages).json()["prompt"]
    assert prompt.startswith("<|im_start|>")
    assert "Hello" in prompt
    tokens = post(server, "/tokenize", messages=messages).json()["tokens"]
    assert post(server, "/detokenize", tokens=tokens).json()["prompt"] == prompt


def test_what_cannot_be_read_is_refused(server: Server) -> None:
    assert post(server, "/tokenize").json()["error"]["message"] == "give one of content, prompt and messages"
    assert post(server, "/detokenize", tokens=[999_999]).status_code == 400
    assert post(server, "/detokenize", tokens=[]).status_code == 400
    assert post(server, "/apply-template", messages=[]).status_code == 400
