"""The benchmark's client counts tokens by `usage`, joins the text, and raises on an error."""

from collections.abc import Iterator

import httpx2
import pytest

from bench.comparison.server_cases import DEMO_PROMPTS, demo_prompts, worded_prompt
from bench.comparison.servers import Endpoint, stream_answer, stream_answers
from tests.cli.fake_server import LAST_CHUNK, FakeServer, chunk, running_server

USAGE = {"choices": [], "usage": {"completion_tokens": 7}}


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def endpoint(fake: FakeServer) -> Iterator[Endpoint]:
    with httpx2.Client() as client:
        yield Endpoint(f"http://127.0.0.1:{fake.port}", "big", client, 0, {"speculation": {"method": "off"}})


def test_an_answer_counts_tokens_by_usage(fake: FakeServer, endpoint: Endpoint) -> None:
    fake.answers["/v1/chat/completions"] = (200, [chunk("a"), chunk("b"), LAST_CHUNK, USAGE])
    answer = stream_answer(endpoint, "Say ab.", 7)
    assert (answer.text, answer.tokens, answer.speculation["accepted"]) == ("ab", 7, 3)
    assert fake.requests[0][2]["speculation"] == {"method": "off"}


def test_clients_add_up(fake: FakeServer, endpoint: Endpoint) -> None:
    fake.answers["/v1/chat/completions"] = (200, [chunk("a"), USAGE])
    rate, answers = stream_answers(endpoint, ["one", "two", "three"], 7)
    assert rate > 0
    assert sum(answer.tokens for answer in answers) == 21


def test_an_error_ends_the_measurement(fake: FakeServer, endpoint: Endpoint) -> None:
    fake.answers["/v1/chat/completions"] = (503, {"error": {"message": "no memory"}})
    with pytest.raises(RuntimeError, match="no memory"):
        stream_answer(endpoint, "Hi", 7)


def test_prompts_differ_by_round() -> None:
    assert len({worded_prompt(number, row) for number in range(3) for row in range(8)}) == 24
    for task in DEMO_PROMPTS:
        assert demo_prompts(task, 0) == demo_prompts(task, 0)
        assert demo_prompts(task, 0) != demo_prompts(task, 1)
