"""Claude Code's system prompt, with the billing line that it sends unless `paceline launch` started it."""

import pytest

from app.api.messages import CountBody
from tests.scripted.server import ScriptedServer

HEADER = "x-anthropic-billing-header: cc_version=2.1.330.d83; cc_entrypoint=cli;"
OTHER = "x-anthropic-billing-header: cc_version=2.1.330.0a7; cc_entrypoint=cli; cch=00000;"
QUESTION = [{"role": "user", "content": "Hi"}]


def system_of(system: object) -> list[str]:
    chat = CountBody.model_validate({"messages": QUESTION, "system": system}).as_chat()
    return [message["content"] for message in chat["messages"] if message["role"] == "system"]


@pytest.mark.parametrize(
    ("system", "read"),
    [
        ([{"type": "text", "text": HEADER}, {"type": "text", "text": "You help."}], ["You help."]),
        ([{"type": "text", "text": f"{OTHER}\nYou help."}, {"type": "text", "text": "Two"}], ["You help.\n\nTwo"]),
        (f"{HEADER}\n\nYou help.", ["\nYou help."]),
        (HEADER, []),
        ([{"type": "text", "text": HEADER}], []),
        ("You help.", ["You help."]),
        (f"Explain {HEADER}", [f"Explain {HEADER}"]),
        ([{"type": "text", "text": "You help."}, {"type": "text", "text": HEADER}], [f"You help.\n\n{HEADER}"]),
        ("", []),
        ([], []),
        (None, []),
    ],
)
def test_the_billing_line_of_a_session_is_no_part_of_its_system_prompt(system: object, read: list[str]) -> None:
    assert system_of(system) == read


def test_two_sessions_have_the_same_prompt(scripted: ScriptedServer) -> None:
    def tokens(header: str) -> int:
        system = [{"type": "text", "text": text} for text in (header, "You help.")]
        body = {"model": scripted.model(), "messages": QUESTION, "system": system}
        return int(scripted.client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    assert tokens(HEADER) == tokens(OTHER)
