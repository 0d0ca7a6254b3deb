"""Draws of tokens: keyed noise, truncation, penalties per slot."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.request import SamplingParameters
from app.engine.sampling.acceptance import count_accepted
from app.engine.sampling.drawing import (
    ACCEPTANCE_SALT,
    DRAFT_SALT,
    SampledRow,
    TokenCounts,
    adjust,
    draw,
    gumbel_noise,
    noise_key,
    noise_keys,
    unit_noise,
)
from app.engine.sampling.truncation import truncate


def row(tokens: list[int] | None = None, prompt_length: int = 0, **parameters: object) -> SampledRow:
    return SampledRow(SamplingParameters(**parameters), tokens or [], prompt_length)  # type: ignore[arg-type]


def test_the_same_seed_and_position_give_the_same_noise_in_any_batch() -> None:
    alone = gumbel_noise(noise_keys([row(seed=7)], 3), 50)
    together = gumbel_noise(noise_keys([row(seed=1), row(seed=7), row(seed=2)], 3), 50)
    assert mx.array_equal(alone[0], together[1])
    assert not mx.array_equal(together[0], together[1])


def test_slot_i_has_the_noise_of_output_position_i() -> None:
    first = gumbel_noise(noise_keys([row(seed=7)], 4), 20)
    later = gumbel_noise(noise_keys([row([1, 2], seed=7)], 2), 20)
    assert mx.array_equal(first[0, 2:], later[0])


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_a_noise_key_is_two_words(seed: int, position: int) -> None:
    high, low = noise_key(seed, position)
    assert 0 <= high < 2**32
    assert 0 <= low < 2**32


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_a_salt_makes_another_stream(seed: int, position: int) -> None:
    keys = {noise_key(seed, position, salt) for salt in (0, DRAFT_SALT, ACCEPTANCE_SALT, DRAFT_SALT ^ ACCEPTANCE_SALT)}
    assert len(keys) == 4


def test_a_row_draws_from_the_stream_of_its_salt() -> None:
    plain, salted = row(seed=7), SampledRow(SamplingParameters(seed=7), [], 0, salt=DRAFT_SALT)
    assert mx.array_equal(noise_keys([salted], 5), noise_keys([plain], 5, salt=DRAFT_SALT))
    logits = mx.zeros((1, 40, 50))
    assert not mx.array_equal(draw(logits, [plain]), draw(logits, [salted]))


def test_the_noise_of_acceptance_lies_above_zero_and_reaches_at_most_one() -> None:
    keys = mx.random.randint(0, 2**31 - 1, (1000, 1000, 2), key=mx.random.key(5)).astype(mx.uint32)
    noise = unit_noise(keys)
    assert noise.shape == (1000, 1000)
    assert float(mx.min(noise)) >= 2.0**-24, "1 - u, with u a float32 below 1"
    assert float(mx.max(noise)) <= 1.0
    assert abs(float(mx.mean(noise)) - 0.5) < 0.002


def test_drawing_follows_the_distribution() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logits = mx.log(mx.array(probabilities))
    slots = 4000
    drawn = draw(mx.broadcast_to(logits, (1, slots, 4)), [row(seed=3, temperature=1.0)])
    counts = Counter(drawn[0].tolist())  # type: ignore[arg-type]
    chi_square = sum((counts[token] - slots * p) ** 2 / (slots * p) for token, p in enumerate(probabilities))
    assert chi_square < 16.3, "p > 0.001 with three degrees of freedom"


def test_temperature_zero_is_argmax_even_beside_a_sampling_row() -> None:
    logits = mx.random.normal((2, 3, 30), key=mx.random.key(1))
    drawn = draw(logits, [row(temperature=0.0), row(temperature=1.0, seed=4)])
    assert mx.array_equal(drawn[0], mx.argmax(logits[0], axis=-1))


@settings(deadline=None, max_examples=60)
@given(top_k=st.integers(0, 12), top_p=st.floats(0.05, 1.0), min_p=st.floats(0.0, 0.9), seed=st.integers(0, 999))
def test_truncation_equals_the_plain_reading_of_top_k_then_top_p_then_min_p(
    top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = mx.random.normal((1, 1, 10), key=mx.random.key(seed)) * 2
    cut = truncate(logits, [SamplingParameters(top_k=top_k, top_p=top_p, min_p=min_p)])[0, 0].tolist()
    values: list[float] = logits[0, 0].tolist()  # type: ignore[assignment]
    order = sorted(range(10), key=lambda token: -values[token])
    kept = order[: top_k or 10]
    weights = mx.softmax(mx.array([values[token] for token in kept])).tolist()
    allowed, mass = set(), 0.0
    for token, weight in zip(kept, weights, strict=True):  # type: ignore[arg-type]
        if mass < top_p - 1e-6 or not allowed:
            allowed.add(token)
        mass += weight
    floor = mx.log(mx.array(min_p)).item() if min_p else float("-inf")
    allowed = {token for token in allowed if values[token] >= values[order[0]] + floor - 1e-6}
    assert {token for token in range(10) if cut[token] > float("-inf")} ^ allowed == set() or abs(mass - top_p) < 1e-5  # type: ignore[operator, index]


def test_penalties_of_a_slot_see_the_drafts_before_it() -> None:
    logits = mx.ones((1, 3, 6))
    tokens = [5, 1]
    adjusted = adjust(logits, [row(tokens, 1, frequency_penalty=0.5)], mx.array([[2, 2]]))
    assert adjusted[0, 0].tolist() == [1.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert adjusted[0, 1].tolist() == [1.0, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert adjusted[0, 2].tolist() == [1.0, 0.5, 0.0, 1.0, 1.0, 1.0]


def test_repetition_counts_the_prompt_and_presence_does_not() -> None:
    logits = mx.array([[[2.0, -2.0, 2.0]]])
    assert adjust(logits, [row([0, 1], 2, repetition_penalty=2.0)], None)[0, 0].tolist() == [1.0, -4.0, 2.0]
    assert adjust(logits, [row([0, 1], 2, presence_penalty=1.0)], None)[0, 0].tolist() == [2.0, -2.0, 2.0]


def test_a_bias_of_minus_hundred_excludes_a_token() -> None:
    logits = mx.array([[[50.0, 1.0, 0.0]]])
    assert draw(adjust(logits, [row(logit_bias={0: -100.0})], None), [row(temperature=0.0)]).item() == 1


def test_a_bias_for_a_token_that_the_model_does_not_have_changes_nothing() -> None:
    logits = mx.array([[[1.0, 3.0, 2.0]]])
    strange = row(logit_bias={2**31 - 1: 100.0, 3: 100.0, 2: 5.0})
    assert adjust(logits, [strange], None).tolist() == [[[1.0, 3.0, 7.0]]]


def test_two_rows_keep_their_own_penalties() -> None:
    logits = mx.ones((2, 1, 3))
    adjusted = adjust(logits, [row([1], 0, presence_penalty=1.0), row([1], 0)], None)
    assert adjusted[0, 0].tolist() == [1.0, 0.0, 1.0]
    assert adjusted[1, 0].tolist() == [1.0, 1.0, 1.0]


class Read(list[int]):
    """A text that records which of its tokens are read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.read: list[int] = []

    def __getitem__(self, place: Any) -> Any:
        value = super().__getitem__(place)
        self.read += value if isinstance(place, slice) else [value]
        return value


def penalised_plainly(logits: Sequence[float], seen: Sequence[int], row: SampledRow) -> list[float]:
    """Apply the penalties, token by token, to a slot that follows the tokens of the row and then `seen`."""
    asked, tokens = row.parameters, list(row.tokens) + list(seen)
    values = []
    for token, value in enumerate(logits):
        count = tokens[row.prompt_length :].count(token)
        penalty = asked.repetition_penalty if token in tokens else 1.0
        less = asked.frequency_penalty * count + asked.presence_penalty * (count > 0)
        values.append((value / penalty if value > 0 else value * penalty) - less)
    return values


@pytest.mark.parametrize("seed", range(6))
def test_counts_that_go_from_step_to_step_penalise_as_the_whole_text_does_and_read_a_token_once(seed: int) -> None:
    chance = random.Random(seed)
    text = Read([chance.randrange(12) for _ in range(9)])
    counts, prompt_length = TokenCounts(), 6
    for _ in range(12):
        pending, slots = chance.randint(0, 1), chance.randint(1, 5)
        asked = SamplingParameters(repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.25)
        mine = SampledRow(asked, text, prompt_length, pending, counts=counts)
        fed = [chance.randrange(12) for _ in range(pending + slots + 1)]
        logits: Any = [[chance.choice([-4.0, -0.5, 0.0, 2.5, 5.0]) for _ in range(12)] for _ in range(slots)]
        adjusted: Any = adjust(mx.array([logits]), [mine], mx.array([fed]))[0].tolist()
        for slot in range(slots):  # rejected drafts are not part of the next step's text
            plainly = penalised_plainly(logits[slot], fed[: pending + slot], SampledRow(asked, [*text], prompt_length))
            assert adjusted[slot] == pytest.approx(plainly, abs=1e-5)
        text.extend(fed[: chance.randint(0, 3)])
    adjust(mx.zeros((1, 1, 12)), [SampledRow(asked, text, prompt_length, counts=counts)], None)
    assert text.read == [*text], "each token once, in order"


@pytest.mark.parametrize(
    ("drafts", "drawn", "limits", "accepted"),
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], [3], [3]),
        ([[1, 2, 3]], [[1, 9, 3, 4]], [3], [1]),
        ([[9, 2, 3]], [[1, 2, 3, 4]], [3], [0]),
        ([[1, 2, 0]], [[1, 2, 0, 4]], [2], [2]),
        ([[1, 2], [3, 0]], [[1, 2, 5], [3, 0, 6]], [2, 1], [2, 1]),
        ([[1, 2], [3, 0]], [[1, 2, 5], [3, 0, 6]], [0, 0], [0, 0]),
    ],
)
def test_the_accepted_prefix_ends_at_the_first_difference_or_padding(
    drafts: list[list[int]], drawn: list[list[int]], limits: list[int], accepted: list[int]
) -> None:
    passes = mx.array(drafts) == mx.array(drawn)[:, :-1]
    assert count_accepted(passes, limits).tolist() == accepted


def test_a_row_that_joins_with_its_prompt_does_not_count_it_as_output() -> None:
    logits = mx.ones((2, 1, 4))
    fed = mx.array([[2, 0, 0], [1, 2, 3]])
    waiting = SampledRow(SamplingParameters(presence_penalty=1.0), [0], 1, pending=1)
    joining = SampledRow(SamplingParameters(presence_penalty=1.0), [1, 2, 3], 3)
    adjusted = adjust(logits, [waiting, joining], fed)
    assert adjusted[0, 0].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert adjusted[1, 0].tolist() == [1.0, 1.0, 1.0, 1.0]
