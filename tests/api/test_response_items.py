"""Items of the Responses API that Codex and others send: tools, and sessions begun on another server (F11)."""

import json
from typing import Any

import pytest

from app.api.response_items import ItemReader, chat_choice
from tests.api.calls import calling
from tests.api.fakes import Site, frames

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
USER = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
}
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
MCP = {"type": "namespace", "name": "mcp__files__", "description": "About files.", "tools": [LOOK, PATCH]}


async def ask(site: Site, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo-main", "input": [USER]} | fields
    answer = await site.client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


async def stream(site: Site, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "demo-main", "input": [USER], "stream": True} | fields
    return [json.loads(frame) for frame in frames((await site.client.post(PATH, json=body)).text)]


def shown(site: Site) -> dict[str, str]:
    """The descriptions of the tools that the model sees, by tool name."""
    tools = [tool["function"] for tool in site.worker.commands[-1].tools or ()]
    return {tool["name"]: tool["description"] for tool in tools}


async def test_a_custom_tool_is_shown_and_its_call_is_told_as_one(site: Site) -> None:
    site.worker.script = calling(("apply_patch", ['{"input": "*** Begin', ' Patch\\n*** End Patch"}']))
    response = await ask(site, tools=[PATCH])
    assert "start: /.+/s" in shown(site)["apply_patch"]
    [item] = response["output"]
    assert item["id"].startswith("ctc_")
    wanted = {"type": "custom_tool_call", "status": "completed", "call_id": "call0", "name": "apply_patch"}
    assert item == wanted | {"id": item["id"], "input": "*** Begin Patch\n*** End Patch"}
    assert response["tools"] == [PATCH]


async def test_a_custom_call_streams_as_text(site: Site) -> None:
    site.worker.script = calling(("apply_patch", ['{"input": "a\\', 'nb"', "}"]))
    events = await stream(site, tools=[PATCH])
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in events if event["type"].endswith("delta")] == ["a", "\nb"]
    assert events[2]["item"]["input"] == ""
    assert events[-3]["input"] == events[-2]["item"]["input"] == "a\nb"


async def test_tools_of_a_namespace_are_shown_by_one_name_and_called_by_theirs(site: Site) -> None:
    site.worker.script = calling(("mcp__files__look", ["{}"]), ("mcp__files__apply_patch", ['{"input": "x"}']))
    response = await ask(site, tools=[MCP, LOOK])
    assert [*shown(site)] == ["mcp__files__look", "mcp__files__apply_patch", "look"]
    assert shown(site)["mcp__files__look"] == "About files.\n\nLooks."
    look, patch = response["output"]
    assert (look["type"], look["namespace"], look["name"]) == ("function_call", "mcp__files__", "look")
    assert (patch["type"], patch["namespace"], patch["input"]) == ("custom_tool_call", "mcp__files__", "x")
    again = [USER, look, {"type": "function_call_output", "call_id": look["call_id"], "output": "seen"}]
    await ask(site, tools=[MCP, LOOK], input=again)
    [call] = (site.worker.commands[-1].messages or [])[1]["tool_calls"]
    assert call["function"]["name"] == "mcp__files__look", "as the model knows it"


async def test_the_default_namespace_is_none(site: Site) -> None:
    site.worker.script = calling(("look", ["{}"]))
    response = await ask(site, tools=[{"type": "namespace", "name": "functions", "tools": [LOOK]}])
    assert [*shown(site)] == ["look"]
    assert response["output"][0]["name"] == "look"


CHOICES: list[tuple[Any, list[str], str]] = [
    (
        {"type": "function", "name": "look"},
        ["mcp__files__look", "mcp__files__apply_patch"],
        "function:mcp__files__look",
    ),
    (
        {"type": "custom", "name": "apply_patch", "namespace": "mcp__files__"},
        ["mcp__files__look", "mcp__files__apply_patch"],
        "function:mcp__files__apply_patch",
    ),
    (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "mcp__files__look"}]},
        ["mcp__files__look"],
        "required",
    ),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "mcp__files__"}]},
        ["mcp__files__look", "mcp__files__apply_patch"],
        "auto",
    ),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]}, [], "auto"),
]


@pytest.mark.parametrize(("choice", "names", "mode"), CHOICES, ids=[str(choice)[:70] for choice, _, _ in CHOICES])
async def test_a_choice_among_them_is_honoured(site: Site, choice: Any, names: list[str], mode: str) -> None:
    await ask(site, tools=[MCP], tool_choice=choice)
    assert ([*shown(site)], site.worker.commands[-1].tool_choice) == (names, mode)


READ: list[tuple[list[dict[str, Any]], str, dict[str, Any], str]] = [
    (
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
        ],
        "apply_patch",
        {"input": "*** Begin"},
        "ok",
    ),
    (
        [
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": '{"stdout": "a"}'},
        ],
        "local_shell",
        {"type": "exec", "command": ["ls"]},
        '{"stdout": "a"}',
    ),
    (
        [
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "outcome": {"type": "exit"}}]},
        ],
        "shell",
        {"commands": ["ls"]},
        '[{"stdout": "a", "outcome": {"type": "exit"}}]',
    ),
    (
        [
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
        ],
        "apply_patch",
        {"type": "delete_file", "path": "a"},
        "completed",
    ),
    (
        [{"type": "mcp_call", "id": "c", "server_label": "x", "name": "f", "arguments": '{"a": 1}', "output": "one"}],
        "x__f",
        {"a": 1},
        "one",
    ),
    (
        [{"type": "code_interpreter_call", "id": "c", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]}],
        "code_interpreter",
        {"code": "1+1"},
        '[{"type": "logs", "logs": "2"}]',
    ),
    (
        [{"type": "file_search_call", "id": "c", "queries": ["q"], "results": [{"text": "found"}]}],
        "file_search",
        {"queries": ["q"]},
        '[{"text": "found"}]',
    ),
    (
        [
            {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "mail"}},
            {"type": "tool_search_output", "call_id": "c", "tools": [LOOK]},
        ],
        "tool_search",
        {"query": "mail"},
        json.dumps([LOOK]),
    ),
    (
        [
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}", "status": "incomplete"},
            {"type": "function_call_output", "call_id": "c", "output": {"content": "seen", "success": True}},
        ],
        "look",
        {},
        "seen",
    ),
    (
        [
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": ""},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "seen"}]},
        ],
        "look",
        {},
        "seen",
    ),
]


@pytest.mark.parametrize(("items", "name", "given", "result"), READ, ids=[case[0][0]["type"] for case in READ])
async def test_a_call_of_an_earlier_session_becomes_a_call_and_its_result(
    site: Site, items: list[dict[str, Any]], name: str, given: dict[str, Any], result: str
) -> None:
    response = await ask(site, input=[USER, *items, USER])
    assert "warnings" not in response
    _, assistant, tool, _ = site.worker.commands[-1].messages or []
    [call] = assistant["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, given)
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", call["id"], result)


LEFT_OUT: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "image_generation_call", "id": "ig_1", "result": "AAAA"},
    {"type": "computer_call", "call_id": "c", "action": {"type": "click"}},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": "data:"}},
    {"type": "mcp_list_tools", "server_label": "x", "tools": []},
    {"type": "mcp_approval_request", "name": "f"},
    {"type": "mcp_approval_response", "approve": True},
    {"type": "mcp_call", "name": "f", "arguments": "{}"},
    {"type": "code_interpreter_call", "code": "1", "outputs": None},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
    {"type": "compaction", "encrypted_content": "gAAA"},
    {"type": "compaction_trigger"},
    {"type": "ghost_snapshot", "ghost_commit": {}},
    {"type": "agent_message", "author": "a", "content": [{"type": "encrypted_content", "encrypted_content": "g"}]},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"a', "status": "incomplete"},
    {"type": "made_up_next_year", "text": "x"},
]


@pytest.mark.parametrize("item", LEFT_OUT, ids=[str(item.get("type")) for item in LEFT_OUT])
async def test_what_a_model_can_make_nothing_of_is_left_out_and_named(site: Site, item: dict[str, Any]) -> None:
    response = await ask(site, input=[USER, item, USER])
    assert [message["role"] for message in site.worker.commands[-1].messages or []] == ["user", "user"]
    [warning] = response["warnings"]
    assert (warning["code"], warning["parameter"]) == ("left_out_item", "input")
    assert item["type"] in warning["message"]


@pytest.mark.parametrize("reference", [{"type": "item_reference", "id": "msg_nobody"}, {"id": "msg_nobody"}])
async def test_an_item_that_is_not_kept_is_told_as_such(site: Site, reference: dict[str, Any]) -> None:
    response = await ask(site, input=[USER, reference, USER])
    assert [message["role"] for message in site.worker.commands[-1].messages or []] == ["user", "user"]
    [warning] = response["warnings"]
    assert (warning["code"], warning["parameter"]) == ("item_not_found", "input")
    assert "msg_nobody" in warning["message"]
    answer = await site.client.post(PATH, json={"model": "demo-main", "input": [reference]})
    assert (answer.status_code, "msg_nobody" in answer.text) == (400, True)


async def test_thoughts_and_refusals_of_an_earlier_session_are_read(site: Site) -> None:
    items = [
        USER,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "gAAA"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "agent_message", "content": [{"type": "input_text", "text": "From another."}]},
    ]
    assert "warnings" not in await ask(site, input=items)
    _, assistant, other = site.worker.commands[-1].messages or []
    assert (assistant["content"], assistant["reasoning_content"]) == ("No.", "Hm.\nSo.")
    assert other == {"role": "user", "content": "From another."}


async def test_tools_that_items_bring_are_offered(site: Site) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [MCP]}
    search_output = {"type": "tool_search_output", "call_id": "c", "tools": [LOOK, LOOK]}
    site.worker.script = calling(("mcp__files__look", ["{}"]))
    response = await ask(site, tools=[LOOK], input=[USER, more, search_output])
    assert [*shown(site)] == ["look", "mcp__files__look", "mcp__files__apply_patch"]
    assert response["output"][0]["namespace"] == "mcp__files__"


async def test_an_item_that_is_kept_may_be_named_instead_of_sent(site: Site) -> None:
    first = await ask(site)
    [said] = first["output"]
    for reference in ({"type": "item_reference", "id": said["id"]}, {"id": said["id"]}):
        assert "warnings" not in await ask(site, input=[USER, reference, USER])
        messages = site.worker.commands[-1].messages or []
        assert [message["content"] for message in messages] == ["Hi", "Hello, world", "Hi"]
    await site.client.delete(f"{PATH}/{first['id']}")
    assert "warnings" in await ask(site, input=[USER, {"type": "item_reference", "id": said["id"]}, USER])


async def test_a_session_of_nothing_that_can_be_read_is_refused_by_name(site: Site) -> None:
    for items, why in (([{"type": "computer_call"}], "computer_call"), ([], "there is no message")):
        answer = await site.client.post(PATH, json={"model": "demo-main", "input": items})
        assert (answer.status_code, why in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    "item",
    [
        {"type": {}},
        {"type": "message", "role": "user", "content": [{"type": {}}]},
        {"type": "function_call", "name": {}, "arguments": [], "namespace": 5},
        {"type": "function_call_output", "output": {"type": {}}},
        {"type": "function_call_output", "output": [{"type": {}}]},
        {"type": "additional_tools", "tools": 5},
        {"type": "mcp_call", "output": [5], "server_label": []},
    ],
)
async def test_nonsense_is_never_a_mistake_of_the_server(site: Site, item: dict[str, Any]) -> None:
    answer = await site.client.post(PATH, json={"model": "demo-main", "input": [USER, item]})
    assert answer.status_code in {200, 400}


async def test_a_session_of_codex_goes_on_after_its_own_calls(site: Site) -> None:
    """The client sends calls back as it received them: here a custom one and one of an MCP server."""
    site.worker.script = calling(("apply_patch", ['{"input": "x"}']), ("mcp__files__look", ["{}"]))
    first = await ask(site, tools=[PATCH, MCP])
    results = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "done"} for item in first["output"]
    ]
    await ask(site, tools=[PATCH, MCP], input=[USER, *first["output"], *results])
    stateless = site.worker.commands[-1].messages
    await ask(site, tools=[PATCH, MCP], input=results, previous_response_id=first["id"])
    assert site.worker.commands[-1].messages == stateless
    assert [message["role"] for message in stateless or ()] == ["user", "assistant", "tool", "tool"]


def test_reading_twice_leaves_the_items_as_they_were() -> None:
    items = [USER, *(item for case in READ for item in case[0]), *LEFT_OUT]
    before = json.dumps(items)
    assert ItemReader(lambda _: None).read(items).messages == ItemReader(lambda _: None).read(items).messages
    assert json.dumps(items) == before


class Counted(dict[str, Any]):
    """A tool that counts its reads, together with all other tools."""

    looks = 0

    def get(self, *names: Any) -> Any:
        Counted.looks += 1
        return super().get(*names)


def test_many_tools_and_a_choice_of_many_are_looked_at_once_each() -> None:
    tools = [Counted(type="function", name=f"t{number}") for number in range(1000)]
    wanted = [Counted(type="function", name=f"none{number}") for number in range(999)] + [tools[7]]
    choice = chat_choice({"type": "allowed_tools", "mode": "auto", "tools": wanted}, tools)
    assert [tool["function"]["name"] for tool in choice["allowed_tools"]["tools"]] == ["t7"]
    assert Counted.looks < 10 * len(tools + wanted)


THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"role": "assistant", "content": "a"}
CALL = {"type": "function_call", "name": "look", "call_id": "c", "arguments": "{}"}


def read(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return ItemReader(lambda _: None).read(items).messages


def test_pieces_of_the_assistants_are_one_message() -> None:
    [message] = read(THOUGHT, THOUGHT, SAID, CALL, CALL, SAID)
    assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == ("aa", "hm\nhm", 2)
    assert read(THOUGHT) == []


def test_a_comment_and_the_answer_after_it_are_two_messages() -> None:
    assert [message["content"] for message in read(SAID, SAID)] == ["a", "a"]
    first, second = read(THOUGHT, SAID, THOUGHT, SAID, CALL)
    assert (first["content"], first["reasoning_content"], first.get("tool_calls")) == ("a", "hm", None)
    assert (second["content"], second["reasoning_content"], len(second["tool_calls"])) == ("a", "hm", 1)


@pytest.mark.parametrize("kind", ["function_call", "mcp_call"])
def test_arguments_may_be_an_object(kind: str) -> None:
    [message, *_] = read(CALL | {"type": kind, "arguments": {"a": [1]}, "output": "done"})
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": [1]}'


def test_a_result_without_an_id_answers_the_call_of_its_name() -> None:
    calls = [
        CALL | {"name": name, "call_id": call_id} for call_id, name in zip("012", ("look", "find", "look"), strict=True)
    ]
    output = {"type": "function_call_output", "id": "fco_1", "output": "x"}
    results = read(*calls, output | {"name": "find"}, output | {"name": "look"}, output)[1:]
    assert [message["tool_call_id"] for message in results] == ["1", "0", "2"]
