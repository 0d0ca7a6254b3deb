"""Requests survive a failing drafter: the tokens are the same, one line is logged, and answers state the reason."""

import logging
from typing import Any

import pytest

from app.core.errors import InsufficientMemory, SpeculationUnavailable
from app.core.reason import Reason
from app.core.request import Request, SamplingParameters, SpeculationRequest
from app.engine.drafters.draft_model import DraftModel
from app.engine.engine import Engine
from app.scheduler.scheduler import Scheduler
from tests.engine.driving import build
from tests.engine.schedules import models

PROMPT = tuple(5 * place % 97 for place in range(40))


def answers(engine: Engine, *names: str, method: str = "draft_model") -> tuple[dict[str, list[int]], set[str]]:
    """Run requests together; return their tokens, and the reasons why steps drafted nothing."""
    scheduler = Scheduler(engine.limits, policy="auto")
    for seed, name in enumerate(names):
        wish = SpeculationRequest(method=method, num_draft_tokens=3)
        sampling = SamplingParameters(temperature=0.8, seed=seed)
        scheduler.submit(Request(id=name, prompt_tokens=PROMPT, max_tokens=12, sampling=sampling, speculation=wish))
    tokens, reasons = dict[str, list[int]](), set[str]()
    while scheduler.has_work:
        while (request := scheduler.next_admission()) is not None:
            scheduler.admitted(request.id, engine.admit(request))
        if (plan := scheduler.plan()) is not None:
            for event in scheduler.commit(engine.step(plan)):
                tokens.setdefault(event.request_id, []).extend(event.tokens)
                reasons.add(str(event.why_not_drafted))
        for released, kept in scheduler.drain_released():
            engine.release(released, kept)
    return tokens, reasons


def failing_after(monkeypatch: pytest.MonkeyPatch, verb: str, calls: int, error: Exception) -> None:
    real, called = getattr(DraftModel, verb), list[str]()

    def fail(self: DraftModel, *given: Any) -> Any:
        called.append(verb)
        if len(called) > calls:
            raise error
        return real(self, *given)

    monkeypatch.setattr(DraftModel, verb, fail)


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("verb", ["admit", "propose", "observe", "offer"])
@pytest.mark.parametrize("family", ["qwen3", "mamba2"])
def test_an_answer_is_the_same_when_its_drafter_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, family: str, verb: str, calls: int
) -> None:
    target, draft = models(family, quantised=False)
    expected, _ = answers(build(target), "one", "two", "three", method="off")
    engine = build(target, draft=draft)
    failing_after(monkeypatch, verb, calls, ValueError("shapes do not match"))
    with caplog.at_level(logging.ERROR):
        tokens, reasons = answers(engine, "one", "two", "three")
    assert tokens == expected
    assert [record.getMessage() for record in caplog.records] == ["the draft_model drafter failed and is left out"]
    assert any("shapes do not match" in reason for reason in reasons)
    assert verb != "propose" or str(Reason("under_way")) not in reasons, "a step without its drafts says why"
    assert "shapes do not match" in str(engine.limits.unavailable["draft_model"])
    assert not engine.runner.rows
    assert answers(engine, "one", "two", "three", method="auto")[0] == expected, "later requests continue without it"
    with pytest.raises(SpeculationUnavailable, match="shapes do not match"):
        answers(engine, "by name")


def test_a_drafter_that_cannot_free_a_row_is_left_out_and_the_row_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models("qwen3", quantised=False)
    engine = build(target, draft=draft)
    failing_after(monkeypatch, "release", 0, ValueError("no such row"))
    answers(engine, "one")
    assert not engine.runner.rows
    assert "no such row" in str(engine.limits.unavailable["draft_model"])


def test_a_lack_of_memory_while_drafting_is_not_the_drafters_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models("qwen3", quantised=False)
    engine = build(target, draft=draft)
    failing_after(monkeypatch, "propose", 0, RuntimeError("[metal::malloc] Unable to allocate 1073741824 bytes."))
    with pytest.raises(InsufficientMemory):
        answers(engine, "one")
    assert "draft_model" in engine.drafters.available
