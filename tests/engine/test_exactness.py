"""Speculation on ≡ off, token for token, for every cache family, drafter, batch and sampling."""

import random
from typing import Any

import mlx.core as mx
import pytest

from app.core.request import Request, SamplingParameters
from app.core.step import DecodeRow, DecodeStep, PrefillRow, PrefillStep
from tests.engine.driving import Driver, Scripted, build, naive
from tests.engine.schedules import FEATURE_METHODS, SCRIPTS, VOCABULARY, models, random_request, run_schedule
from tests.shares import LANDING, one_in
from tests.tiny import FAMILIES, related_draft, tiny_model


@pytest.mark.parametrize(("family", "method"), one_in(3, FAMILIES, ["draft_model", "ngram", "scripted"]))
def test_random_schedules_say_what_the_naive_loop_says(family: str, method: str) -> None:
    outcomes = [run_schedule(family, seed, methods=(method,)) for seed in range(4)]
    assert sum(outcome.output_tokens for outcome in outcomes) > 0


@pytest.mark.parametrize(
    ("method", "family", "rows", "temperature"),
    one_in(6, ["draft_model", "ngram", *FEATURE_METHODS], ["qwen3", "gemma3", "qwen3_next"], [1, 3, 8], [0.0, 0.8]),
)
def test_as_many_rows_at_once_say_what_each_says_alone(method: str, family: str, rows: int, temperature: float) -> None:
    sampling: dict[str, Any] = {"temperature": temperature}
    if method == "ngram":
        sampling["logit_bias"] = {3: 20.0, 5: 20.0, 7: 20.0}  # makes texts repeat
    outcomes = [
        run_schedule(
            family,
            seed,
            methods=(method,),
            sequences=rows + 6,
            rows=rows,
            sampling=sampling,
            longest=32,
            cancel_rate=0.0,
        )
        for seed in (51, 52)
    ]
    assert max(outcome.widest for outcome in outcomes) >= rows
    assert sum(outcome.accepted for outcome in outcomes) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_drafters_may_be_mixed_within_one_batch(family: str) -> None:
    outcomes = [run_schedule(family, seed, sequences=3) for seed in (11, 12, 13)]
    assert sum(outcome.accepted for outcome in outcomes) > 0


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "mamba2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_recurrent_models_without_a_recording_carry_accepted_tokens_over(family: str, script: str) -> None:
    run_schedule(family, 21, methods=("scripted",), script=script, carry_over=True)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next"])
def test_scripted_acceptance_is_exact(family: str, script: str) -> None:
    outcome = run_schedule(family, 31, methods=("scripted",), script=script, sequences=2, cancel_rate=0.0)
    assert (outcome.accepted == 0) == (script == "always wrong")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_quantised_weights_are_exact_too(family: str) -> None:
    for seed in (41, 42):
        run_schedule(family, seed, quantised=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_hit_gives_the_same_tokens_as_a_miss(family: str) -> None:
    target, draft = models(family, False)
    engine = build(target, draft=draft, prefix_bytes=1 << 30)
    sampling = SamplingParameters(temperature=0.8, seed=5)
    first = Request(id="a", prompt_tokens=tuple(range(20)), max_tokens=12, sampling=sampling)
    chance = random.Random(3)
    driver = Driver(engine, chance, ("draft_model",))
    driver.admit(first)
    while driver.live:
        driver.step()
    longer = (*first.prompt_tokens, *driver.finished["a"].output[:-1], 5, 6, 7)
    second = Request(id="b", prompt_tokens=longer, max_tokens=12, sampling=sampling)
    driver.admit(second)
    assert driver.live["b"].computed >= 19, "the prompt at least is found again"
    while driver.live:
        driver.step()
    assert driver.finished["b"].output == naive(target, longer, 12, sampling)
    assert engine.prefix_cache_bytes > 0
    engine.drop_prefix_cache()
    assert engine.prefix_cache_bytes == 0


def test_a_sliding_window_stays_exact_long_after_it_wrapped() -> None:
    target, draft = models("gemma3", False)
    engine = build(target, draft=draft, margin_tokens=8, chunk_tokens=4)
    chance = random.Random(1)
    driver = Driver(engine, chance, ("draft_model", "ngram"), chunk_tokens=4)
    sampling = SamplingParameters(temperature=0.0)
    prompts = {name: tuple((7 * index + len(name)) % VOCABULARY for index in range(30)) for name in ("a", "bb")}
    for name, prompt in prompts.items():
        driver.admit(Request(id=name, prompt_tokens=prompt, max_tokens=70, sampling=sampling))
    while driver.live:
        driver.step()
    for name, prompt in prompts.items():
        assert driver.finished[name].output == naive(target, prompt, 70, sampling)


def test_a_draft_equal_to_the_target_is_always_accepted_even_when_sampling() -> None:
    target = tiny_model("qwen3")
    engine = build(target, draft=related_draft("qwen3", noise=0.0))
    driver = Driver(engine, random.Random(2), ("draft_model",))
    sampling = SamplingParameters(temperature=1.0, seed=9, top_p=0.95)
    driver.admit(Request(id="a", prompt_tokens=(1, 2, 3), max_tokens=40, sampling=sampling))
    while driver.live:
        driver.step()
    sequence = driver.finished["a"]
    assert sequence.accepted > 10
    assert sequence.output == naive(target, (1, 2, 3), 40, sampling)


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    target, _ = models("qwen3", False)
    sampling = SamplingParameters(temperature=0.0, top_logprobs=3)
    prompt = (4, 8, 15, 16, 23)
    truth = naive(target, prompt, 6, sampling)
    engine = build(target, scripted=Scripted({"a": truth}, VOCABULARY, SCRIPTS["ragged"]))
    engine.admit(Request(id="a", prompt_tokens=prompt, max_tokens=6, sampling=sampling))
    engine.step(PrefillStep((PrefillRow("a", prompt, 0, 4),)))
    row = DecodeRow("a", prompt, 5, 4, 6, method="scripted", num_draft_tokens=4)
    outcome = engine.step(DecodeStep((row,))).outcomes[0]
    whole = [*prompt, *outcome.emitted]
    logits = target(mx.array([whole]))[0].astype(mx.float32)
    normalised = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for place, (token, score) in enumerate(zip(outcome.emitted, outcome.logprobs, strict=True)):
        expected = normalised[len(prompt) - 1 + place]
        assert score.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        assert score.top[0][1] == pytest.approx(float(mx.max(expected)), abs=1e-4)
        assert [value for _, value in score.top] == sorted((value for _, value in score.top), reverse=True)


def test_the_target_tells_how_sure_it_was_of_every_token_drafted_or_not() -> None:
    target, _ = models("qwen3", False)
    wishes = {"a": SamplingParameters(temperature=0.0, presence_penalty=2.0), "b": SamplingParameters(top_logprobs=1)}
    prompt = (4, 8, 15, 16, 23)
    truth = {name: naive(target, prompt, 24, wish) for name, wish in wishes.items()}
    engine = build(target, scripted=Scripted(truth, VOCABULARY, SCRIPTS["ragged"]))
    known, computed = {name: [*prompt] for name in wishes}, dict.fromkeys(wishes, 4)
    confidences: dict[str, list[float]] = {name: [] for name in wishes}
    for name, wish in wishes.items():
        engine.admit(Request(id=name, prompt_tokens=prompt, max_tokens=24, sampling=wish))
        engine.step(PrefillStep((PrefillRow(name, prompt, 0, 4),)))
    for drafts in (0, 0, 3, 3, 3, 3):
        rows = [
            DecodeRow(name, known[name], 5, computed[name], 24, "scripted" if drafts else "off", drafts)
            for name in known
        ]
        for outcome in engine.step(DecodeStep(tuple(rows))).outcomes:
            known[outcome.sequence_id] += outcome.emitted
            computed[outcome.sequence_id] = outcome.computed
            confidences[outcome.sequence_id] += outcome.confidences
    for name, tokens in known.items():
        chances = mx.softmax(target(mx.array([tokens]))[0].astype(mx.float32), axis=-1)
        expected = [float(chances[len(prompt) - 1 + place, token]) for place, token in enumerate(tokens[len(prompt) :])]
        assert len(expected) > 6, "some drafts were accepted"
        assert confidences[name] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=LANDING)])
def test_random_cancels_leave_nothing_behind(count: int) -> None:
    target, draft = models("qwen3_next", False)
    engine = build(target, draft=draft)
    chance = random.Random(7)
    driver = Driver(engine, chance, ("draft_model", "ngram"))
    cancelled = 0
    while cancelled < count:
        if len(driver.live) < 4 and chance.random() < 0.7:
            driver.admit(random_request(chance, f"c{len(driver.live)}-{cancelled}-{chance.random()}", longest=12))
        if driver.live and chance.random() < 0.4:
            driver.step()
        if driver.live and chance.random() < 0.6:
            driver.leave(chance.choice(list(driver.live)))
            cancelled += 1
    for name in list(driver.live):
        driver.leave(name)
    assert engine.cache_bytes == 0
    assert not engine.runner.caches.table.slots
