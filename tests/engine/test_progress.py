"""Long operations leave room for others: a probe reports after each forward, a drafter reads in slices."""

from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
import pytest

from app.core import slices
from app.core.reason import DRAFTER_READS
from app.core.request import Request, SamplingParameters, SpeculationRequest
from app.core.step import DecodeRow, DecodeStep, PrefillRow, PrefillStep
from app.engine.drafters.draft_model import CATCH_UP_CHUNK_TOKENS, CATCH_UP_WIDTH_TOKENS, DraftModel
from app.engine.engine import Engine
from app.engine.probe import PROBE, PROBE_REJECTS, open_runner
from app.engine.runner import Runner
from app.engine.sampling.drawing import SampledRow
from app.scheduler.scheduler import Scheduler
from tests.engine.driving import build, naive
from tests.engine.schedules import models
from tests.engine.test_strict import vague_engine
from tests.tiny import tiny_model

GREEDY, SEEDED = SamplingParameters(temperature=0.0), SamplingParameters(seed=3)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next"])
def test_a_probe_reports_after_each_forward(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    events: list[str] = []
    forward = Runner.forward

    def counted(self: Runner, *given: Any, **options: Any) -> Any:
        events.append("forward")
        return forward(self, *given, **options)

    monkeypatch.setattr(Runner, "forward", counted)
    open_runner(tiny_model(family), on_progress=lambda: events.append("progress"))
    assert events.count("forward") >= len(PROBE_REJECTS)
    assert events[: len(PROBE)] == ["progress"] * len(PROBE)
    assert "forward forward" not in " ".join(events)


@pytest.mark.parametrize(
    ("token_seconds", "settled"), [(0.0, CATCH_UP_CHUNK_TOKENS[1]), (0.0005, 128), (0.1, CATCH_UP_CHUNK_TOKENS[0])]
)
def test_a_drafter_reads_what_it_missed_a_slice_in_each_step(token_seconds: float, settled: int) -> None:
    now = 0.0
    chunks: list[int] = []
    runner = open_runner(tiny_model("qwen3"))
    forward = runner.forward

    def slow(names: Sequence[str], tokens: mx.array, widths: Sequence[int], **options: Any) -> Any:
        nonlocal now
        now += token_seconds * sum(widths)
        chunks.append(max(widths))
        return forward(names, tokens, widths, **options)

    runner.forward = slow  # type: ignore[assignment,method-assign]
    drafter = DraftModel(runner, target_vocabulary=97, max_context_tokens=4096, clock=lambda: now)
    tokens = [place % 97 for place in range(2000)]
    row = DecodeRow("a", tokens, 2000, 1999, 50, method="draft_model", num_draft_tokens=2)
    while not (proposal := drafter.propose([row], [SampledRow(SamplingParameters(seed=1), tokens, 2000)])).width:
        assert proposal.reasons == (DRAFTER_READS,)
    assert proposal.counts == (2,)
    assert chunks[-2:] == [len(tokens) - sum(chunks[:-2]), 1], "what was missed at last, and the first draft"
    read = chunks[:-2]
    assert settled in read
    assert read[:-1] == sorted(read[:-1], reverse=token_seconds > 0.01)


class OneChunkAStep:
    """Clock on which every chunk takes longer than a slice."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def slow_drafter(engine: Engine) -> list[int]:
    """Let the engine's draft model read one chunk in each step; return a list that gets the width of each forward."""
    widths: list[int] = []
    drafter = engine.drafters.available["draft_model"]
    assert isinstance(drafter, DraftModel)
    drafter._clock = OneChunkAStep()
    forward = drafter.runner.forward

    def counted(names: Sequence[str], tokens: mx.array, fed: Sequence[int], **options: Any) -> Any:
        widths.append(max(fed))
        return forward(names, tokens, fed, **options)

    drafter.runner.forward = counted  # type: ignore[assignment,method-assign]
    return widths


def test_rows_go_on_without_drafts_while_their_drafter_reads_and_their_text_stays_the_same() -> None:
    target, draft = models("qwen3", False)
    engine = build(target, draft=draft)
    widths = slow_drafter(engine)
    texts = {name: [(place * step) % 97 for place in range(100)] for name, step in (("first", 5), ("second", 7))}
    expected = {name: naive(target, text, 24, GREEDY) for name, text in texts.items()}
    for name, text in texts.items():
        engine.admit(Request(id=name, prompt_tokens=tuple(text), max_tokens=24, sampling=GREEDY))
        engine.step(PrefillStep((PrefillRow(name, text, 0, 99),)))
    computed, drafted = dict.fromkeys(texts, 99), dict.fromkeys(texts, 0)
    while len(texts["first"]) < 120 or len(texts["second"]) < 120:
        rows = [
            DecodeRow(name, text, 100, computed[name], 124 - len(text), method="draft_model", num_draft_tokens=2)
            for name, text in texts.items()
            if len(text) < 120
        ]
        widths.clear()
        for outcome in engine.step(DecodeStep(tuple(rows))).outcomes:
            assert outcome.drafted or outcome.why_not_drafted == DRAFTER_READS
            texts[outcome.sequence_id] += outcome.emitted
            computed[outcome.sequence_id] = outcome.computed
            drafted[outcome.sequence_id] += outcome.drafted
        assert sum(width > CATCH_UP_WIDTH_TOKENS for width in widths) <= 1, "one chunk for all rows together"
    assert all(drafted.values())
    assert all(text[100:] == expected[name][: len(text) - 100] for name, text in texts.items())


def test_a_drafter_that_is_cached_at_checkpoints_reads_along_with_the_prompt() -> None:
    target, draft = models("qwen3_next", False)
    engine = build(target, draft=draft, prefix_bytes=1 << 30)
    widths = slow_drafter(engine)
    prompt = tuple(5 * place % 97 for place in range(200))
    engine.admit(Request(id="a", prompt_tokens=prompt, max_tokens=9, checkpoints=(190,)))
    for start, end in ((0, 50), (50, 100), (100, 150), (150, 190)):
        widths.clear()
        engine.step(PrefillStep((PrefillRow("a", prompt, start, end),)))
        assert len(widths) == 1, "a chunk in each step, not the whole prompt at the checkpoint"


def answers(method: str, acceptance: Literal["coupled", "strict"], *, second_at: int = 0) -> dict[str, list[int]]:
    """Return the tokens of one request, and of an equal one that comes at a later step, if any; all work is sliced."""
    engine = vague_engine("qwen3_next")
    slow_drafter(engine)
    scheduler, texts, step = Scheduler(engine.limits, policy="auto"), dict[str, list[int]](), 0
    speculation = SpeculationRequest(method=method, num_draft_tokens=4, acceptance=acceptance)
    requests = [
        Request(id=name, prompt_tokens=tuple(range(90)), max_tokens=40, sampling=SEEDED, speculation=speculation)
        for name in ("first", "second")[: 1 + bool(second_at)]
    ]
    while requests or scheduler.has_work:
        if requests and step >= second_at * bool(texts):
            scheduler.submit(requests.pop(0))
        while (request := scheduler.next_admission()) and engine.fetch(request):
            scheduler.admitted(request.id, engine.admit(request))
        if (plan := scheduler.plan()) is not None:
            step += 1
            for event in scheduler.commit(engine.step(plan)):
                texts.setdefault(event.request_id, []).extend(event.tokens)
        for name, tokens in scheduler.drain_released():
            engine.release(name, tokens)
    assert not engine.runner.rows
    return texts


def test_slices_change_no_text_whoever_joins_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    plain = answers("off", "coupled")["first"]
    assert answers("draft_model", "strict") == {"first": plain}
    assert answers("draft_model", "strict", second_at=15) == {"first": plain, "second": plain}
    assert answers("auto", "coupled", second_at=15) == {"first": plain, "second": plain}
