"""A repaired request is answered, whole or streamed, and every surface names the repair in a warning."""

from typing import Any

import pytest

from tests.scripted.server import ScriptedServer
from tests.scripted.surfaces import SURFACES, ask
from tests.text.agent_words import GEMMA2, HARMONY, LLAMA, MISTRAL, PARIS, QWEN35, called, result, system
from tests.text.dialogues import TOOLS, user

RULES = [system("Rule one."), system("Rule two."), user("Hi")]
"""Messages as opencode and Codex begin: more than one system message."""
DEVELOPED = [system("S1"), system("DM", "developer"), user("Hi")]
LATE = [user("Hi"), system("Be careful."), user("Go")]
"""Messages as Claude Code sends them: a system message after the first user message."""
TURN = [
    user("Weather?"),
    called(("call_0b5e9121a760ae4ff4cce38e", PARIS)),
    result("sun", "call_0b5e9121a760ae4ff4cce38e"),
]
CALLS = [user("Both?"), called(("a", PARIS), ("b", PARIS)), result("sun", "a"), result("rain", "b")]
THOUGHT = "Well.</think>"
"""Beginning of an answer to a prompt that has already opened the reasoning."""
NEEDED = [
    pytest.param(QWEN35, RULES, "system_messages_joined", id="several systems"),
    pytest.param(QWEN35, LATE, "system_messages_moved", id="a late system"),
    pytest.param(HARMONY, DEVELOPED, "system_messages_joined", id="a developer"),
    pytest.param(GEMMA2, [system("Be brief."), user("Hi")], "system_folded_into_user", id="no system role"),
    pytest.param(MISTRAL, TURN, "tool_call_ids_fitted", id="ids of another server"),
    pytest.param(MISTRAL, TURN, "results_joined", id="a result and a text"),
    pytest.param(LLAMA, CALLS, "tool_calls_split", id="two calls"),
]  # fmt: skip


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize(("template", "messages", "code"), NEEDED)
def test_a_conversation_that_a_template_refuses_is_answered_and_its_client_told_why(
    scripted: ScriptedServer, surface: str, template: str, messages: list[dict[str, Any]], code: str
) -> None:
    last = user(f"Now say it. {scripted.play(THOUGHT * (template == QWEN35) + 'Here it is.')}")
    tools = TOOLS if any("tool_calls" in message for message in messages) else []
    for stream in (False, True):
        said = ask(scripted.client, surface, scripted.model(template), [*messages, last], tools, stream=stream)
        assert (said.text, said.error) == ("Here it is.", "")
        assert code in said.warnings


@pytest.mark.parametrize("surface", SURFACES)
def test_what_needs_no_repair_is_answered_without_a_word_of_it(scripted: ScriptedServer, surface: str) -> None:
    said = ask(scripted.client, surface, scripted.model(QWEN35), f"Hi {scripted.play(THOUGHT + 'Hello.')}")
    assert (said.text, said.warnings) == ("Hello.", [])
