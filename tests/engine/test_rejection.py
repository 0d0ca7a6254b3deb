"""Rejection sampling: emitted tokens follow the target's distribution, and drafts are accepted as often as possible.

Every row of a batch is one experiment with a seed of its own. Target and draft are tables: the distribution of a token
given the one before it. Two tokens are emitted in one cycle, or in two if the first draft was rejected. Then the second
position is drafted again with the same noise, which must be independent of what was rejected.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from app.core.request import Request, SamplingParameters
from app.core.step import DecodeRow
from app.engine.drafters.draft_model import draw_after
from app.engine.drafters.drafter import Drafter, Proposal
from app.engine.drafters.forced_prefix import merge, prepend_forced
from app.engine.engine import Engine
from app.engine.prefix.cache import PrefixCache
from app.engine.sampling import acceptance
from app.engine.sampling.acceptance import accept
from app.engine.sampling.drawing import DRAFT_SALT, SampledRow
from tests.engine.chi_square import Floats, distribution, fits
from tests.engine.driving import Driver, build, naive
from tests.engine.schedules import models
from tests.shares import LANDING

MANY, FEWER = 100_000, 20_000
SIZE = 10
START = 0
"""Token id before the first emitted token."""


@dataclass(frozen=True)
class Pair:
    """Tables of target and draft, [previous token, next token], and the sampling parameters of both."""

    target: Floats
    draft: Floats
    parameters: SamplingParameters = field(default_factory=SamplingParameters)

    def exact(self, table: Floats) -> Floats:
        return np.stack([distribution(row.tolist(), self.parameters) for row in table])


def tables(seed: int, sharpness: float) -> tuple[Floats, Floats]:
    """Return a random table for the target, and a noisy copy for the draft."""
    chance = np.random.default_rng(seed)
    target = chance.normal(size=(SIZE, SIZE)) * sharpness
    draft = target + chance.normal(size=(SIZE, SIZE)) * 0.8
    return np.exp(target) / np.exp(target).sum(-1, keepdims=True), np.exp(draft) / np.exp(draft).sum(-1, keepdims=True)


def without(table: Floats, *tokens: int) -> Floats:
    cut = table.copy()
    cut[:, tokens] = 0
    result: Floats = cut / cut.sum(-1, keepdims=True)
    return result


def pairs() -> dict[str, Pair]:
    near, far = tables(1, 1.0), tables(2, 2.0)
    return {
        "near": Pair(*near),
        "far apart": Pair(far[0], near[1]),
        "the same": Pair(near[0], near[0]),
        "draft with zeros": Pair(near[0], without(near[1], 0, 3, 9)),
        "target with zeros": Pair(without(near[0], 1, 4), near[1]),
        "zeros on both sides": Pair(without(near[0], 1, 4), without(near[1], 4, 8)),
        "disjoint": Pair(without(near[0], 0, 1, 2, 3, 4), without(near[1], 5, 6, 7, 8, 9)),
        "temperature": Pair(*far, SamplingParameters(temperature=0.6)),
        "top-k": Pair(*near, SamplingParameters(top_k=4)),
        "top-p": Pair(*near, SamplingParameters(temperature=1.3, top_p=0.7)),
        "min-p": Pair(*near, SamplingParameters(min_p=0.2)),
        "everything": Pair(*near, SamplingParameters(temperature=0.8, top_k=6, top_p=0.9, min_p=0.1)),
    }


def logits_after(table: Floats, before: mx.array) -> mx.array:
    """Return logits float32 [rows, 1, SIZE] after the tokens `before`."""
    return mx.log(mx.array(table.astype(np.float32)))[before][:, None]


def cycle(pair: Pair, before: mx.array, position: int, width: int) -> tuple[mx.array, mx.array]:
    """Run one cycle of all rows with `width` drafts from output position `position`; return drawn and accepted."""
    count = before.shape[0]
    rows = [SampledRow(msgspec.structs.replace(pair.parameters, seed=seed), [0] * position, 0) for seed in range(count)]
    salted = [SampledRow(row.parameters, row.tokens, 0, salt=DRAFT_SALT) for row in rows]
    fed, drafts, drawn_from = [before], [], []
    for _ in range(width):
        draft, draft_logits = draw_after(drafts, logits_after(pair.draft, fed[-1]), salted, SIZE)
        drafts.append(draft)
        drawn_from.append(draft_logits)
        fed.append(draft[:, 0])
    guesses, draft_logits = mx.concatenate(drafts, axis=1), mx.concatenate(drawn_from, axis=1)
    logits = mx.concatenate([logits_after(pair.target, token) for token in fed], axis=1)
    drawn, accepted = accept(guesses, logits, rows, [width] * count, draft_logits=draft_logits)
    mx.eval(drawn, accepted)
    return drawn, accepted


def two_tokens(pair: Pair, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], float]:
    """Return the first and second token of every row, and the acceptance rate of the first draft."""
    before = mx.full((count,), START, dtype=mx.int32)
    drawn, accepted = cycle(pair, before, 0, 2)
    again, _ = cycle(pair, drawn[:, 0], 1, 1)
    second = mx.where(accepted > 0, drawn[:, 1], again[:, 0])
    return np.array(drawn[:, 0]), np.array(second), float(mx.mean((accepted > 0).astype(mx.float32)))


def follows(pair: Pair, first: NDArray[np.int64], second: NDArray[np.int64]) -> tuple[bool, bool]:
    """Return whether the first tokens fit the target, and whether the pairs of both tokens do."""
    table = pair.exact(pair.target)
    counts = np.zeros((SIZE, SIZE), dtype=np.int64)
    np.add.at(counts, (first, second), 1)
    joint = table[START][:, None] * table
    return fits(counts.sum(axis=1), table[START]), fits(counts.ravel(), joint.ravel())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, FEWER, marks=() if place % 2 == 0 else LANDING) for place, name in enumerate(pairs())),
        *(pytest.param(name, MANY, marks=pytest.mark.soak) for name in ("near", "zeros on both sides", "everything")),
    ],
)
def test_emitted_tokens_follow_the_target_and_drafts_stay_as_often_as_possible(name: str, count: int) -> None:
    pair = pairs()[name]
    first, second, rate = two_tokens(pair, count)
    assert follows(pair, first, second) == (True, True)
    optimum = float(np.minimum(pair.exact(pair.target)[START], pair.exact(pair.draft)[START]).sum())
    assert rate == pytest.approx(optimum, abs=2 / count**0.5), "sum of min(p, q); four standard deviations"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda target, _: target,
        lambda target, draft: mx.where(draft > 0, mx.abs(target - draft), target),
        lambda target, draft: mx.maximum(target - 0.5 * draft, 0.0),
    ],
    ids=["p instead of p - q", "absolute difference", "half of q"],
)
def test_the_same_test_fails_when_the_residual_is_wrong(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[mx.array, mx.array], mx.array]
) -> None:
    monkeypatch.setattr(acceptance, "residual", wrong)
    pair = pairs()["near"]
    first, second, _ = two_tokens(pair, FEWER)
    assert follows(pair, first, second) == (False, False)


def test_the_same_test_fails_when_drafts_share_the_noise_of_the_target() -> None:
    pair = pairs()["near"]
    rows = [SampledRow(SamplingParameters(seed=seed), [], 0) for seed in range(FEWER)]
    before = mx.full((FEWER,), START, dtype=mx.int32)
    drafts, draft_logits = draw_after((), logits_after(pair.draft, before), rows, SIZE)
    logits = mx.broadcast_to(logits_after(pair.target, before), (FEWER, 2, SIZE))
    drawn, _ = accept(drafts, logits, rows, [1] * FEWER, draft_logits=draft_logits)
    counts = np.bincount(np.array(drawn[:, 0]), minlength=SIZE)
    assert not fits(counts, pair.exact(pair.target)[START])


def row(temperature: float, seed: int = 1) -> SampledRow:
    return SampledRow(SamplingParameters(temperature=temperature, seed=seed), [], 0)


def test_a_token_that_the_target_excludes_is_never_accepted() -> None:
    logits = mx.array([[[0.0, -mx.inf, 0.0]] * 2])
    certain = mx.array([[[-mx.inf, 0.0, -mx.inf]]])
    for seed in range(200):
        drawn, accepted = accept(mx.array([[1]]), logits, [row(1.0, seed)], [1], draft_logits=certain)
        assert accepted.item() == 0
        assert drawn[0, 0].item() != 1


def test_padding_is_rejected_and_a_row_without_drafts_draws_plainly() -> None:
    rows = [row(1.0, 4), row(1.0, 5)]
    logits = mx.random.normal((2, 3, 12), key=mx.random.key(2))
    drafts = mx.array([[3, 3], [0, 0]], dtype=mx.int32)
    same = logits[:, :2]
    drawn, accepted = accept(drafts, logits, rows, [1, 0], draft_logits=same)
    assert accepted.tolist() == [1, 0], "p = q is always accepted, but only where there is a draft"
    plain, _ = accept(drafts, logits, rows, [0, 0])
    assert drawn[0, 1].item() == plain[0, 1].item(), "the bonus has the target's own noise at its position"
    assert drawn[1, 0].item() == plain[1, 0].item()


def test_a_greedy_row_beside_a_sampling_one_keeps_the_rule_of_equality() -> None:
    logits = mx.random.normal((2, 3, 12), key=mx.random.key(3))
    greedy = mx.argmax(logits, axis=-1)
    drafts = mx.stack([greedy[0, :2], greedy[1, :2]]).astype(mx.int32)
    drafts[0, 1] = (drafts[0, 1] + 1) % 12
    drawn, accepted = accept(drafts, logits, [row(0.0), row(1.0)], [2, 2], draft_logits=logits[:, :2])
    assert accepted.tolist() == [1, 2]
    assert mx.array_equal(drawn[0], greedy[0])


def test_a_draft_with_fewer_tokens_than_the_target_is_padded() -> None:
    logits = mx.random.normal((1, 2, 12), key=mx.random.key(4))
    _, accepted = accept(mx.array([[2]]), logits, [row(1.0)], [1], draft_logits=mx.array([[[-9.0, -9.0, 9.0]]]))
    assert accepted.tolist() in ([0], [1])


@pytest.mark.parametrize("kind", [mx.float32, mx.bfloat16])
def test_what_a_smaller_draft_does_not_know_is_never_drafted(kind: mx.Dtype) -> None:
    draft, draft_logits = draw_after((), mx.array([[[-9.0, -9.0, 9.0]]], dtype=kind), [row(1.0)], 12)
    assert draft.tolist() == [[2]]
    assert draft_logits.dtype == mx.float32
    assert draft_logits.tolist() == [[[-9.0, -9.0, 9.0, *[-float("inf")] * 9]]]


def test_a_draft_with_more_tokens_than_the_target_is_cut_and_shares_its_noise() -> None:
    wide = mx.random.normal((1, 1, 20), key=mx.random.key(8))
    draft, draft_logits = draw_after((), wide, [row(1.0)], 12)
    assert mx.array_equal(draft_logits, wide[..., :12])
    assert mx.array_equal(draft, draw_after((), wide[..., :12], [row(1.0)], 12)[0])


def test_a_bias_for_a_token_that_only_the_target_knows_does_not_touch_the_draft() -> None:
    biased = SampledRow(SamplingParameters(temperature=0.0, logit_bias={11: 100.0}), [1, 11], 1)
    draft, _ = draw_after((), mx.array([[[0.0, 3.0, 1.0]]]), [biased], 12)
    assert draft.tolist() == [[1]]


def test_without_draft_probabilities_the_rule_is_the_coupled_one() -> None:
    logits = mx.random.normal((1, 3, 12), key=mx.random.key(5))
    drawn, accepted = accept(mx.zeros((1, 2), dtype=mx.int32), logits, [row(1.0)], [2])
    drafts = drawn[:, :2]
    again, all_of_them = accept(drafts, logits, [row(1.0)], [2])
    assert mx.array_equal(drawn, again)
    assert all_of_them.tolist() == [2]
    assert accepted.tolist()[0] <= 2  # type: ignore[index, operator]


def answer(sampling: SamplingParameters, *, methods: tuple[str, ...], schedule: int, rows: int = 1) -> list[list[int]]:
    """Return the answers of an engine with rejection sampling to the first `rows` prompts."""
    target, draft = models("qwen3", False)
    parts = build(target, draft=draft)
    engine = Engine(parts.runner, parts.drafters, parts.limits, PrefixCache(0), acceptance="rejection")
    driver = Driver(engine, random.Random(schedule), methods)
    for index in range(rows):
        driver.admit(Request(id=str(index), prompt_tokens=PROMPTS[index], max_tokens=24, sampling=sampling))
    while driver.live:
        driver.step()
    return [driver.finished[str(index)].output for index in range(rows)]


PROMPTS = ((1, 2, 3), (5, 6, 5, 6, 5, 6), (9, 8, 7, 6))


@pytest.mark.parametrize("methods", [("draft_model",), ("ngram",), ("draft_model", "ngram")])
@pytest.mark.parametrize("schedule", range(4))
def test_greedy_requests_say_what_the_naive_loop_says(methods: tuple[str, ...], schedule: int) -> None:
    greedy = SamplingParameters(temperature=0.0)
    outputs = answer(greedy, methods=methods, schedule=schedule, rows=3)
    assert outputs == [naive(models("qwen3", False)[0], prompt, 24, greedy) for prompt in PROMPTS]


@pytest.mark.parametrize("methods", [("draft_model",), ("draft_model", "ngram")])
def test_the_same_seed_and_schedule_say_the_same_again(methods: tuple[str, ...]) -> None:
    sampling = SamplingParameters(temperature=1.0, seed=77, top_p=0.95)
    first = answer(sampling, methods=methods, schedule=8, rows=3)
    assert first == answer(sampling, methods=methods, schedule=8, rows=3)
    assert all(len(tokens) == 24 for tokens in first)


def test_rows_of_several_drafters_keep_what_their_drafts_were_drawn_from() -> None:
    logits = mx.random.normal((1, 2, 12), key=mx.random.key(6))
    sampled = Proposal(mx.array([[3, 4]], dtype=mx.int32), (2,), ("",), logits)
    copied = Proposal(mx.array([[5]], dtype=mx.int32), (1,), ("",))
    whole = merge(3, [([2], sampled), ([0], copied)])
    assert whole.counts == (1, 0, 2)
    assert whole.logits is not None
    assert mx.array_equal(whole.logits[2], logits[0])
    assert mx.softmax(whole.logits[0, 0]).tolist() == [0.0] * 5 + [1.0] + [0.0] * 6, "its only choice"
    assert merge(2, [([1], copied)]).logits is None


def test_what_is_forced_stands_first_and_was_the_only_choice() -> None:
    logits = mx.random.normal((3, 2, 12), key=mx.random.key(6))
    drawn = Proposal(mx.array([[3, 4], [5, 6], [0, 0]], dtype=mx.int32), (2, 2, 0), ("", "", "full"), logits)
    whole = prepend_forced(drawn, [((7,),), (), ((8,), (9,), (10,))])
    assert whole.logits is not None
    said: Any = whole.tokens.tolist()
    assert [tokens[:count] for tokens, count in zip(said, whole.counts, strict=True)] == [[7, 4], [5, 6], [8, 9, 10]]
    assert not any(whole.reasons)
    chances = mx.softmax(whole.logits, axis=-1)
    assert mx.array_equal(whole.logits[0, 1], logits[0, 1])
    assert mx.array_equal(whole.logits[1, :2], logits[1])
    assert [chances[0, 0, 7].item(), *chances[2, mx.arange(3), mx.array([8, 9, 10])].tolist()] == [1.0] * 4
    alone = prepend_forced(Proposal.none(("full", "full")), [((7,), (8,)), ()])
    assert (alone.counts, alone.reasons[1], alone.tokens[0].tolist()) == ((2, 0), "full", [7, 8])


@pytest.mark.parametrize(
    ("own", "drafts"),
    [
        ([7, 8, 1], [7, 8, 1]),
        ([3, 8, 1], [7, 8, 1]),
        ([7, 6, 1], [7, 6, 1]),
        ([5, 2, 1], [5, 2, 1]),
        ([5], [5, 8]),
        ([3, 6], [7, 6]),
        ([], [7, 8]),
    ],
)
def test_what_is_forced_is_spelled_as_the_drafter_likes(own: list[int], drafts: list[int]) -> None:
    """7, then 8, are forced. Only 5 or 4 may replace the 7, and 6 the 8; after that the drafter is free."""
    said = Proposal(mx.array([[*own, 0, 0, 0][:3]], dtype=mx.int32), (len(own),), ("",))
    whole = prepend_forced(said, [((7, 5, 4), (8, 6))])
    tokens: Any = whole.tokens.tolist()
    assert tokens[0][: whole.counts[0]] == drafts


def test_a_forced_draft_leaves_the_distribution_of_the_target_as_it_is() -> None:
    """A forced token is nearly always the only one allowed, but not where its text can be spelled differently."""
    pair, before = pairs()["near"], mx.full((FEWER,), START, dtype=mx.int32)
    rows = [SampledRow(SamplingParameters(seed=seed), [], 0) for seed in range(FEWER)]
    salted = [SampledRow(row.parameters, row.tokens, 0, salt=DRAFT_SALT) for row in rows]
    drafts, draft_logits = draw_after((), logits_after(pair.draft, before), salted, SIZE)
    whole = prepend_forced(Proposal(drafts, (1,) * FEWER, ("",) * FEWER, draft_logits), [((4,),)] * FEWER)
    logits = mx.broadcast_to(logits_after(pair.target, before), (FEWER, 2, SIZE))
    drawn, accepted = accept(whole.tokens, logits, rows, whole.counts, draft_logits=whole.logits)
    wanted = pair.exact(pair.target)[START]
    assert fits(np.bincount(np.array(drawn[:, 0]), minlength=SIZE), wanted)
    assert float(mx.mean(accepted)) == pytest.approx(wanted[4], abs=2 / FEWER**0.5)


class Listening(Drafter):
    """Proposes nothing, and records the salts of the noise that it was asked to draw with."""

    name = "listening"

    def __init__(self) -> None:
        self.salts: set[int] = set()

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        self.salts.update(sampled_row.salt for sampled_row in sampled)
        return Proposal.none(("it listens",) * len(rows))


@pytest.mark.parametrize(("acceptance", "salts"), [("coupled", {0}), ("rejection", {DRAFT_SALT})])
def test_drafters_share_the_noise_of_the_target_only_where_that_is_the_rule(acceptance: str, salts: set[int]) -> None:
    listening = Listening()
    parts = build(models("qwen3", False)[0], features={"listening": listening})
    engine = Engine(parts.runner, parts.drafters, parts.limits, PrefixCache(0), acceptance=acceptance)
    driver = Driver(engine, random.Random(3), ("listening",))
    driver.admit(Request(id="a", prompt_tokens=(1, 2, 3), max_tokens=9, sampling=SamplingParameters(seed=1)))
    while driver.live:
        driver.step()
    assert listening.salts == salts
