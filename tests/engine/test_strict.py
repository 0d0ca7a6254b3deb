"""Acceptance `strict` gives plain decoding's text, token for token, even if a forward's width shifts logits."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from app.core import slices
from app.core.request import UNQUANTISED, Quantisation, Request, SamplingParameters, SpeculationRequest
from app.core.step import DecodeRow, DecodeStep, PrefillRow, PrefillStep, StepCost
from app.engine.engine import Engine
from app.engine.loading.warm_up import Key, warm_up
from app.engine.prefix.cache import PrefixCache
from app.engine.sampling.acceptance import doubtful
from app.engine.sampling.drawing import SampledRow, draw
from tests.engine.driving import build
from tests.engine.schedules import models, random_sampling
from tests.engine.strict_study import Study, decode, hesitant_engine, study
from tests.shares import LANDING, one_in
from tests.tiny import FAMILIES

STRICT = SpeculationRequest(acceptance="strict")
VAGUE = 0.02
"""Pretended shift of logits, large enough that most texts have a few close calls."""


def run_study(family: str, dtype: str, method: str, prompts: int) -> Study:
    command = [sys.executable, "-m", "tests.engine.strict_study", family, dtype, method, str(prompts)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert run.returncode == 0, run.stderr
    return Study(**json.loads(run.stdout))


def asked(prompt: tuple[int, ...], tokens: int, sampling: SamplingParameters, name: str, acceptance: str) -> Request:
    wish = SpeculationRequest(acceptance=acceptance)
    return Request(id=name, prompt_tokens=prompt, max_tokens=tokens, sampling=sampling, speculation=wish)


def vague_engine(family: str, *, carry_over: bool = False, quantisation: Quantisation = UNQUANTISED) -> Engine:
    """Return an engine that assumes a large shift of logits. Windows wrap, long rows get their own buffers."""
    target, draft = models(family, False, 32)
    engine = build(target, draft=draft, shared_tokens=40, carry_over=carry_over, quantisation=quantisation)
    engine.strict_rows.max_shift = VAGUE
    return engine


@pytest.mark.parametrize(("family", "dtype"), one_in(2, ["mamba2", "falcon_h1"], [mx.bfloat16, mx.float16]))
def test_in_half_precision_strict_says_what_plain_decoding_says(family: str, dtype: mx.Dtype) -> None:
    result = study(hesitant_engine(family, dtype), "draft_model", 3)
    assert result.strict_parted == 0
    assert result.close_calls > 0 < result.accepted


@pytest.mark.parametrize(
    ("family", "method"), [("qwen3_next", "ngram"), pytest.param("qwen3", "draft_model", marks=LANDING)]
)
def test_with_openblas_strict_says_what_plain_decoding_says(family: str, method: str) -> None:
    result = run_study(family, "float32", method, 4)
    assert result.strict_parted == 0
    assert result.accepted > 0
    assert not result.openblas or result.close_calls > 0


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("family", "dtype"), [("qwen3_next", "float32"), ("mamba2", "bfloat16")])
def test_on_500_prompts_strict_never_parts_where_coupled_does(family: str, dtype: str) -> None:
    result = run_study(family, dtype, "draft_model", 500)
    assert result.strict_parted == 0
    assert result.coupled_parted > 0 or not (result.openblas or dtype == "bfloat16")


@pytest.mark.parametrize(
    ("family", "kept"),
    one_in(
        4, FAMILIES, [(False, UNQUANTISED), (True, UNQUANTISED), (False, Quantisation(8)), (False, Quantisation(4))]
    ),
)
def test_a_row_goes_back_to_where_plain_decoding_was(family: str, kept: tuple[bool, Quantisation]) -> None:
    carry_over, quantisation = kept
    engine = vague_engine(family, carry_over=carry_over, quantisation=quantisation)
    chance = random.Random(4)
    close_calls = accepted = 0
    for index in range(3):
        prompt, sampling = tuple(chance.randrange(97) for _ in range(9 + index)), random_sampling(chance)
        plain = decode(engine, asked(prompt, 60, sampling, "plain", "coupled"), "draft_model", lambda: 0)
        strict = decode(
            engine, asked(prompt, 60, sampling, "strict", "strict"), "draft_model", lambda: chance.choice((0, 2, 4, 7))
        )
        assert strict.tokens == plain.tokens
        close_calls, accepted = close_calls + strict.close_calls, accepted + strict.accepted
        assert strict.replayed < 60, "no token is read again twice"
    assert close_calls > 0 < accepted
    assert engine.cache_bytes == 0


def test_after_a_close_call_the_cache_has_the_bits_of_plain_decoding() -> None:
    engine = hesitant_engine("mamba2", mx.bfloat16)
    prompt, sampling = tuple(range(5, 25)), SamplingParameters(temperature=0.0)
    states: dict[str, dict[int, list[mx.array]]] = {}
    for acceptance, drafts in (("coupled", 0), ("strict", 4)):
        request = asked(prompt, 24, sampling, acceptance, acceptance)
        tokens, computed, seen = list(prompt), engine.admit(request), states.setdefault(acceptance, {})
        while len(tokens) < 44:
            row = DecodeRow(
                acceptance, tokens, 20, computed, 44 - len(tokens), "draft_model", min(drafts, 43 - len(tokens))
            )
            (outcome,) = engine.step(DecodeStep((row,))).outcomes
            tokens, computed = [*tokens, *outcome.emitted], outcome.computed
            if not drafts or outcome.replayed:
                length = engine.runner.length(acceptance)
                seen[length] = [array for layer in engine.runner.state_row(acceptance) for array in layer]
        engine.release(acceptance, tokens[:computed])
    common = states["strict"].keys() & states["coupled"].keys()
    assert common
    for length in common:
        pairs = zip(states["strict"][length], states["coupled"][length], strict=True)
        assert all(bool(mx.array_equal(strict, plain)) for strict, plain in pairs), length


def test_log_probabilities_of_a_token_decided_again_are_its_own() -> None:
    engine = hesitant_engine("mamba2", mx.bfloat16)
    sampling = SamplingParameters(temperature=1.0, seed=3, top_logprobs=2)
    logprobs: dict[str, dict[int, object]] = {}
    for acceptance, drafts in (("coupled", 0), ("strict", 3)):
        tokens, computed = list(range(12)), engine.admit(asked(tuple(range(12)), 30, sampling, acceptance, acceptance))
        mine = logprobs.setdefault(acceptance, {})
        while len(tokens) < 40:
            row = DecodeRow(acceptance, tokens, 12, computed, 42 - len(tokens), "draft_model", drafts)
            (outcome,) = engine.step(DecodeStep((row,))).outcomes
            tokens, computed = [*tokens, *outcome.emitted], outcome.computed
            if not drafts or outcome.replayed:
                mine[len(tokens)] = outcome.logprobs[-1]
        engine.release(acceptance, ())
    common = logprobs["strict"].keys() & logprobs["coupled"].keys()
    assert common
    assert all(logprobs["strict"][place] == logprobs["coupled"][place] for place in common)


def test_where_no_width_moves_a_logit_nothing_is_read_again() -> None:
    target, draft = models("qwen3", False)
    engine = build(target, draft=draft)
    request = asked(tuple(range(30)), 40, SamplingParameters(temperature=0.0), "a", "strict")
    answer = decode(engine, request, "draft_model", lambda: 4)
    assert engine.strict_rows.max_shift == 0.0
    assert answer.close_calls == 0 < answer.accepted


def test_a_warm_up_leaves_the_measure_to_the_first_request() -> None:
    target, draft = models("qwen3", False)
    parts = build(target, draft=draft)
    engine = Engine(parts.runner, parts.drafters, parts.limits, PrefixCache(0), acceptance="strict")
    costs: dict[Key, StepCost] = {}
    for _ in warm_up(engine, costs):
        pass
    assert costs
    assert engine.strict_rows.max_shift is None


def widths_of(engine: Engine) -> list[int]:
    """Return a list that gets the width of each of the target's forwards."""
    widths: list[int] = []
    forward = engine.runner.forward

    def counted(names: Sequence[str], tokens: mx.array, fed: Sequence[int], **options: Any) -> Any:
        widths.append(max(fed))
        return forward(names, tokens, fed, **options)

    engine.runner.forward = counted  # type: ignore[assignment,method-assign]
    return widths


def test_the_shift_is_measured_in_slices_before_the_first_request_gets_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    target, draft = models("mamba2", False)
    at_once, engine = build(target, draft=draft), build(target, draft=draft)
    request = asked(tuple(range(30)), 9, SamplingParameters(), "a", "strict")
    at_once.admit(request)
    widths = widths_of(engine)
    while not engine.fetch(request):
        assert len(widths) <= 2, "the sample's prompt, and the first forward after it"
        widths.clear()
    assert engine.strict_rows.max_shift == at_once.strict_rows.max_shift
    assert not engine.runner.rows
    engine.admit(request)
    assert set(engine.runner.rows) == {"a"}


def test_a_request_that_goes_while_the_shift_is_measured_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    target, _ = models("qwen3", False)
    engine = build(target)
    assert not engine.fetch(asked((1, 2, 3), 9, SamplingParameters(), "a", "strict"))
    assert engine.runner.rows
    engine.release("a", ())
    assert not engine.runner.rows
    engine.admit(asked((1, 2, 3), 9, SamplingParameters(), "b", "coupled"))
    assert engine.fetch(asked((1, 2, 3), 9, SamplingParameters(), "c", "strict")), "it will not be alone"


def test_a_measurement_that_fails_fails_its_request_and_the_next_one_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = models("qwen3", False)
    engine, request = build(target), asked((1, 2, 3), 9, SamplingParameters(), "a", "strict")

    def exhausted(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[metal::malloc] no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", exhausted)
        assert engine.fetch(request), "its admission reports the error"
        with pytest.raises(RuntimeError):
            engine.admit(request)
    engine.release("a", ())
    engine.admit(request)
    assert engine.strict_rows.max_shift == 0.0


@pytest.mark.parametrize("family", ["qwen3", "mamba2"])
def test_a_row_is_read_again_in_slices_while_another_goes_on(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    engine = vague_engine(family)
    prompt, sampling = tuple(range(9)), SamplingParameters(temperature=0.0)
    plain = decode(engine, asked(prompt, 60, sampling, "plain", "coupled"), "draft_model", lambda: 0)
    widths = widths_of(engine)
    texts, computed = {"first": list(prompt)}, {"first": 0, "second": 0}
    engine.admit(asked(prompt, 60, sampling, "first", "strict"))
    slices_alone = slices_beside = read_again = 0
    while len(texts["first"]) < 60:
        rows = [DecodeRow(name, text, 9, computed[name], 99, "draft_model", 4) for name, text in texts.items()]
        widths.clear()
        outcomes = engine.step(DecodeStep(tuple(rows))).outcomes
        assert len(widths) <= 2, "verification, and one token that is read again"
        slices_alone += not outcomes
        slices_beside += [outcome.sequence_id for outcome in outcomes] == ["second"]
        for outcome in outcomes:
            texts[outcome.sequence_id] += outcome.emitted
            computed[outcome.sequence_id] = outcome.computed
            read_again += outcome.replayed
        if "second" in texts and read_again:
            break
        if not outcomes and len(texts["first"]) > 20 and len(texts) == 1:
            texts["second"] = list(prompt)
            engine.admit(asked(prompt, 60, sampling, "second", "coupled"))
            read_again = 0
    assert slices_alone > 2
    assert slices_beside > 2, "they take turns"
    assert read_again > 0
    assert texts["first"][9:] == plain.tokens[: len(texts["first"]) - 9]


def test_a_row_that_is_released_while_it_is_read_again_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    engine = vague_engine("qwen3")
    engine.strict_rows.max_shift = 1.0
    for name in ("a", "b"):
        text, computed = [1, 2, 3], 0
        engine.admit(Request(id=name, prompt_tokens=(1, 2, 3), max_tokens=99, speculation=STRICT))
        while outcomes := engine.step(DecodeStep((DecodeRow(name, text, 3, computed, 99, "draft_model", 4),))).outcomes:
            text += outcomes[0].emitted
            computed = outcomes[0].computed
        engine.release(name, text[:computed])
        assert not engine.runner.rows


def replayed(engine: Engine, texts: dict[str, list[int]], computed: dict[str, int], tokens: int) -> int:
    """Decode rows with prompts of three tokens together until each has `tokens`; return how many were read again."""
    read_again = 0
    while any(len(text) < tokens for text in texts.values()):
        rows = [DecodeRow(name, text, 3, computed[name], 99, "draft_model", 4) for name, text in texts.items()]
        for outcome in engine.step(DecodeStep(tuple(rows))).outcomes:
            texts[outcome.sequence_id] += outcome.emitted
            computed[outcome.sequence_id] = outcome.computed
            read_again += outcome.replayed
    return read_again


def test_rows_that_run_together_are_accepted_as_coupled_ones_are() -> None:
    engine = vague_engine("qwen3")
    engine.strict_rows.max_shift = 1.0
    texts = {name: [1, 2, 3] for name in ("first", "second")}
    for name in texts:
        engine.admit(Request(id=name, prompt_tokens=(1, 2, 3), max_tokens=99, speculation=STRICT))
    alone = {"first": texts["first"]}
    computed = dict.fromkeys(texts, 0)
    assert replayed(engine, alone, computed, 20) > 0
    assert replayed(engine, texts, computed, 40) == 0
    engine.release("second", ())
    assert replayed(engine, alone, computed, 80) == 0, "its cache is nobody's any more"


def test_a_row_whose_own_tokens_were_read_as_a_prompt_is_not_followed() -> None:
    engine = vague_engine("qwen3")
    engine.strict_rows.max_shift = 1.0
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.admit(Request(id="again", prompt_tokens=(1, 2, 3), max_tokens=99, speculation=STRICT))
    engine.step(PrefillStep((PrefillRow("again", text, 0, 7),)))
    assert replayed(engine, {"again": text}, {"again": 7}, 40) == 0


def test_the_first_token_is_drawn_without_drafts() -> None:
    engine = vague_engine("qwen3")
    engine.admit(Request(id="a", prompt_tokens=(1, 2, 3), max_tokens=20, speculation=STRICT))
    (outcome,) = engine.step(DecodeStep((DecodeRow("a", [1, 2, 3], 3, 0, 20, "draft_model", 4),))).outcomes
    assert (len(outcome.emitted), outcome.drafted) == (1, 0)


def test_a_token_that_is_not_doubtful_is_drawn_however_the_logits_move() -> None:
    chance, tolerance = random.Random(0), 0.02
    clear = flipped = 0
    for index in range(150):
        row = SampledRow(random_sampling(chance), (), 0)
        logits = 2 * mx.random.normal((1, 12, 97), key=mx.random.key(index))
        drawn = draw(logits, [row])
        doubts = doubtful(logits[0], drawn[0], row, tolerance)
        for change in range(6):
            moved = mx.random.uniform(-tolerance, tolerance, logits.shape, key=mx.random.key(1000 * index + change))
            same = draw(logits + moved, [row]) == drawn
            assert bool(mx.all(same[0] | doubts)), (index, row.parameters)
            flipped += int(mx.sum(~same).item())
        clear += int(mx.sum(~doubts).item())
    assert clear > 900, "of 1800 most are clear"
    assert flipped > 20, "and some would be drawn otherwise"
