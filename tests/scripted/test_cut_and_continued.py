"""Answers that the token limit cuts off, and answers that continue a client's text, end to end (F13, F15)."""

from typing import Any

import pytest

from tests.scripted.server import ScriptedServer
from tests.scripted.surfaces import PATHS, SURFACES, ask

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
LONG = "x" * 400
CALLS = {
    "demo": f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{LONG}"}}}}\n</tool_call>',
    "Qwen3-Coder": f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{LONG}\n</parameter>\n</function>",
    "openai-gpt-oss-120b": f'<|channel|>commentary to=functions.get_weather<|message|>{{"city": "{LONG}"}}<|call|>',
    "Mistral-Small-3.2-24B-Instruct-2506": f'[TOOL_CALLS]get_weather[ARGS]{{"city": "{LONG}"}}',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("template", CALLS)
def test_a_call_that_the_limit_cuts_is_not_handed_out_as_whole(
    scripted: ScriptedServer, template: str, surface: str, stream: bool
) -> None:
    prompt, model = scripted.play(CALLS[template]), scripted.model(template)
    said = ask(scripted.client, surface, model, prompt, [WEATHER], stream=stream, max_tokens=40)
    assert said.error == ""
    assert said.finish in {"length", "max_tokens", "incomplete"}
    if surface == "responses":
        assert said.statuses == ["incomplete"] * len(said.statuses)
    elif not (surface == "chat" and stream):
        assert said.calls == []


BEGUN = "The answer is ("
TEMPLATES = (
    "demo",
    "Qwen3.5-4B",
    "openai-gpt-oss-120b",
    "meta-llama-Llama-3.3-70B-Instruct",
    "Mistral-Small-3.2-24B-Instruct-2506",
)


def prompt_tokens(surface: str, body: dict[str, Any]) -> int:
    match surface:
        case "messages":
            usage = body["usage"]
            return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
        case "ollama":
            return int(body["prompt_eval_count"])
    usage = body["usage"]
    return int(usage.get("prompt_tokens") or usage["input_tokens"])


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_goes_on_where_the_last_message_ends(scripted: ScriptedServer, template: str, surface: str) -> None:
    model, client = scripted.model(template), scripted.client
    messages = [
        {"role": "user", "content": f"What is it? {scripted.play('42).')}"},
        {"role": "assistant", "content": BEGUN},
    ]
    prompt = client.post("/apply-template", json={"model": model, "messages": messages}).json()["prompt"]
    assert prompt.endswith(BEGUN)
    said = ask(client, surface, model, messages)
    assert (said.text, said.error) == ("42).", "")
    own: dict[str, Any] = {"input": messages} if surface == "responses" else {"messages": messages}
    body = {"model": model, "stream": False, "max_tokens": 99} | own
    tokens = client.post("/tokenize", json={"model": model, "messages": messages}).json()["count"]
    assert prompt_tokens(surface, client.post(PATHS[surface], json=body).json()) == tokens
