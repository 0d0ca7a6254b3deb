"""Long operations report progress: a probe after each forward, a drafter after each chunk of missed tokens."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from app.core.request import SamplingParameters
from app.core.step import DecodeRow
from app.engine.drafters.draft_model import CATCH_UP_CHUNK_TOKENS, DraftModel
from app.engine.probe import PROBE, PROBE_REJECTS, open_runner
from app.engine.runner import Runner
from app.engine.sampling.drawing import SampledRow
from tests.tiny import tiny_model


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
    ("token_seconds", "settled"), [(0.0, CATCH_UP_CHUNK_TOKENS[1]), (0.1, CATCH_UP_CHUNK_TOKENS[0])]
)
def test_a_drafter_reads_what_it_missed_in_chunks_of_about_a_second(token_seconds: float, settled: int) -> None:
    now = 0.0
    chunks: list[int] = []
    beats: list[float] = []
    runner = open_runner(tiny_model("qwen3"))
    runner.on_progress = lambda: beats.append(now)
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
    assert drafter.propose([row], [SampledRow(SamplingParameters(seed=1), tokens, 2000)]).counts == (2,)
    read = chunks[: len(beats)]
    assert sum(read) == 1999
    assert settled in read
    assert read[:-1] == sorted(read[:-1], reverse=bool(token_seconds))
    assert chunks[len(beats) :] == [1, 1], "what was missed at last, and the first draft"
