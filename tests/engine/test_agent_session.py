"""Twenty-five turns of an agent: each reads little more than the new part of its prompt, and drafts and answers as it
would without a cache."""

import math
from pathlib import Path

import pytest

from app.core.request import SpeculationRequest
from app.engine.drafters import draft_model
from app.engine.engine import Engine
from app.engine.prefix.disk import Disk
from app.text.prompt.template import TextModel
from tests.engine.agent_session import DRAFTERS, FAMILIES, TURNS, Session, Turn, agent_text, engine_of
from tests.shares import LANDING, one_in

PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _drafters_read_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far a drafter gets in a slice depends on the machine, and so does the step in which it begins to draft."""
    monkeypatch.setattr(draft_model, "SLICE_SECONDS", math.inf)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return agent_text(tmp_path_factory.mktemp("agent"))


def turns_of(text: TextModel, engine: Engine, wish: SpeculationRequest) -> list[Turn]:
    return Session(text, system_words=8, turn_words=8, speculation=wish).run(lambda _: engine, turns=5)


def ratio(turns: list[Turn]) -> float:
    """Return the tokens read per new prompt token, from the second turn on."""
    return sum(turn.read_tokens for turn in turns[1:]) / sum(turn.new_tokens for turn in turns[1:])


@pytest.mark.parametrize(("family", "drafter"), one_in(3, FAMILIES, DRAFTERS))
def test_a_turn_reads_little_more_than_what_is_new_whoever_drafts(text: TextModel, family: str, drafter: str) -> None:
    engine = engine_of(family, drafter)
    turns = Session(text, system_words=8, turn_words=8).run(lambda _: engine)
    assert len(turns) == TURNS
    assert min(turn.new_tokens for turn in turns) > 80
    assert ratio(turns) <= 1.1
    later = turns[1:]
    assert sum(turn.drafter_tokens for turn in later) <= 1.1 * sum(turn.new_tokens for turn in later)
    assert any(turn.drafter_tokens for turn in later) or drafter in ("ngram", "draft_model"), (
        "the others follow at once"
    )


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        pytest.param("qwen3", "ngram", marks=LANDING),
        ("gemma3", "draft_model"),
        ("qwen3_next", "mtp"),
        pytest.param("qwen3", "dflash", marks=LANDING),
        pytest.param("qwen3_next", "eagle3", marks=LANDING),
    ],
)
def test_the_same_holds_when_every_turn_meets_another_process(
    text: TextModel, tmp_path: Path, family: str, drafter: str
) -> None:
    engines: list[Engine] = []

    def restarted(_: int) -> Engine:
        for engine in engines:
            engine.prefixes.disk.flush(PATIENCE_SECONDS)
            engine.close()
        engines[:] = [engine_of(family, drafter, disk=Disk(tmp_path, 1 << 30))]
        return engines[0]

    turns = Session(text, system_words=8, turn_words=8).run(restarted, turns=7)
    assert ratio(turns) <= 1.1
    again = Session(text, system_words=8, turn_words=8).run(lambda _: engines[0], turns=7)
    assert [turn.output for turn in again] == [turn.output for turn in turns], "what was put back is what was computed"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_holds_for_a_context_of_8_000_tokens(text: TextModel, family: str, drafter: str) -> None:
    engine = engine_of(family, drafter, room_tokens=10_000)
    turns = Session(text, system_words=300, tool_words=40, turn_words=40).run(lambda _: engine)
    assert 8_000 < len(turns[-1].prompt) < 10_000
    print(f"{family} {drafter}: ratio {ratio(turns):.4f}, last {turns[-1].cached_tokens} of {len(turns[-1].prompt)}")
    assert ratio(turns) <= 1.1


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("qwen3", "eagle3"),
        pytest.param("gemma3", "dflash", marks=LANDING),
        ("qwen3_next", "mtp"),
        pytest.param("qwen3_next", "draft_model", marks=LANDING),
    ],
)
def test_a_turn_drafts_and_says_what_it_would_without_a_cache(text: TextModel, family: str, drafter: str) -> None:
    wish = SpeculationRequest(method=drafter, num_draft_tokens=4)
    cached, missed = (turns_of(text, engine_of(family, drafter, prefix_bytes=size), wish) for size in (1 << 30, 0))
    assert all(turn.cached_tokens for turn in cached[1:])
    assert not any(turn.cached_tokens for turn in missed)
    for hit, other in zip(cached, missed, strict=True):
        assert (hit.output, hit.cycles, hit.accepted) == (other.output, other.cycles, other.accepted)
    assert sum(turn.cycles for turn in cached) > 5


def test_a_prompt_longer_than_the_cache_keeps_what_fits(text: TextModel) -> None:
    engine = engine_of("qwen3", "ngram", prefix_bytes=300_000)
    first, second = Session(text, system_words=200, turn_words=10).run(lambda _: engine, turns=2)
    assert len(first.prompt) > 1_300
    assert engine.prefix_cache_bytes <= 300_000
    assert second.cached_tokens == 1_024, "four blocks"
