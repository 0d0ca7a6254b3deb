"""Ollama's own client against a real server."""

from typing import Any

import ollama
import pytest

from tests.serving.conftest import Server

MODEL = "demo-assistant"
COLD: Any = {"temperature": 0, "num_predict": 60}


@pytest.fixture(scope="module")
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_a_chat_whole_and_streamed(client: ollama.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count from 1 to 5."}]
    whole = client.chat(model=f"{MODEL}:latest", messages=messages, options=COLD)
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.eval_count
    assert whole.prompt_eval_count
    pieces = list(client.chat(model=MODEL, messages=messages, options=COLD, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces][-2:] == [False, True]


def test_a_tool_is_called_and_its_result_read(client: ollama.Client) -> None:
    def get_weather(city: str) -> str:
        """Get the current weather for a city

        Args:
            city: its name
        """
        return f"rain in {city}, 4 degrees"

    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = client.chat(model=MODEL, messages=messages, tools=[get_weather], options=COLD)
    [call] = called.message.tool_calls or []
    assert (call.function.name, dict(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    messages += [called.message, {"role": "tool", "content": "rain, 4 degrees", "tool_name": "get_weather"}]
    answer = client.chat(model=MODEL, messages=messages, tools=[get_weather], options=COLD)
    assert "4 degrees" in (answer.message.content or "")


def test_generate_formats_and_embeddings(client: ollama.Client) -> None:
    plain = client.generate(model=MODEL, prompt="Count from 1 to 5.", options=COLD)
    assert plain.response
    for endless in (-1, -2):
        longest = client.generate(model=MODEL, prompt="Count from 1 to 5.", options=COLD | {"num_predict": endless})
        assert (longest.response, longest.done_reason) == (plain.response, "stop")
    raw = client.generate(model=MODEL, prompt="one two three one two", raw=True, options=COLD)
    assert raw.eval_count
    schema: Any = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    held = client.generate(model=MODEL, prompt="Is it?", format=schema, options=COLD)
    assert held.response in {'{"ok": true}', '{"ok": false}'}
    assert len(client.embed(model=MODEL, input=["a", "b"]).embeddings) == 2
    assert len(client.embeddings(model=MODEL, prompt="a").embedding) > 8


def test_models_are_listed_shown_loaded_and_let_go(client: ollama.Client) -> None:
    assert MODEL in [model.model for model in client.list().models]
    assert {"tools", "thinking"} <= set(client.show(MODEL).capabilities or [])
    assert client.generate(model="demo-hybrid", prompt="", keep_alive="5m").done_reason == "load"
    assert "demo-hybrid" in [model.model for model in client.ps().models]
    assert client.generate(model="demo-hybrid", prompt="", keep_alive=0).done_reason == "unload"
    assert client.generate(model="demo-hybrid", prompt="one two", keep_alive=0, options=COLD).response
    while "demo-hybrid" in [model.model for model in client.ps().models]:
        pass  # it is unloaded about a second later
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat(model="nothing", messages=[{"role": "user", "content": "x"}])
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="text only"):
        client.chat(model=MODEL, messages=[{"role": "user", "content": "x", "images": [b"aaaa"]}])
