"""Every published chat template with every kind of conversation, compared with transformers' own rendering."""

import contextlib
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from app.core.errors import InvalidRequest
from tests.text.dialogues import dialogues, variants
from tests.text.published_models import NAMES, OF_TOKENIZERS, TEMPLATES, UNUSABLE, codes, prompt

DIALOGUES = dialogues()
WARNED = {"text_missing", "tool_calls_missing"}
IN_WORDS = {"tools_in_words", "tool_calls_in_words"}
NO_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
    "tokenizer llama3_1",
}
"""Templates that know neither tools nor calls."""
LOSSES = dict.fromkeys(NO_TOOLS, IN_WORDS) | {
    "GigaChat3-10B-A1.8B": {"tool_calls_split"},
    "GigaChat3.1-10B-A1.8B": {"tool_calls_split"},
    "LFM2-8B-A1B": {"tool_calls_in_words"},
    "LFM2.5-8B-A1B": {"thinking_renamed"},
    "LFM2.5-Instruct": {"tool_calls_in_words"},
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": {"tools_in_words", "text_before_calls"},
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {"tools_in_words"},
    "deepseek-ai-DeepSeek-V3.1": {"tools_in_words"},
    "google-gemma-2-2b-it": {"tools_in_words", "system_folded_into_user"},
    "ibm-granite-granite-3.3-2B-Instruct": {"tool_calls_in_words"},
    "mistralai-Mistral-Nemo-Instruct-2407": {"system_folded_into_user"},
    "moonshotai-Kimi-K2": {"tool_call_ids_fitted"},
    "openai-gpt-oss-120b": {"thinking_renamed", "tool_calls_split"},
    "tokenizer deepseek_v3": {"tools_in_words", "text_before_calls"},
    "tokenizer gemma3": {"tools_in_words"},
    "upstage-Solar-Open-100B": {"thinking_renamed"},
}
"""Repairs by template: without them its prompt would omit something, or refer to a call that is not there (Kimi)."""


def expected(source: str, messages: list[dict[str, Any]], tools: Any) -> tuple[set[str], set[str]]:
    """Return the prompts that transformers makes of the variants: those without a misreading, and all of them."""
    right, every = set(), set()
    for variant, signs in variants(messages):
        with contextlib.suppress(Exception):
            (text,), _ = render_jinja_template(
                [variant], tools=tools, chat_template=source, add_generation_prompt=True, **NAMES
            )
            every.add(text)
            if not any(sign in text for sign in signs):
                right.add(text)
    fewest = min((text.count("None") + text.count("null") for text in right), default=0)
    return {text for text in right if text.count("None") + text.count("null") == fewest}, every


def test_there_are_enough_of_both() -> None:
    assert len(DIALOGUES) >= 60
    assert len(TEMPLATES) - len(OF_TOKENIZERS) >= 60


@pytest.mark.system("npm")
def test_the_published_tokenizers_bring_theirs() -> None:
    assert len(OF_TOKENIZERS) >= 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_published_template_renders_as_in_transformers_unless_that_loses_something(name: str) -> None:
    """A conversation that transformers cannot render only has to get a prompt."""
    refused, differing, repairs = [], [], set()
    for number, (messages, tools) in enumerate(DIALOGUES):
        right, every = expected(TEMPLATES[name], messages, tools)
        try:
            rendered = prompt(name, messages, tools)
        except InvalidRequest:
            refused.append(number)
            continue
        warned = set(codes(rendered)) - WARNED
        if every and warned:
            repairs |= warned
        elif every and rendered.text not in (right or every):
            differing.append(number)
    assert differing == []
    assert repairs == LOSSES.get(name, set())
    assert refused == [] or name in UNUSABLE
