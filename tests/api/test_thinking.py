"""Thinking effort and budget under each name that clients use: every API reads them all alike (F18)."""

from typing import Any

import pytest

from tests.api.fakes import Site

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "Hi"}]
OFF = {"enable_thinking": False}
ON = {"enable_thinking": True}
WISHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"reasoning_effort": "high"}, ON | {"reasoning_effort": "high"}),
    ({"reasoning": {"effort": "high"}}, ON | {"reasoning_effort": "high"}),
    ({"think": "high"}, ON | {"reasoning_effort": "high"}),
    ({"reasoning_effort": "max"}, ON | {"reasoning_effort": "max"}),
    ({"reasoning": {"effort": "xhigh"}}, ON | {"reasoning_effort": "xhigh"}),
    ({"reasoning_effort": "none"}, OFF | {"reasoning_effort": "none"}),
    ({"reasoning": {"enabled": False}}, OFF),
    ({"reasoning": {"enabled": True}}, ON),
    ({"enable_thinking": False}, OFF),
    ({"think": False}, OFF),
    ({"think": True}, ON),
    ({"thinking": {"type": "disabled"}}, OFF),
    ({"thinking": {"type": "adaptive"}}, ON),
    ({"thinking": False}, OFF),
    ({"thinking_budget": 0}, OFF | {"thinking_budget": 0}),
    ({"reasoning": {"max_tokens": 100}}, {"thinking_budget": 100}),
    ({"thinking": {"type": "enabled", "budget_tokens": 7}}, ON | {"thinking_budget": 7}),
    ({"chat_template_kwargs": {"enable_thinking": False}}, OFF),
    ({"think": True, "chat_template_kwargs": {"enable_thinking": False, "x": 1}}, OFF | {"x": 1}),
    ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, OFF | {"reasoning_effort": "low"}),
    ({}, {}),
]
SURFACES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/api/chat": {"messages": USER},
    "/api/generate": {"prompt": "Hi"},
}


@pytest.mark.parametrize("path", SURFACES)
@pytest.mark.parametrize(("wish", "arguments"), WISHES, ids=[str(wish) for wish, _ in WISHES])
async def test_every_switch_is_read_everywhere(
    site: Site, path: str, wish: dict[str, Any], arguments: dict[str, Any]
) -> None:
    answer = await site.client.post(path, json={"model": "demo-main", "stream": False} | SURFACES[path] | wish)
    assert answer.status_code == 200, answer.text
    command = site.worker.commands[-1]
    assert command.template_arguments == arguments
    assert command.reasoning_tokens == arguments.get("thinking_budget")
    assert "warnings" not in answer.json()


@pytest.mark.parametrize("effort", ["low", "high", "max"])
async def test_anthropics_effort_is_an_effort(site: Site, effort: str) -> None:
    body = SURFACES["/v1/messages"] | {"model": "demo-main", "output_config": {"effort": effort}}
    assert (await site.client.post("/v1/messages", json=body)).status_code == 200
    assert site.worker.commands[-1].template_arguments == ON | {"reasoning_effort": effort}
    body |= {"thinking": {"type": "disabled"}}
    assert (await site.client.post("/v1/messages", json=body)).status_code == 200
    assert site.worker.commands[-1].template_arguments["enable_thinking"] is False


async def test_an_effort_that_nobody_knows_is_refused(site: Site) -> None:
    for wish in ({"reasoning_effort": "much"}, {"reasoning": {"effort": "much"}}, {"think": "much"}):
        assert (await site.chat(**wish)).status_code == 400


async def test_what_hides_thoughts_is_told_to_be_ignored(site: Site) -> None:
    for field, wish in (
        ("reasoning.exclude", {"reasoning": {"exclude": True}}),
        ("include_reasoning", {"include_reasoning": False}),
    ):
        assert [warning["parameter"] for warning in (await site.chat(**wish)).json()["warnings"]] == [field]
    assert "warnings" not in (await site.chat(reasoning={"summary": "auto", "effort": "low"})).json()
