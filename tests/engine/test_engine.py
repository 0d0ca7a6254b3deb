"""Life of an engine: unknown caches, failing steps, tokens launched ahead, n-gram drafts and missing drafters."""

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import ConcatenateKVCache

from app.core.reason import Reason
from app.core.request import Request, SamplingParameters, SpeculationRequest
from app.core.step import DecodeRow, DecodeStep, EngineLimits, Offer, PrefillRow, PrefillStep
from app.core.unit import LiveValues, ModelSpecification
from app.engine.caches.rollback import UnknownCacheError, make_caches
from app.engine.drafters.ngram import Ngram
from app.engine.drafters.registry import Drafters, open_drafters
from app.engine.engine import Engine
from app.engine.loaded_unit import LoadedUnit
from app.engine.prefix.cache import PrefixCache
from app.engine.probe import open_runner
from app.engine.runner import AloneRunner
from app.models.draft_lengths import DRAFT_LENGTHS
from tests.engine.driving import Driver, build, naive
from tests.engine.schedules import models
from tests.tiny import tiny_model

GREEDY = SamplingParameters(temperature=0.0)


def plain_row(name: str, tokens: list[int], prompt_length: int, computed: int, drafts: int = 0) -> DecodeRow:
    return DecodeRow(name, tokens, prompt_length, computed, 50, method="ngram", num_draft_tokens=drafts)


class WithForeignCache:
    """A model whose cache class no family covers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.model(tokens, cache=cache)

    def make_cache(self) -> list[Any]:
        return [ConcatenateKVCache() for _ in self.model.layers]


def test_an_unknown_cache_class_is_named() -> None:
    with pytest.raises(UnknownCacheError, match="ConcatenateKVCache"):
        make_caches(WithForeignCache(tiny_model("qwen3")))


class Wrapped(nn.Module):
    """Base of models that distort the logits of a sound one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model("qwen3")

    @property
    def layers(self) -> Any:
        return self.model.layers


def test_a_model_that_answers_differently_with_slot_caches_is_refused() -> None:
    calls = iter(range(100))

    class Moody(Wrapped):
        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            logits: mx.array = self.model(tokens, cache=cache)
            return logits * (1 + next(calls))

    with pytest.raises(UnknownCacheError, match="change the model's answer"):
        open_runner(Moody())


def test_a_model_whose_rows_disturb_one_another_drafts_with_each_row_by_itself() -> None:
    class Crowded(Wrapped):
        """Adds the batch's mean logits to every row: padding changes rows, as when it enters a recurrent state."""

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            logits: mx.array = self.model(tokens, cache=cache)
            return logits + mx.mean(logits, axis=(0, 1)) if tokens.shape[0] > 1 else logits

    crowded = Crowded()
    model, runner = crowded.model, open_runner(crowded)
    assert runner.rows_isolated
    assert not open_runner(model).rows_isolated
    for name in ("a", "b"):
        runner.claim(name)
    logits, forward = runner.forward(["a", "b"], mx.array([[5, 6, 7], [8, 9, 0]]), [3, 2], record=True)
    assert logits.shape == (2, 3, 97)
    assert runner.commit(forward, [2, 2]) == [2, 2]
    assert mx.allclose(logits[1, :2], model(mx.array([[8, 9]]))[0], atol=1e-5)
    again, forward = runner.forward(["a", "b"], mx.array([[7], [4]]), [1, 1])
    assert mx.allclose(again[0, 0], model(mx.array([[5, 6, 7]]))[0, 2], atol=1e-4)
    assert mx.allclose(again[1, 0], model(mx.array([[8, 9, 4]]))[0, 2], atol=1e-4)


def test_the_alone_runner_decodes_one_request_exactly() -> None:
    model = tiny_model("qwen3")
    limits = EngineLimits(max_context_tokens=100, max_rows=1)
    engine = Engine(AloneRunner(model), Drafters({}), limits, PrefixCache(0))
    driver = Driver(engine, random.Random(1), ("off",), longest_draft=0)
    driver.admit(Request(id="a", prompt_tokens=(3, 1, 4, 1, 5), max_tokens=9, sampling=GREEDY))
    held = [engine.cache_bytes]
    while driver.live:
        driver.step()
        held.append(engine.cache_bytes)
    assert driver.finished["a"].output == naive(model, (3, 1, 4, 1, 5), 9, GREEDY)
    assert engine.cache_families == ("alone",)
    assert held[0] == held[-1] == 0 < max(held)


def test_a_plan_that_disagrees_with_the_cache_is_an_error_and_frees_everything() -> None:
    engine = build(tiny_model("qwen3"))
    engine.admit(Request(id="a", prompt_tokens=(1, 2, 3), max_tokens=5, sampling=GREEDY))
    with pytest.raises(RuntimeError, match="the plan says 2"):
        engine.step(DecodeStep((plain_row("a", [1, 2, 3], 3, 2),)))
    assert engine.cache_bytes == 0
    engine.release("a", ())
    engine.admit(Request(id="b", prompt_tokens=(1, 2, 3), max_tokens=5, sampling=GREEDY))
    assert engine.step(PrefillStep((PrefillRow("b", (1, 2, 3), 0, 2),))).prefilled == (("b", 2),)


def test_a_row_that_joins_a_launched_batch_waits_one_step_and_loses_nothing() -> None:
    target, _ = models("qwen3", False)
    engine = build(target)
    prompts = {"a": [1, 2, 3], "b": [9, 8, 7, 6]}
    for name, prompt in prompts.items():
        engine.admit(Request(id=name, prompt_tokens=tuple(prompt), max_tokens=50, sampling=GREEDY))
        engine.step(PrefillStep((PrefillRow(name, prompt, 0, len(prompt) - 1),)))
    tokens = {name: list(prompt) for name, prompt in prompts.items()}

    def step(*names: str) -> set[str]:
        rows = [plain_row(name, tokens[name], len(prompts[name]), len(tokens[name]) - 1) for name in names]
        outcomes = engine.step(DecodeStep(tuple(rows))).outcomes
        for outcome in outcomes:
            tokens[outcome.sequence_id].extend(outcome.emitted)
        return {outcome.sequence_id for outcome in outcomes}

    assert step("a") == {"a"}
    assert step("a", "b") == {"a"}, "only the launched row has a token; the other one is launched with it now"
    assert step("a", "b") == {"a", "b"}
    for name, prompt in prompts.items():
        output = tokens[name][len(prompt) :]
        assert output == naive(target, prompt, len(output), GREEDY)


def test_every_step_brings_what_a_lookup_would_draft_next() -> None:
    """Prefill steps and steps of every method bring an offer, but not for a request that asks for another drafter."""
    target, draft = models("qwen3", False)
    engine = build(target, draft=draft)
    texts = {name: [5, 6, 7, 8, 5, 6] for name in ("a", "b")}
    for name, method in (("a", "auto"), ("b", "draft_model")):
        wish = SpeculationRequest(method=method)
        engine.admit(
            Request(id=name, prompt_tokens=tuple(texts[name]), max_tokens=9, sampling=GREEDY, speculation=wish)
        )
    result = engine.step(PrefillStep(tuple(PrefillRow(name, text, 0, 5) for name, text in texts.items())))
    offers = {"a": {"ngram": lookup(texts["a"])}, "b": {}}
    assert (result.offers, offers["a"]["ngram"].tokens[:4]) == (offers, (7, 8, 5, 6))
    for method, drafts in (("draft_model", 2), ("off", 0)):
        computed = {outcome.sequence_id: outcome.computed for outcome in result.outcomes} or {"a": 5, "b": 5}
        rows = [DecodeRow(name, text, 6, computed[name], 1 + drafts, method, drafts) for name, text in texts.items()]
        result = engine.step(DecodeStep(tuple(rows)))
        for outcome in result.outcomes:
            texts[outcome.sequence_id] += outcome.emitted
        assert result.offers == {"a": {"ngram": lookup(texts["a"])}, "b": {}}


def lookup(tokens: list[int]) -> Offer:
    """Return the offer of a new drafter that reads the whole text in one call."""
    drafter = Ngram()
    drafter.admit(Request(id="x", prompt_tokens=(), max_tokens=1))
    offer = drafter.offer("x", tokens, (), DRAFT_LENGTHS[-1])
    assert offer is not None
    return offer


def test_ngram_continues_the_longest_and_latest_match() -> None:
    drafter = Ngram()
    drafter.admit(Request(id="a", prompt_tokens=(), max_tokens=1))
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 7, 1, 2, 3]
    proposal = drafter.propose([plain_row("a", tokens, 3, 11, drafts=4)], [])
    assert proposal.tokens.tolist() == [[4, 9, 2, 3]], "1 2 3 matches longer than the later 2 3"
    drafter.release("a")
    drafter.admit(Request(id="a", prompt_tokens=(), max_tokens=1))
    assert drafter.propose([plain_row("a", [1, 2, 3], 3, 2, drafts=4)], []).reasons == (Reason("no_match"),)


def test_ngram_runs_on_into_its_own_drafts() -> None:
    drafter = Ngram()
    drafter.admit(Request(id="a", prompt_tokens=(), max_tokens=1))
    proposal = drafter.propose([plain_row("a", [5, 6, 5, 6], 1, 3, drafts=6)], [])
    assert proposal.tokens.tolist() == [[5, 6, 5, 6, 5, 6]]


def test_without_a_draft_model_the_registry_says_why() -> None:
    target, _ = models("qwen3", False)
    spec = ModelSpecification(id="a", path="")
    unit = LoadedUnit(spec, target, {}, weights_bytes=0, max_context_tokens=64, vocabulary_size=97)
    drafters = open_drafters(unit)
    assert list(drafters.available) == ["ngram"]
    assert "no draft model is loaded" in str(drafters.unavailable["draft_model"])
    for method in ("dflash", "mtp", "eagle3"):
        assert f"no {method} drafter is loaded" in str(drafters.unavailable[method])


@pytest.mark.parametrize("method", ["draft_model", "dflash", "mtp", "eagle3"])
def test_why_a_chosen_drafter_was_refused_is_told_by_every_method_that_needs_one(method: str) -> None:
    target, _ = models("qwen3", False)
    spec = ModelSpecification(id="a", path="", live=LiveValues(draft_unavailable="x cannot draft for a: other tokens"))
    unit = LoadedUnit(spec, target, {}, weights_bytes=0, max_context_tokens=64, vocabulary_size=97)
    assert str(open_drafters(unit).unavailable[method]) == "x cannot draft for a: other tokens"


def test_a_prefix_cache_never_exceeds_its_bytes() -> None:
    target, _ = models("qwen3", False)
    engine = build(target, prefix_bytes=60_000)
    driver = Driver(engine, random.Random(4), ("ngram",))
    for number in range(6):
        prompt = tuple((number * 31 + place) % 97 for place in range(30))
        driver.admit(Request(id=str(number), prompt_tokens=prompt, max_tokens=4, sampling=GREEDY))
        while driver.live:
            driver.step()
        assert engine.prefix_cache_bytes <= 60_000
    assert engine.prefix_cache_bytes > 0


def test_a_request_whose_row_cannot_be_claimed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model("qwen3")
    engine = build(target)
    request = Request(
        id="a",
        prompt_tokens=(3, 1, 4, 1, 5),
        max_tokens=4,
        sampling=GREEDY,
        speculation=SpeculationRequest(acceptance="strict"),
    )
    claim = engine.runner.claim

    def refuse(sequence_id: str, *given: Any, **options: Any) -> None:
        if sequence_id == "a":
            raise MemoryError
        claim(sequence_id, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "claim", refuse)
        with pytest.raises(MemoryError):
            engine.admit(request)
        engine.release("a", ())
    assert not engine.strict_rows._fresh
    driver = Driver(engine, random.Random(1), ("off",), longest_draft=0)
    driver.admit(request)
    while driver.live:
        driver.step()
    assert driver.finished["a"].output == naive(target, request.prompt_tokens, 4, GREEDY)
