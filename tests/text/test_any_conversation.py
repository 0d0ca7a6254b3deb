"""Any conversation of an agent has a prompt with every template, and a notice names each message that is left out."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from app.api.chat import ChatBody, messages_of
from app.api.messages import MessagesBody
from app.api.ollama import OllamaChat, _messages
from app.api.response_items import ItemReader, flat_tools
from app.api.responses import ResponsesBody
from app.core.errors import InvalidRequest
from app.serving.gate import validated
from tests.scripted.surfaces import BODIES, SURFACES
from tests.text.agent_dialogues import Message, Tools, agent_dialogues, argument_words, readable, word_in
from tests.text.agent_words import GEMMA2, HARMONY, LLAMA, MINIMAX, MISTRAL, QWEN35
from tests.text.published_models import TEMPLATES, UNUSABLE, codes, prompt

STRICT = (QWEN35, MISTRAL, HARMONY, LLAMA, GEMMA2, MINIMAX)
"""Templates that need most of the repairs."""
EXAMPLES = [50, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
BESIDE_CALLS = "it shows calls or what stands beside them; two turns would teach its model to stop before it calls"
LEFT_OUT = {
    "Cohere2MoE": ("assistant", BESIDE_CALLS),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("assistant", BESIDE_CALLS),
    "MiniMax-M1": ("assistant", BESIDE_CALLS),
    "Mistral-Small-3.2-24B-Instruct-2506": ("assistant", BESIDE_CALLS),
    "NVIDIA-Nemotron-Nano-v2": ("assistant", "calls at the very end, without results, are left for the answer"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("assistant", BESIDE_CALLS),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("assistant", BESIDE_CALLS),
    "meta-llama-Llama-3.1-8B-Instruct": ("assistant", BESIDE_CALLS),
    "meta-llama-Llama-3.2-3B-Instruct": ("assistant", BESIDE_CALLS),
    "meta-llama-Llama-3.3-70B-Instruct": ("assistant", BESIDE_CALLS),
    "mistralai-Mistral-Nemo-Instruct-2407": (
        "assistant system developer",
        f"{BESIDE_CALLS}; a system text goes to the last turn of the user, or nowhere where that stands behind a stray "
        "result",
    ),
    "muse-glimmer": ("assistant", BESIDE_CALLS),
    "openai-gpt-oss-120b": ("assistant", "what stands beside calls is dropped once the model has answered"),
    "upstage-Solar-Open-100B": ("assistant", BESIDE_CALLS),
}
"""Templates that leave out texts, with the roles of these texts and the reason why no repair restores them."""


def check(name: str, messages: Sequence[Message], tools: Tools) -> None:
    """Check that each message is either whole in the prompt or named by a notice of missing text, never both."""
    try:
        rendered = prompt(name, list(messages), tools)
    except InvalidRequest:
        assert name in UNUSABLE
        return
    missing = " ".join(notice.message for notice in rendered.notices if notice.code.endswith("_missing"))
    for place, message in enumerate(messages):
        words = [word_in((message["content"] or "").rpartition("</think>")[2]), *argument_words(message)]
        is_whole = all(word in rendered.text for word in words)
        assert is_whole != (f"messages.{place} ({message['role']})" in missing), (name, place, codes(rendered))
        assert is_whole or message["role"] in LEFT_OUT[name][0]


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_conversation_has_a_prompt_with_every_template_and_no_text_is_lost_silently(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(agent_dialogues())
    def hold(sent: tuple[list[Message], Tools]) -> None:
        for name in TEMPLATES:
            check(name, *sent)

    hold()


def conversation_of(surface: str, body: dict[str, Any]) -> tuple[list[Message], Tools]:
    """Return the messages and tools that the text side gets for a request body of one of the surfaces."""
    match surface:
        case "responses":
            response = validated(body, ResponsesBody)
            given = ItemReader(lambda _: None).read(response.input_items)
            body = response.as_chat(given.messages, flat_tools(response.tools or (), given.tools))
        case "messages":
            body = validated(body, MessagesBody).as_chat()
        case "ollama":
            ollama = validated(body, OllamaChat)
            body = ollama.as_openai() | {"messages": _messages(ollama), "tools": ollama.tools}
    chat = validated(body, ChatBody)
    return messages_of(chat, None), chat.shown_tools()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("surface", SURFACES)
def test_any_conversation_can_be_sent_in_the_words_of_every_surface(surface: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(agent_dialogues())
    def hold(sent: tuple[list[Message], Tools]) -> None:
        turns, tools = sent
        if surface in {"messages", "ollama"}:  # where arguments are objects
            turns = [readable(message) for message in turns]
            tools = None if tools and any("parameters" not in tool["function"] for tool in tools) else tools
        turns = [*turns, {"role": "user", "content": "zq0word"}]  # an input of only empty messages is refused
        body = BODIES[surface](turns, tools or [], 64) | {"model": "m"}
        messages, shown = conversation_of(surface, body)
        whole = "\0".join(str(message["content"]) for message in messages)
        assert all(word_in(message["content"] or "") in whole for message in turns)
        for name in STRICT:
            check(name, messages, shown)

    hold()
