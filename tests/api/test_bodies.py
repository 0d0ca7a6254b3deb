"""Bodies of many values: what one may cost, and where it is parsed, so that the streams of others go on."""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from app.admin.chat_routes import NewTurns
from app.api.chat import ChatBody
from app.api.messages import MessagesBody
from app.api.tokens import DetokenizeBody
from app.serving.context import PacedThread
from app.serving.errors import Rejected
from app.serving.gate import Body, parse, parse_json
from tests.api.fakes import Site, make_site, model

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "Hi"}
MANY = 50_001


def listed(value: str, count: int) -> str:
    return f"[{','.join([value] * count)}]"


def openai_problem(response: httpx2.Response) -> tuple[str, str]:
    error = response.json()["error"]
    return error["code"], error["message"]


def anthropic_problem(response: httpx2.Response) -> tuple[str, str]:
    assert response.json()["type"] == "error"
    return response.json()["error"]["type"], response.json()["error"]["message"]


def ollama_problem(response: httpx2.Response) -> tuple[str, str]:
    return "request_too_large", response.json()["error"]


@pytest.mark.parametrize(
    ("path", "field", "problem"),
    [
        ("/v1/chat/completions", '"messages": ', openai_problem),
        ("/v1/responses", '"input": ', openai_problem),
        ("/v1/messages", '"max_tokens": 1, "messages": ', anthropic_problem),
        ("/api/chat", '"messages": ', ollama_problem),
        ("/admin/api/login", '"password": "", "x": ', openai_problem),
    ],
)
async def test_a_body_of_too_many_small_objects_is_refused_before_they_are_made(
    site: Site, path: str, field: str, problem: Callable[[httpx2.Response], tuple[str, str]]
) -> None:
    body = f'{{"model": "demo-main", {field}{listed("{}", MANY)}}}'
    response = await site.client.post(path, content=body, headers=JSON)
    assert response.status_code == 413, response.text
    code, message = problem(response)
    assert code == "request_too_large"
    assert "more than 50,000 objects and lists" in message
    assert "connection" not in response.headers, "all of it was read"


def test_a_body_of_too_many_values_of_any_kind_is_refused() -> None:
    for value in ("1", '""', '"\\""', "null", '",[{"'):
        with pytest.raises(Rejected, match="2,000,000 values"):
            parse_json(f'{{"tokens": {listed(value, 2_000_001)}}}'.encode())


def test_a_prompt_of_a_million_tokens_is_legal() -> None:
    body = parse(f'{{"tokens": {listed("1", 1_048_576)}}}'.encode(), DetokenizeBody)
    assert len(body.tokens) == 1_048_576


def test_a_text_may_contain_any_number_of_brackets_commas_quotes_and_backslashes() -> None:
    text = '[{,"\\' * 500_000 + "\\"
    assert parse_json(json.dumps({"a": text, "b": [text]}).encode()) == {"a": text, "b": [text]}


def openai_history() -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": '{"a": [1, 2]}'}}
    asked = {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [call]}
    return [asked, {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "{},{}"}]}]


def anthropic_history() -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": "call_1", "name": "run", "input": {"edits": [{"old": "a", "new": "b"}]}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "done"}]}
    asked = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]}
    return [asked, {"role": "user", "content": [result]}]


@pytest.mark.parametrize(("schema", "turns"), [(ChatBody, openai_history()), (MessagesBody, anthropic_history())])
def test_a_history_of_as_many_messages_as_are_allowed_is_read(schema: type[Any], turns: list[dict[str, Any]]) -> None:
    tools = {} if schema is MessagesBody else {"tools": [{"type": "function", "function": {"name": "run"}}]}
    raw = json.dumps({"model": "m", "max_tokens": 1, "messages": turns * 4096} | tools).encode()
    assert len(parse(raw, schema).messages) == 8192


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (DetokenizeBody, {"tokens": ["x"] * 1000}),
        (ChatBody, {"messages": [{"role": "nobody"}] * 1000}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"text": 1}] * 1000}]}),
        (NewTurns, {"version": 0, "turns": [{}] * 1000}),
    ],
)
def test_a_list_of_wrong_items_is_not_searched_for_a_second_one(schema: type[Body], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() < 20


def test_a_conversation_with_many_drafted_spans_can_be_imported() -> None:
    turn = '{{"id": "t{0}", "parent": "", "role": "assistant", "content": "", "spans": {1}}}'
    turns = ",".join(turn.format(number, listed('[0, 1, "ngram"]', 40_000)) for number in range(3))
    body = parse(f'{{"version": 0, "turns": [{turns}]}}'.encode(), NewTurns)
    assert sum(len(turn.spans) for turn in body.turns) == 120_000


class CountingThread(PacedThread):
    """A parser that counts what it was given to do."""

    def __init__(self) -> None:
        super().__init__(rest=lambda _seconds: None)
        self.runs = 0

    async def run(self, *arguments: Any, **named: Any) -> Any:
        self.runs += 1
        return await super().run(*arguments, **named)


TEXT = "x" * 256 * 1024
OBJECTS = [{"type": "text", "text": ""}] * 5000
LARGE = {
    "/v1/chat/completions": ({"messages": [USER]}, 1),
    "/v1/messages": ({"messages": [USER], "max_tokens": 1}, 2),
    "/v1/messages/count_tokens": ({"messages": [USER]}, 2),
    "/v1/responses": ({"input": "Hi"}, 2),
    "/api/chat": ({"messages": [USER]}, 2),
    "/api/generate": ({"prompt": "Hi"}, 2),
    "/api/embed": ({"input": "Hi"}, 2),
    "/tokenize": ({"messages": [USER]}, 2),
}


@pytest.mark.parametrize(("path", "body", "runs"), [(path, *case) for path, case in LARGE.items()], ids=LARGE)
async def test_a_large_body_is_converted_in_the_thread_that_parsed_it(
    path: str, body: dict[str, Any], runs: int
) -> None:
    parser = CountingThread()
    site = make_site(models=(model("demo-main"),), context={"parser": parser})
    for large, expected in ((None, 0), (TEXT, runs), (OBJECTS, runs)):
        parser.runs = 0
        response = await site.client.post(path, json={"model": "demo-main", "unknown": large} | body)
        assert response.status_code == 200, response.text
        assert parser.runs == expected
