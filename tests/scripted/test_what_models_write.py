"""Model outputs from public bug reports: what the real server makes of them on each surface, whole and streamed."""

from typing import Any

import pytest

from tests.scripted.server import ScriptedServer
from tests.scripted.surfaces import SURFACES, ask

PROPERTIES: dict[str, Any] = {"city": {"type": "string"}, "day": {"type": "integer"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "It works.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
    for name in ("get_weather", "log_event")
]
PARIS = ("get_weather", {"city": "Paris"})
JSON_PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
QWEN, QWEN3, CODER = "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-Coder"
QWEN35, MINIMAX, KIMI = "Qwen3.5-4B", "MiniMax-M2", "moonshotai-Kimi-K2"
GPT_OSS, MISTRAL, LLAMA = (
    "openai-gpt-oss-120b",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "meta-llama-Llama-3.3-70B-Instruct",
)
DEEPSEEK = "deepseek-ai-DeepSeek-V3.1"
CITY = "<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>"
DAY = "<tool_call>\n<function=log_event>\n<parameter=day>\n2026-01-15\n</parameter>\n</function>\n</tool_call>"
INVOKE = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>'
KIMI_CALL = '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
DEEPSEEK_CALL = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "a\tb"}<｜tool▁call▁end｜>'
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello"
FENCED = 'Example:\n```xml\n<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>\n```\nThat was it.'


def marked(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def call(arguments: str) -> str:
    return marked(f'{{"name": "get_weather", "arguments": {arguments}}}')


WRITTEN: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    # control characters and commas in arguments
    (QWEN, call('{"city": "a\tb\nc"}'), "", [("get_weather", {"city": "a\tb\nc"})]),
    (QWEN, call('{"city": "Paris",}'), "", [PARIS]),
    (DEEPSEEK, f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}<｜tool▁calls▁end｜>", "", [("get_weather", {"city": "a\tb"})]),
    (GPT_OSS, "<|channel|>commentary to=functions.get_weather<|message|>not json<|call|>", "not json", []),
    # a parameter whose text does not fit its type or contains a mark
    (CODER, DAY, "", [("log_event", {"day": "2026-01-15"})]),
    (CODER, marked(CITY.format("</parameter>;")), "", [("get_weather", {"city": "</parameter>;"})]),
    (CODER, DAY.replace("2026-01-15", "3.5"), "", [("log_event", {"day": "3.5"})]),
    # calls without their marks
    (CODER, f"I will look.\n\n{CITY.format('Paris')}", "I will look.", [PARIS]),
    (CODER, f"{CITY.format('Paris')}\n</tool_call>", "", [PARIS]),
    (LLAMA, '<function=get_weather>{"city": "Paris"}</function>', "", [PARIS]),
    (QWEN, JSON_PARIS, "", [PARIS]),
    (QWEN, f"```json\n{JSON_PARIS}\n```", "", [PARIS]),
    (QWEN, f"<tools>\n{JSON_PARIS}\n</tools>", "", [PARIS]),
    # calls at the end of reasoning
    (QWEN35, f"plan: call it\n{marked(CITY.format('Paris'))}", "", [PARIS]),
    (MINIMAX, f"plan\n<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>", "", [PARIS]),
    (QWEN3, f"<think>\nplan\n{marked(JSON_PARIS)}", "", [PARIS]),
    # recipients and tools that were not offered
    (GPT_OSS, f"<|channel|>commentary to=assistant<|message|>note<|end|>{FINAL}<|return|>", "note\n\nHello", []),
    (GPT_OSS, f"<|channel|>analysis to=python code<|message|>print(1)<|end|>{FINAL}", "Hello", []),
    (QWEN, FENCED, FENCED, []),
    (MISTRAL, '[TOOL_CALLS]abc123DEF[ARGS]{"city": "Paris"}', '[TOOL_CALLS]abc123DEF[ARGS]{"city": "Paris"}', []),
    # ids that models write
    (MISTRAL, '[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]{"city": "Paris"}', "", [PARIS]),
    (KIMI, f"<|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|>", "", [PARIS]),
    # white space around calls
    (QWEN, f"I check.\n\n{marked(JSON_PARIS)}\n\nNow I wait.", "I check.\n\n\n\nNow I wait.", [PARIS]),
    (QWEN, "Let me look.\n<tool_call>", "Let me look.\n<tool_call>", []),
]
"""Template, output of its model, and the text and the calls that clients get of it."""


@pytest.mark.parametrize(("template", "written", "text", "calls"), WRITTEN)
def test_what_a_model_writes_is_told_on_every_surface(
    scripted: ScriptedServer, template: str, written: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    prompt, model = f"Do it. {scripted.play(written)}", scripted.model(template)
    for surface in SURFACES:
        for stream in (False, True):
            said = ask(scripted.client, surface, model, prompt, TOOLS, stream=stream)
            assert (said.text.strip(), said.objects, said.error) == (text, calls, ""), (surface, stream)


ANSWER = "The answer is 42. Question: no"
STOPS = {"chat": "stop", "messages": "stop_sequences", "ollama": "options"}


@pytest.mark.parametrize("surface", STOPS)
@pytest.mark.parametrize(
    ("template", "written", "reasoning"),
    [
        (QWEN3, f"<think>\nLet me see. Question: what?\n</think>\n\n{ANSWER}", "Let me see. Question: what?"),
        (
            GPT_OSS,
            f"<|channel|>analysis<|message|>Question: x<|end|>{FINAL.removesuffix('Hello')}{ANSWER}",
            "Question: x",
        ),
        (QWEN35, f"So Question: it\n</think>\n\n{ANSWER}", "So Question: it"),
    ],
)
def test_a_stop_string_in_the_reasoning_does_not_empty_the_answer(
    scripted: ScriptedServer, template: str, written: str, reasoning: str, surface: str
) -> None:
    stop: Any = ["Question:"]
    fields = {STOPS[surface]: {"stop": stop} if surface == "ollama" else stop}
    prompt, model = f"Answer. {scripted.play(written)}", scripted.model(template)
    for stream in (False, True):
        said = ask(scripted.client, surface, model, prompt, stream=stream, **fields)
        assert (said.reasoning, said.text.strip()) == (reasoning, "The answer is 42."), stream
