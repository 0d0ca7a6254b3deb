"""Structured output, tools and reasoning of the embedded models: enforced, streamed, the same with every drafter."""

import json
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest

from tests.serving.conftest import Server
from tests.shares import one_in

MODEL = "demo-assistant"
CITIES = (
    *("Paris", "London", "Rome", "Oslo", "Berlin", "Madrid", "Vienna", "Lisbon", "Tokyo"),
    *("Seoul", "Cairo", "Athens", "Dublin", "Prague", "Warsaw", "Helsinki", "Zurich"),
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather for a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["first_name", "age_in_years"],
    "additionalProperties": False,
}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(server: Server, text: str, **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 120, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body | changes, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 11}])
@pytest.mark.parametrize("model", [MODEL, "demo-hybrid", "attention"])
def test_a_schema_is_kept_and_the_text_is_the_same_whoever_drafts(server: Server, model: str, sampling: Any) -> None:
    ask(server, "Load.", model=model, max_tokens=1)
    methods = httpx.get(f"{server.url}/v1/models/{model}", timeout=60).json()["methods"]
    assert len(methods) >= 2
    texts = {}
    for method in ("off", "auto", *methods):
        answer = ask(
            server,
            "Describe a person.",
            model=model,
            response_format=PERSON_FORMAT,
            speculation={"method": method} | ({"num_draft_tokens": 4} if method == "ngram" else {}),
            **sampling,
        )
        texts[method] = answer["choices"][0]["message"]["content"]
        if method == "ngram":  # it drafts the tokens that the grammar forces
            assert answer["speculation"]["tokens_per_cycle"] >= 1.3
    jsonschema.validate(json.loads(texts["off"]), PERSON)
    assert len(set(texts.values())) == 1


SCORED = {
    "type": "object",
    "properties": {
        "score": {"type": "integer", "multipleOf": 5},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 5}, "maxItems": 2},
    },
    "required": ["score", "tags"],
    "additionalProperties": False,
    "patternProperties": {"^score$": {"type": "integer", "minimum": 0, "maximum": 95}},
}


@pytest.mark.parametrize("model", [MODEL, "attention"])
def test_names_by_a_pattern_beside_names_in_the_schema_are_whole_json(server: Server, model: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCORED}}
    for seed in (3, 4):
        texts = set()
        for method in ("off", "auto"):
            fields = {"temperature": 1.0, "seed": seed, "speculation": {"method": method}, "response_format": wanted}
            [choice] = ask(server, "Write JSON.", model=model, **fields)["choices"]
            texts.add(choice["message"]["content"])
            assert choice["finish_reason"] == "stop"
        [text] = texts
        jsonschema.validate(json.loads(text), SCORED)


@pytest.mark.parametrize(
    ("model", "method", "length"), [(MODEL, "ngram", 8), (MODEL, "dflash", 1), ("demo-hybrid", "mtp", 1)]
)
@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ("Turn this into JSON: name: Ada, age: 36, city: Oslo", {"name": "string", "age": "integer", "city": "string"}),
        (
            "Write JSON with title Dune, author Frank, year 1965 and pages 412.",
            {"title": "string", "author": "string", "year": "integer", "pages": "integer"},
        ),
        ("Make JSON with name Ada and age 36.", {"name": "string", "age": "integer"}),
    ],
)
def test_forced_keys_make_more_tokens_of_a_cycle_than_the_same_text_without_them(
    server: Server, asked: str, fields: dict[str, str], model: str, method: str, length: int
) -> None:
    """If a drafter knows the keys too, forced tokens only add to its drafts: a draft length of 1 shows the gain."""
    speculation = {"method": method, "num_draft_tokens": length}

    def written(**changes: Any) -> tuple[str, float]:
        answer = ask(server, asked, model=model, speculation=speculation, **changes)
        cycles = sum(entry["cycles"] for entry in answer["speculation"]["methods"].values())
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"] / cycles

    properties = {name: {"type": kind} for name, kind in fields.items()}
    schema = {"type": "object", "properties": properties, "required": [*fields], "additionalProperties": False}
    free_text, free = written()
    text, forced = written(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert json.loads(text) == json.loads(free_text)
    assert text == free_text
    assert forced >= 1.3 * free


def test_what_is_asked_for_is_what_comes(server: Server) -> None:
    def content(**changes: Any) -> str:
        return str(ask(server, "Go on.", **changes)["choices"][0]["message"]["content"])

    assert content(guided_choice=["red", "green"]) in {"red", "green"}
    assert content(guided_json=json.dumps({"const": True})) == "true"
    assert content(structured_outputs={"regex": "[0-9]{3}-[a-c]"})[3] == "-"
    assert content(guided_grammar='start: "yes" | "no"') in {"yes", "no"}
    assert isinstance(json.loads(content(guided_json=json.dumps({"type": "array", "maxItems": 1}))), list)


def test_a_schema_that_cannot_be_enforced_is_refused_by_the_name_of_its_keyword(client: openai.OpenAI) -> None:
    schema = {"type": "object", "dependentSchemas": {"a": {}}}
    with pytest.raises(openai.BadRequestError, match="dependentSchemas") as refused:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_grammar")


@pytest.mark.parametrize(
    "choice", one_in(3, ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
)
def test_streamed_deltas_rebuild_the_arguments_of_a_call(client: openai.OpenAI, choice: Any) -> None:
    drafted = accepted = 0
    for city in CITIES:
        asked: Any = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"What is the weather in {city}?"}],
            "tools": TOOLS,
            "tool_choice": choice,
            "temperature": 0,
            "max_tokens": 80,
            "extra_body": {"speculation": {"method": "dflash", "num_draft_tokens": 3}},
        }
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.choices[0].message.content is None
        [call] = whole.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments) == {"city": city}
        pieces = []
        for chunk in client.chat.completions.create(**asked, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
                assert bool(delta.id) == bool(delta.function and delta.function.name) == (not pieces)
                pieces.append(delta.function.arguments if delta.function else "")
        assert "".join(pieces) == call.function.arguments
        speculation = whole.model_dump()["speculation"]
        drafted, accepted = drafted + speculation["drafted"], accepted + speculation["accepted"]
    assert accepted >= 0.6 * drafted > 0


@pytest.mark.parametrize("stop", ["</tool_call>", "Os"])
def test_a_stop_string_that_stands_inside_a_call_leaves_it_whole(server: Server, stop: str) -> None:
    [choice] = ask(server, "What is the weather in Oslo?", tools=TOOLS, stop=[stop])["choices"]
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert (choice["finish_reason"], json.loads(arguments)) == ("tool_calls", {"city": "Oslo"})


def test_a_result_goes_back_and_a_refused_choice_is_named(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages: Any = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain, 4 degrees"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=60)
    assert "4 degrees" in (answer.choices[0].message.content or "")
    with pytest.raises(openai.BadRequestError, match="no tools"):
        client.chat.completions.create(model=MODEL, messages=messages, tool_choice="required")


def test_reasoning_ends_at_its_budget(server: Server) -> None:
    def think(tokens: int) -> str:
        asked = {"chat_template_kwargs": {"enable_thinking": True}, "guided_choice": ["yes", "no"]}
        answer = ask(server, "Is it?", thinking={"type": "enabled", "budget_tokens": tokens}, **asked)
        message = answer["choices"][0]["message"]
        assert message["content"] in {"yes", "no"}
        return str(message.get("reasoning_content", ""))

    assert len(think(4)) <= 4 * 12
