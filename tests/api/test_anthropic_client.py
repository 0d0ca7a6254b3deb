"""Anthropic's Python client, with what it can send in the middle of a conversation, against a real server."""

import anthropic
import pytest
from anthropic.types.beta import BetaMessageParam

from tests.api.fakes import make_site, served

pytestmark = pytest.mark.anyio

LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
TURNS: list[BetaMessageParam] = [
    {"role": "assistant", "content": [{"type": "compaction", "content": "They greeted."}]},
    {"role": "user", "content": [
        {"type": "document", "title": "a.txt", "source": {"type": "text", "media_type": "text/plain", "data": "One."}},
    ]},
    {"role": "system", "content": "For this question only.", "clear_at": "next_user_message"},
    {"role": "system", "content": [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**LOOK, "type": "custom"}}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "find"}},
    ]},
    {"role": "system", "content": [], "output_config": {"effort": "low"}},
    {"role": "user", "content": "And now?"},
]  # fmt: skip


async def test_it_changes_tools_and_effort_in_the_middle_of_a_conversation() -> None:
    site = make_site()
    async with (
        served(site) as (port, _),
        anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as client,
    ):
        answer = await client.beta.messages.create(
            model="demo-main",
            max_tokens=9,
            messages=TURNS,
            tools=[{"name": "find", "input_schema": {"type": "object"}}],
            output_config={"effort": "high"},
        )
    [block] = answer.content
    assert block.type == "text"
    assert answer.model_extra is not None
    assert "warnings" not in answer.model_extra
    [command] = site.worker.commands
    assert [tool["function"]["name"] for tool in command.tools or ()] == ["look"]
    assert [message["content"] for message in command.messages or ()] == ["They greeted.", "a.txt\nOne.", "And now?"]
    assert command.template_arguments["reasoning_effort"] == "low"
