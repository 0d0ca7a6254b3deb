"""A final assistant message is continued exactly where it ends: F13 of public bug reports."""

import pytest

from app.core.errors import InvalidRequest
from tests.text.agent_words import (
    HARMONY,
    MISTRAL,
    QWEN35,
    in_order,
    once,
    system,
)
from tests.text.dialogues import TOOLS, said, user
from tests.text.published_models import TEMPLATES, codes, prompt, rendering


@pytest.mark.parametrize("text", ["The answer is (", "The answer is: \n\n", "a", "```json\n{", "eot_id|>", " 你好 🙂 "])
def test_an_answer_that_was_begun_is_continued_where_it_ends(text: str) -> None:
    """Every usable template ends the prompt with the text and its trailing spaces, without an end-of-turn marker."""
    for name in TEMPLATES:
        if name == "fireworks-ai-llama-3-firefunction-v2":
            continue
        messages = [system("Be brief."), user("Say something."), said(text)]
        rendered = rendering(name, messages).continued()
        whole = prompt(name, messages).text
        assert rendered.text.endswith(text.lstrip()), name
        begun = rendered.text.removesuffix(text.lstrip()).rstrip()
        assert in_order(begun, "Be brief.", "Say something.")
        assert "continuedhere" not in rendered.text
        if "system_folded" not in str(codes(rendered)):
            assert whole.startswith(begun[: begun.find("Say something.") + 10])


def test_an_answer_that_has_not_begun_yet_is_begun_behind_its_header() -> None:
    for text in ("", " \n"):
        rendered = rendering("Qwen-Qwen2.5-7B-Instruct", [user("Hi"), said(text)]).continued()
        assert rendered.text.endswith(f"<|im_start|>assistant\n{text}")


def test_thoughts_of_an_answer_that_is_continued_stand_before_it() -> None:
    messages = [user("Hi"), {**said("The answer is ("), "reasoning_content": "It wants a number."}]
    for name in (HARMONY, "Qwen-Qwen3-0.6B", "GLM-4.6"):
        text = rendering(name, messages).continued().text
        assert in_order(text, "It wants a number.", "The answer is (")
        assert text.endswith("The answer is (")


def test_only_a_text_of_the_assistant_can_be_continued() -> None:
    for messages in ([user("Hi")], once()[:2]):
        with pytest.raises(InvalidRequest, match="only an assistant message"):
            rendering(QWEN35, messages, TOOLS).continued()


def test_the_history_of_a_continued_answer_is_repaired_too() -> None:
    messages = [system("A rule."), system("Another rule."), user("Hi"), user("Hello?"), said("I am")]
    rendered = rendering(MISTRAL, messages).continued()
    assert rendered.text.endswith("I am")
    assert set(codes(rendered)) == {"system_messages_joined", "roles_joined"}
