"""Libraries and tools that people build on, set up as their documentation says, with drafts and without."""

import json
from pathlib import Path
from typing import Any

import anthropic
import ollama
import pydantic
import pytest
from click.testing import CliRunner
from llm.cli import cli

from tests.clients.conftest import MODEL, Both


class Person(pydantic.BaseModel, extra="forbid"):
    """A person."""

    first_name: str = pydantic.Field(max_length=12)
    age_in_years: int = pydantic.Field(ge=0, le=150)


def test_langchain_chats_calls_tools_and_parses(both: Both[list[Any]]) -> None:
    import langchain_openai  # takes seconds: at module level, every test process would pay
    from langchain_core.tools import tool

    @tool
    def get_weather(city: str) -> str:
        """Get the current weather for a city"""
        return f"rain in {city}, 4 degrees"

    def talk(url: str) -> list[Any]:
        model = langchain_openai.ChatOpenAI(
            base_url=f"{url}/v1", api_key=pydantic.SecretStr("none"), model=MODEL, temperature=0, max_retries=0
        )
        streamed = "".join(str(piece.content) for piece in model.stream("Count from 1 to 5."))
        assert streamed == model.invoke("Count from 1 to 5.").content
        asked: list[Any] = [("user", "What is the weather in Oslo?")]
        called = model.bind_tools([get_weather]).invoke(asked)
        [call] = called.tool_calls
        answer = model.bind_tools([get_weather]).invoke([*asked, called, get_weather.invoke(call)])
        assert "4 degrees" in str(answer.content)
        parsed = [
            model.with_structured_output(Person, method=method).invoke("Describe a person.")
            for method in ("json_schema", "function_calling")
        ]
        assert all(isinstance(person, Person) for person in parsed)
        vectors = langchain_openai.OpenAIEmbeddings(
            base_url=f"{url}/v1", api_key=pydantic.SecretStr("none"), model=MODEL, check_embedding_ctx_length=False
        ).embed_documents(["one", "two"])
        assert len(vectors) == 2
        return [streamed, call["name"], call["args"], answer.content, *parsed]

    assert both(talk)


def test_llm_chats_calls_tools_and_keeps_a_schema(
    both: Both[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(url: str) -> list[str]:
        monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
        entry = f"- model_id: paceline\n  model_name: {MODEL}\n  api_base: {url}/v1\n  supports_tools: true\n"
        (tmp_path / "extra-openai-models.yaml").write_text(entry + "  supports_schema: true\n")

        def run(*words: str) -> str:
            result = CliRunner().invoke(cli, ["-m", "paceline", "-o", "temperature", "0", *words])
            assert result.exit_code == 0, result.output
            return result.output

        python = 'def get_weather(city: str) -> str:\n    "Get the current weather for a city"\n    return "4 degrees"'
        return [
            run("Count from 1 to 5."),
            run("Count from 1 to 5.", "--no-stream"),
            run("Describe a person.", "--schema", json.dumps(Person.model_json_schema())),
            run("What is the weather in Oslo?", "--functions", python),
        ]

    streamed, whole, person, weather = both(talk)
    assert streamed == whole
    assert "first_name" in person
    assert "4 degrees" in weather


def test_anthropics_client_streams_tools_and_thinks(both: Both[list[Any]]) -> None:
    def talk(url: str) -> list[Any]:
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "What is the weather in Oslo?"}]}
        tools: Any = [{"name": "get_weather", "description": "Get the current weather", "input_schema": schema}]
        cold: Any = {"extra_body": {"temperature": 0}}
        warm = client.messages.create(**asked, tools=tools, max_tokens=0)
        assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
        with client.messages.stream(**asked, tools=tools, max_tokens=200, **cold) as stream:
            called = stream.get_final_message()
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        thought = client.messages.create(**asked, max_tokens=1100, thinking=thinking, **cold)
        assert (called.usage.cache_read_input_tokens or 0) > 0, "the prompt was read before"
        counted = client.messages.count_tokens(**asked, tools=tools).input_tokens
        assert counted == called.usage.input_tokens + (called.usage.cache_read_input_tokens or 0)
        blocks = [*called.content, *thought.content]
        return [block.model_dump(exclude={"id"}) for block in blocks] + [called.stop_reason, counted]

    assert "tool_use" in both(talk)


def test_ollamas_client_chats_generates_and_embeds(both: Both[list[Any]]) -> None:
    def talk(url: str) -> list[Any]:
        client, cold = ollama.Client(host=url), ollama.Options(temperature=0, num_predict=40)
        asked = [{"role": "user", "content": "Count from 1 to 5."}]
        streamed = "".join(
            str(piece.message.content) for piece in client.chat(MODEL, messages=asked, stream=True, options=cold)
        )
        schema: Any = Person.model_json_schema()
        person = Person.model_validate_json(client.generate(MODEL, "A person.", format=schema, options=cold).response)
        numbers = [f"{number:.4f}" for number in client.embed(MODEL, "one").embeddings[0]]
        return [streamed, person, numbers]

    assert both(talk)
