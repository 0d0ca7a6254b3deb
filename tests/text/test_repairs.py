"""Repairs as users see them, on the templates that need them: F02 to F25 of public bug reports, and similar cases."""

from pathlib import Path
from typing import Any

import pytest

from app.core.errors import InvalidRequest
from app.text.dialect import REASONING_MARKERS
from app.text.prompt.ladder import Rendered, render_with_repairs
from app.text.prompt.messages import plain_messages
from app.text.prompt.repairs import LADDER
from app.text.prompt.template import ChatTemplate
from app.text.prompt.turns import Conversation
from tests.text.agent_words import (
    GEMMA2,
    GEMMA3,
    HARMONY,
    LLAMA,
    MINIMAX,
    MINISTRAL,
    MISTRAL,
    NEMO,
    QWEN35,
    R1,
    Message,
    called,
    in_order,
    once,
    result,
    system,
)
from tests.text.dialogues import TOOLS, said, user
from tests.text.published_models import TEMPLATES, codes, prompt, template

# --- system and developer messages (F03) ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [QWEN35, MISTRAL, NEMO, MINISTRAL, GEMMA3, "Apertus-8B-Instruct"])
@pytest.mark.parametrize("roles", [("system", "system"), ("system", "developer"), ("developer", "developer", "system")])
def test_several_system_messages_at_the_beginning_become_one_where_a_template_takes_one(
    name: str, roles: tuple[str, ...]
) -> None:
    texts = [f"Rule number {place}." for place, _ in enumerate(roles)]
    several = [system(text, role) for text, role in zip(texts, roles, strict=True)]
    rendered = prompt(name, [*several, user("Hi")])
    assert rendered.text == prompt(name, [system("\n\n".join(texts)), user("Hi")]).text
    assert codes(rendered) == ["system_messages_joined"]


@pytest.mark.parametrize("name", [HARMONY, MINIMAX, R1, "NVIDIA-Nemotron-Nano-v2", "Bielik-11B-v3.0-Instruct"])
def test_a_system_message_that_a_template_would_drop_silently_is_in_the_prompt(name: str) -> None:
    for messages in (
        [system("S1"), system("DM", "developer"), user("Hi")],
        [system("Rule one."), system("Rule two."), system("Rule three."), user("Hi")],
        [system("Rule one."), user("Hi"), system("Now be brief."), user("Go")],
        [system("A"), user("Hi"), said("Yes?"), system("B"), user("Go")],
    ):
        rendered = prompt(name, messages)
        assert "text_missing" not in codes(rendered)
        assert in_order(rendered.text, *(message["content"] for message in messages))


@pytest.mark.parametrize("name", [QWEN35, MISTRAL, NEMO, MINISTRAL, GEMMA3, MINIMAX, HARMONY])
def test_a_later_system_message_becomes_the_users_in_its_place(name: str) -> None:
    before = [system("Be brief."), user("Hi"), said("Yes?")]
    rendered = prompt(name, [*before, system("The date is new."), user("Go")])
    assert in_order(rendered.text, "Hi", "Yes?", "The date is new.", "Go")
    assert "Be brief." in rendered.text
    assert codes(rendered)[0] == "system_messages_moved"
    earlier = prompt(name, [*before, user("Go")])
    assert rendered.text.startswith(earlier.text.partition("Yes?")[0]), "the prefix is found again"


@pytest.mark.parametrize("name", [QWEN35, MISTRAL, LLAMA, HARMONY, MINIMAX])
def test_a_system_message_between_a_call_and_its_result_parts_them_not(name: str) -> None:
    messages = once()
    rendered = prompt(name, [*messages[:2], system("Be careful."), messages[2]], TOOLS)
    assert in_order(rendered.text, "Paris", "sunny", "Be careful.") or "system_messages_moved" not in codes(rendered)
    assert "Be careful." in rendered.text


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder", "GLM-4.6", "moonshotai-Kimi-K2"])
def test_a_template_that_takes_systems_anywhere_gets_them_as_they_were_sent(name: str) -> None:
    messages = [system("Rule one."), system("Rule two."), user("Hi"), system("Rule three."), user("Go")]
    shown = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    rendered = prompt(name, messages)
    assert rendered.text == ChatTemplate(TEMPLATES[name]).render(shown | {"messages": messages})
    assert codes(rendered) == []


def test_a_developer_is_a_system_to_templates_that_know_none() -> None:
    for name in TEMPLATES:
        if name == "fireworks-ai-llama-3-firefunction-v2":
            continue
        text = prompt(name, [system("Be brief and kind.", "developer"), user("Hi")]).text
        assert "Be brief and kind." in text
        if name != HARMONY and "developer" not in TEMPLATES[name]:
            assert text == prompt(name, [system("Be brief and kind."), user("Hi")]).text


# --- a template without a system role (M1) --------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[], [system("Be brief.")], [system("Be brief.", "developer"), system("Be kind.")]])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_that_refuses_a_system_role_has_its_text_in_the_first_turn(
    before: list[Message], tools: Any
) -> None:
    rendered = prompt(GEMMA2, [*before, user("Hi there"), said("Yes?"), user("Go")], tools)
    texts = [message["content"] for message in before] + (['"weather"'] if tools else [])
    for text in texts:
        assert in_order(rendered.text, "<start_of_turn>user\n", text, "Hi there<end_of_turn>", "Yes?", "Go")
    assert ("system_folded_into_user" in codes(rendered)) == bool(texts)


@pytest.mark.parametrize("name", [QWEN35, NEMO, GEMMA2, GEMMA3, "NVIDIA-Nemotron-Nano-v2"])
def test_a_conversation_of_nothing_but_a_system_message_has_a_prompt(name: str) -> None:
    rendered = prompt(name, [system("Say hello to me.")])
    assert "Say hello to me." in rendered.text
    assert set(codes(rendered)) <= {"system_folded_into_user", "user_turn_added"}


# --- reasoning (F19) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", [HARMONY, "LFM2.5-8B-A1B", "upstage-Solar-Open-100B", "GLM-4.6", "Kimi-K3"])
def test_thoughts_before_a_call_reach_the_template_by_the_name_that_it_reads(name: str, field: str) -> None:
    rendered = prompt(name, once(**{field: "It wants the weather."}), TOOLS, enable_thinking=True)
    assert "It wants the weather." in rendered.text
    assert set(codes(rendered)) <= {"thinking_renamed"}


def test_thoughts_beside_a_text_and_a_call_give_way_where_one_has_to() -> None:
    rendered = prompt(HARMONY, once(content="I look.", reasoning_content="It wants the weather."), TOOLS)
    assert in_order(rendered.text, "I look.", "Paris", "sunny")
    assert "thinking_left_out" in codes(rendered)


# --- the order of roles (F20) ---------------------------------------------------------------------------------------

ALTERNATING = [MISTRAL, NEMO, MINISTRAL, GEMMA2, GEMMA3]


@pytest.mark.parametrize("name", ALTERNATING)
@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([*once(), user("And now?")], id="a result and a text, as Claude Code sends them"),
        pytest.param([*once(), user("And now?"), user("Hello?")], id="two texts behind a result"),
        pytest.param([user("One"), user("Two"), user("Three")], id="the user thrice"),
        pytest.param([user("One"), said("Two"), said("Three"), user("Four")], id="the assistant twice"),
        pytest.param([said("One"), user("Two")], id="the assistant first"),
        pytest.param([system("Zero"), said("One"), user("Two")], id="the assistant behind the system"),
        pytest.param([*once()[:2], user("Never mind")], id="a call that was cancelled"),
        pytest.param([user("One"), result("Two", "abcdefgh9"), user("Three")], id="a result that nobody asked for"),
        pytest.param([result("One", "abcdefgh9"), user("Two")], id="a result at the very beginning"),
        pytest.param([*once(), *once()[2:], said("Sunny"), user("Thanks")], id="a result twice"),
        pytest.param([user("One"), said(""), user("Two")], id="an empty answer"),
    ],
)
def test_roles_that_a_template_wants_to_alternate_are_made_to(name: str, messages: list[Message]) -> None:
    rendered = prompt(name, messages, TOOLS)
    texts = [message["content"] for message in messages if message["content"]]
    assert all(text in rendered.text for text in texts)
    assert "text_missing" not in codes(rendered)


def test_a_text_behind_a_result_is_told_with_it() -> None:
    rendered = prompt(MISTRAL, [*once(), user("And now?")], TOOLS)
    assert "sunny\n\nAnd now?[/TOOL_RESULTS]" in rendered.text
    assert codes(rendered) == ["results_joined"]


@pytest.mark.parametrize("name", [HARMONY, MINIMAX, "MiniMax-M3", "Apertus-8B-Instruct", "google-gemma-4-31B-it"])
def test_a_result_that_nobody_asked_for_is_told_in_words(name: str) -> None:
    rendered = prompt(name, [user("Hi"), result("a stray result", "abcdefgh9"), user("Go")], TOOLS)
    assert in_order(rendered.text, "Hi", "a stray result", "Go")
    assert "tool_results_in_words" in codes(rendered)


# --- what cannot be repaired ------------------------------------------------------------------------------------------


def test_every_kind_of_repair_is_described() -> None:
    described = (Path(__file__).parents[2] / "docs/api.md").read_text(encoding="utf-8")
    forms = [repair for name in TEMPLATES for repair in template(name).required_repairs]
    kinds = {repair.code for repair in (*LADDER, *forms)} - {""}
    assert len(kinds) >= 20
    assert [kind for kind in kinds if f"`{kind}`" not in described] == []


def test_a_text_that_a_template_leaves_out_is_named() -> None:
    rendered = prompt(LLAMA, [system("Be brief."), *once(content="I shall look it up.")], TOOLS)
    (notice,) = rendered.notices
    assert (notice.code, notice.parameter) == ("text_missing", "messages")
    assert "messages.2 (assistant)" in notice.message
    assert "I shall" not in rendered.text + notice.message


def rendered_by(source: str, messages: list[Message]) -> Rendered:
    template = ChatTemplate(source)
    conversation = Conversation(plain_messages(messages))
    return render_with_repairs(conversation, (), lambda shown: template.render({"messages": shown.messages}))


@pytest.mark.parametrize("marks", REASONING_MARKERS)
def test_reasoning_that_a_template_drops_from_earlier_answers_is_not_missed(marks: tuple[str, str]) -> None:
    source = "{% for m in messages %}{{ m.content.split(end)[-1] }}{% endfor %}".replace("end", repr(marks[1]), 1)
    rendered = rendered_by(source, [user("Hello?"), said(f"{marks[0]}A long thought{marks[1]}The answer"), user("Go")])
    assert ("The answer" in rendered.text, "thought" in rendered.text, codes(rendered)) == (True, False, [])


def refusal(source: str, messages: list[Message]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        rendered_by(source, messages)
    return caught.value.message


def test_a_refusal_names_the_message_and_says_the_templates_own_words() -> None:
    source = (
        "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no\n bad words') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    for place in range(6):
        messages = [user(f"good {number}") for number in range(6)]
        messages[place] = said("bad")
        assert refusal(source, messages).endswith(f"refuses messages.{place} (assistant): no bad words")


def test_what_refuses_every_conversation_names_no_message() -> None:
    assert refusal("{{ raise_exception('never') }}", once()).endswith("refuses the request: never")


def test_the_renderings_of_one_request_are_bounded() -> None:
    calls = called(("a", "{"), ("b", None), content="x", reasoning_content="y")
    everything = [
        system("A"), system("B"), said(""), said("c"), result("d"), calls, system("E"), result("f", "b"), user("g"),
        user("h"), called(("c", "")), *(user(f"{number}") for number in range(2000)),
    ]  # fmt: skip
    rendered = 0

    def refuse(_: Conversation) -> str:
        nonlocal rendered
        rendered += 1
        raise ValueError("no")

    with pytest.raises(InvalidRequest):
        render_with_repairs(
            Conversation(plain_messages(everything), [{"type": "function", "function": {"name": "f"}}]), (), refuse
        )
    assert len(LADDER) < rendered + 8 < len(LADDER) + 22


def test_to_look_for_every_text_takes_no_longer_the_more_of_them_there_are() -> None:
    """A missing text costs a search of the whole prompt, so at most `MAX_SEARCHES` texts are searched for like that."""
    messages = [{**user(f"text {number} " * 30), "hidden": True} for number in range(1500)]
    looked = 0

    class Prompt(str):
        __slots__ = ()

        def find(self, *place: Any) -> int:  # type: ignore[override]
            nonlocal looked
            looked += 1
            return super().find(*place)

    rendered = render_with_repairs(Conversation(plain_messages(messages)), (), lambda _: Prompt("x" * 100_000))
    assert looked < 2 * len(messages)
    assert [notice.code for notice in rendered.notices] == ["text_missing"]
