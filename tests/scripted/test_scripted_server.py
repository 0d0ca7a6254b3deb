"""Every surface of the real server returns what the scripted models say."""

import json

import pytest

from tests.scripted.server import ScriptedServer
from tests.scripted.surfaces import SURFACES, ask

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
JSON_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALLS = {
    "demo": JSON_CALL,
    "Qwen-Qwen2.5-7B-Instruct": JSON_CALL,
    "Qwen3-Coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    ),
    "openai-gpt-oss-120b": '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Paris"}<|call|>',
}
"""The same call as the models of each template write it."""


@pytest.mark.parametrize("surface", SURFACES)
def test_a_play_is_told_as_it_is_written(scripted: ScriptedServer, surface: str) -> None:
    said = ask(scripted.client, surface, scripted.model(), f"Greet me. {scripted.play('Hello there, Zoë.')}")
    assert (said.text, said.calls, said.error) == ("Hello there, Zoë.", [], "")


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("template", CALLS)
def test_a_call_is_the_same_whole_and_streamed(scripted: ScriptedServer, template: str, surface: str) -> None:
    prompt = f"Paris? {scripted.play(CALLS[template])}"
    model = scripted.model(template)
    whole, streamed = (
        ask(scripted.client, surface, model, prompt, [WEATHER], stream=stream) for stream in (False, True)
    )
    assert whole.objects == streamed.objects == [("get_weather", {"city": "Paris"})]
    assert (whole.text, whole.finish) == (streamed.text, streamed.finish)


def test_the_template_is_the_published_one(scripted: ScriptedServer) -> None:
    body = {"model": scripted.model("openai-gpt-oss-120b"), "messages": [{"role": "user", "content": "Hi"}]}
    prompt = scripted.client.post("/apply-template", json=body).json()["prompt"]
    assert prompt.startswith("<|start|>system<|message|>You are ChatGPT")
    assert "<|start|>user<|message|>Hi<|end|>" in json.dumps(prompt)
