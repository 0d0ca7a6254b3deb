"""Requests for thinking as published templates express them, and the notices where a template cannot (F18)."""

from typing import Any

import pytest

from app.text.prompt.template import ChatTemplate
from app.text.prompt.thinking import template_variables, translate_arguments
from tests.published import chat_templates

OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


def effort(wanted: str) -> dict[str, Any]:
    return {"enable_thinking": wanted != "none", "reasoning_effort": wanted}


SAID: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("openai-gpt-oss-120b", effort("high"), {"reasoning_effort": "high"}, []),
    ("openai-gpt-oss-120b", effort("max"), {"reasoning_effort": "high"}, ["other_effort"]),
    ("openai-gpt-oss-120b", effort("minimal"), {"reasoning_effort": "low"}, ["other_effort"]),
    ("openai-gpt-oss-120b", OFF, {"reasoning_effort": "low"}, ["other_effort"]),
    ("openai-gpt-oss-120b", OFF | {"reasoning_effort": "high"}, {"reasoning_effort": "low"}, ["other_effort"]),
    ("openai-gpt-oss-120b", ON, {}, []),
    ("Qwen3.5-4B", OFF, OFF, []),
    ("Qwen3.5-4B", effort("none"), OFF, []),
    ("Qwen3.5-4B", effort("high"), ON, ["no_effort"]),
    ("deepseek-ai-DeepSeek-V3.1", ON, ON | {"thinking": True}, []),
    ("deepseek-ai-DeepSeek-V4", effort("max"), ON | {"thinking": True, "reasoning_effort": "max"}, []),
    ("deepseek-ai-DeepSeek-V4", effort("none"), OFF | {"thinking": False}, []),
    ("Kimi-K3", effort("medium"), {"thinking": True, "thinking_effort": "high"}, ["other_effort"]),
    ("Kimi-K3", effort("max"), {"thinking": True, "thinking_effort": "max"}, []),
    ("tencent-Hy3", OFF, {"reasoning_effort": "no_think"}, []),
    ("ByteDance-Seed-OSS", OFF, {"thinking_budget": 0}, []),
    ("ByteDance-Seed-OSS", {"thinking_budget": 512}, {"thinking_budget": 512}, []),
    ("MiniMax-M3", OFF, {"thinking_mode": "disabled"}, []),
    ("MiniMax-M2", OFF, {}, ["no_thinking_switch"]),
    ("MiniMax-M2", ON, {}, []),
    ("Qwen3.5-4B", {"enable_thinkin": False}, {"enable_thinkin": False}, ["unread_template_argument"]),
    ("Qwen3.5-4B", {"thinking_budget": 512}, {}, []),
]


@pytest.mark.parametrize(("name", "asked", "expected", "codes"), SAID, ids=[f"{case[0]} {case[1]}" for case in SAID])
def test_a_wish_is_said_as_the_template_knows_it(
    name: str, asked: dict[str, Any], expected: dict[str, Any], codes: list[str]
) -> None:
    words = template_variables(chat_templates()[name].read_text(encoding="utf-8"))
    assert words is not None
    arguments, notices = translate_arguments(asked, words, has_reasoning=True)
    assert (arguments, [notice.code for notice in notices]) == (expected, codes)


def test_a_model_that_does_not_think_says_so_when_it_should() -> None:
    words = template_variables("{{ messages[0].content }}")
    assert words is not None
    assert [notice.code for notice in translate_arguments(ON, words, has_reasoning=False)[1]] == ["no_thinking"]
    assert translate_arguments(OFF, words, has_reasoning=False) == ({}, ())
    assert [notice.code for notice in translate_arguments(effort("low"), words, has_reasoning=False)[1]] == [
        "no_effort"
    ]


def test_no_published_template_refuses_an_effort() -> None:
    shown = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True, "tools": None}
    plain = {"bos_token": "", "eos_token": "", "documents": None}
    for name, path in chat_templates().items():
        source = path.read_text(encoding="utf-8")
        words = template_variables(source)
        if words is None or not (words.effort_name or words.switches):
            continue
        template = ChatTemplate(source)
        for wanted in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
            arguments, _ = translate_arguments(effort(wanted), words, has_reasoning=True)
            assert template.render(plain | shown | arguments), (name, wanted)


def test_a_template_that_is_none_is_left_to_the_renderer() -> None:
    assert template_variables("{% if %}") is None
