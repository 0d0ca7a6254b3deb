"""Drafters that read hidden states: each forward equals its NumPy reference, and every schedule stays exact."""

import random
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from app.core.request import Request, SamplingParameters, SpeculationRequest
from app.core.step import DecodeRow, DecodeStep, PrefillRow, PrefillStep
from app.engine.drafters.eagle3 import Eagle3
from app.engine.runner import Runner
from app.models.drafters.config import FINAL
from tests.engine import reference_drafters as reference
from tests.engine.driving import Driver, build, naive
from tests.engine.schedules import FEATURE_METHODS, VOCABULARY, run_schedule
from tests.shares import one_in
from tests.tiny import tiny_model
from tests.tiny_drafters import (
    MASK_TOKEN,
    running,
    tiny_dflash_module,
    tiny_drafter,
    tiny_eagle3_module,
    tiny_mtp_module,
)

FAMILIES = ("qwen3", "gemma3", "qwen3_next")
TOLERANCE = 1e-4


def weights_of(module: nn.Module) -> dict[str, reference.Array]:
    return {name: np.array(value, dtype=np.float64) for name, value in tree_flatten(module.parameters())}


def extended(runner: Runner, module: nn.Module, features: mx.array, cuts: Sequence[int]) -> mx.array:
    """Extend the context piece by piece; return the module's outputs for all pieces."""
    outputs = []
    for start, stop in zip([0, *cuts], [*cuts, features.shape[1]], strict=True):
        output, forward = runner.forward(["a"], features[:, start:stop], [stop - start], call=module.extend)
        runner.commit(forward, [stop - start])
        outputs.append(output)
    return mx.concatenate(outputs, axis=1)


def test_dflash_equals_its_reference_however_the_context_grew() -> None:
    module = tiny_dflash_module("qwen3")
    runner = Runner(module)
    runner.claim("a")
    features, block = mx.random.normal((1, 20, 64)), mx.random.normal((1, 6, 32))
    extended(runner, module, module.fc(features), [5, 6, 17])
    for _ in range(2):  # a block is never committed: drafting twice gives the same
        hidden, _ = runner.forward(["a"], block, [6])
    wanted = reference.dflash(
        np.array(features[0]), np.array(block[0]), weights_of(module), heads=2, kv_heads=1, window=12
    )
    assert np.abs(np.array(hidden[0]) - wanted).max() <= TOLERANCE


def test_dflash_rows_of_different_length_equal_rows_alone() -> None:
    module = tiny_dflash_module("qwen3")
    together, alone = Runner(module), Runner(module)
    features = {"a": mx.random.normal((1, 20, 32)), "b": mx.random.normal((1, 7, 32))}
    block = mx.random.normal((2, 4, 32))
    for name, mine in features.items():
        together.claim(name)
        _, forward = together.forward([name], mine, [mine.shape[1]], call=module.extend)
        together.commit(forward, [mine.shape[1]])
    hidden, _ = together.forward(["a", "b"], block, [4, 4])
    for row, (name, mine) in enumerate(features.items()):
        alone.claim(name)
        _, forward = alone.forward([name], mine, [mine.shape[1]], call=module.extend)
        alone.commit(forward, [mine.shape[1]])
        wanted, _ = alone.forward([name], block[row : row + 1], [4])
        assert mx.abs(hidden[row] - wanted[0]).max().item() <= TOLERANCE
        alone.release(name)


def test_eagle3_equals_its_reference() -> None:
    module = tiny_eagle3_module("qwen3")
    runner = Runner(module)
    runner.claim("a")
    embedded, hidden = mx.random.normal((1, 15, 32)), module.fc(mx.random.normal((1, 15, 64)))
    output = extended(runner, module, mx.concatenate([embedded, hidden], axis=-1), [4, 9])
    states, logits = reference.eagle3(
        np.array(embedded[0]), np.array(hidden[0]), weights_of(module), heads=2, kv_heads=1
    )
    assert np.abs(np.array(output[0]) - states).max() <= TOLERANCE
    model = tiny_model("qwen3")
    wide = np.array(module.logits(output, running(Eagle3, module, model, "qwen3")._target)[0])
    assert np.abs(wide[:, 0:80:2] - logits).max() <= 1e-3
    assert np.isneginf(wide[:, 1:80:2]).all()


def test_the_mtp_head_equals_its_reference() -> None:
    module = tiny_mtp_module()
    runner = Runner(module)
    runner.claim("a")
    embedded, hidden = mx.random.normal((1, 15, 32)), mx.random.normal((1, 15, 32))
    output = extended(runner, module, mx.concatenate([embedded, hidden], axis=-1), [1, 9])
    wanted = reference.mtp(
        np.array(embedded[0]), np.array(hidden[0]), weights_of(module), heads=2, kv_heads=1, rotary=8
    )
    assert np.abs(np.array(output[0]) - wanted).max() <= TOLERANCE


@pytest.mark.parametrize(("family", "method", "rows"), one_in(3, FAMILIES, FEATURE_METHODS, [1, 3, 8]))
def test_random_schedules_say_what_the_naive_loop_says(family: str, method: str, rows: int) -> None:
    schedules = 4 // rows + 1
    outcomes = [run_schedule(family, seed, methods=(method,), sequences=rows, longest=14) for seed in range(schedules)]
    assert sum(outcome.accepted for outcome in outcomes) > 0


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_a_prefix_hit_gives_the_drafter_its_context_back(method: str) -> None:
    model = tiny_model("qwen3")
    engine = build(model, features={method: tiny_drafter(method, "qwen3", model)}, prefix_bytes=1 << 30)
    sampling = SamplingParameters(temperature=0.0)
    driver = Driver(engine, random.Random(1), (method,))
    driver.admit(Request(id="a", prompt_tokens=tuple(range(40)), max_tokens=8, sampling=sampling))
    while driver.live:
        driver.step()
    longer = (*range(40), *driver.finished["a"].output[:-1], 5, 6, 7)
    driver.admit(Request(id="b", prompt_tokens=longer, max_tokens=8, sampling=sampling))
    runner = engine.drafters.available[method].runner
    assert runner is not None
    assert runner.length("b") >= 38
    while driver.live:
        driver.step()
    assert driver.finished["b"].output == naive(model, longer, 8, sampling)


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_a_prompt_that_the_drafter_did_not_follow_is_read_again_for_it_and_for_nobody_else(method: str) -> None:
    model, draft = tiny_model("qwen3"), tiny_model("qwen3")
    features = {method: tiny_drafter(method, "qwen3", model)}
    engine = build(model, draft=draft, features=features, prefix_bytes=1 << 30)
    prompt, sampling = tuple(range(40)), SamplingParameters(temperature=0.0)

    def cached_for(method: str) -> int:
        wish = SpeculationRequest(method=method)
        request = Request(id="r", prompt_tokens=prompt, max_tokens=8, sampling=sampling, speculation=wish)
        cached = engine.admit(request)
        if cached < 39:
            engine.step(PrefillStep((PrefillRow("r", prompt, cached, 39),)))
        engine.release("r", prompt[:39])
        return cached

    assert [cached_for("off"), cached_for("off"), cached_for("draft_model")] == [0, 39, 39]
    assert [cached_for(method), cached_for(method), cached_for("auto")] == [0, 39, 39]
    assert [cached_for("off"), cached_for(method)] == [39, 39], "what it knows is kept"


def test_a_plain_stretch_costs_no_drafter_forward_and_drafting_resumes_behind_it() -> None:
    model = tiny_model("qwen3")
    drafter = tiny_drafter("dflash", "qwen3", model)
    engine = build(model, features={"dflash": drafter})
    request = Request(id="a", prompt_tokens=(1, 2), max_tokens=400, sampling=SamplingParameters(temperature=0.0))
    engine.admit(request)
    tokens, computed = [1, 2], 0
    for _ in range(300):
        result = engine.step(DecodeStep((DecodeRow("a", tokens, 2, computed, 400),)))
        tokens.extend(result.outcomes[0].emitted)
        computed = result.outcomes[0].computed
    assert drafter.runner.caches.nbytes == 0
    engine.step(DecodeStep((DecodeRow("a", tokens, 2, computed, 99, "dflash", 4),)))  # reads the launched token
    tokens.append(naive(model, tokens, 1, request.sampling)[0])
    result = engine.step(DecodeStep((DecodeRow("a", tokens, 2, len(tokens) - 1, 99, "dflash", 4),)))
    assert result.outcomes[0].drafted == 4


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 30])
def test_a_text_is_read_ahead_by_drafters_only_where_it_is_kept(prefix_bytes: int) -> None:
    model = tiny_model("qwen3")
    drafter = tiny_drafter("dflash", "qwen3", model)
    engine = build(model, features={"dflash": drafter}, prefix_bytes=prefix_bytes)
    prompt = tuple(range(12))
    engine.admit(Request(id="a", prompt_tokens=prompt, max_tokens=1))
    engine.step(PrefillStep((PrefillRow("a", prompt, 0, 11),)))
    assert bool(drafter.runner.caches.nbytes) == bool(prefix_bytes)


def test_the_mask_token_is_what_a_block_is_filled_with() -> None:
    model = tiny_model("qwen3")
    drafter = tiny_drafter("dflash", "qwen3", model)
    assert drafter.runner.model.config.mask_token_id == MASK_TOKEN
    assert drafter.longest == 5
    assert tiny_drafter("mtp", "qwen3_next", model).taps == (FINAL,)
    assert VOCABULARY > MASK_TOKEN
