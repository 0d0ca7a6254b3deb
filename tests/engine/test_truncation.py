"""Top-k, top-p and min-p keep, and draws take, the same tokens as with a sorted vocabulary."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from app.core.request import SamplingParameters
from app.engine.sampling.drawing import SampledRow, draw, gumbel_noise, noise_keys
from app.engine.sampling.truncation import best_of, truncate

ROUNDING, ROUNDING_OF_A_TOKEN = 1e-5, 2.0**-26
"""Error of a share of the mass: minimum, and per token (half an ulp in each of two float32 sums, divided by the four
lanes of the narrowest SIMD). A token this close to top-p may be kept or cut."""
SHAPES = ("peaked", "flat", "all equal", "half precision", "few values", "mostly forbidden")


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the branch of a CPU, which checks candidates, or of a GPU, which sorts the vocabulary."""
    monkeypatch.setattr("app.engine.sampling.truncation.on_cpu", lambda: request.param)


def logits_of(kind: str, chance: np.random.Generator, vocabulary: int) -> NDArray[np.float32]:
    values = chance.normal(size=vocabulary)
    if kind == "peaked":
        values *= 6
    elif kind == "flat":
        values *= 0.02
    elif kind == "all equal":
        values[:] = 1.5
    elif kind == "half precision":
        values = np.round(values * 8) / 8
    elif kind == "few values":
        values = chance.integers(-2, 2, size=vocabulary).astype(float)
    else:
        values[chance.random(vocabulary) < 0.9] = -np.inf
        values[chance.integers(vocabulary)] = 1.0
    return values.astype(np.float32)


def sorted_out(logits: NDArray[np.float32], parameters: SamplingParameters, slack: float) -> NDArray[np.bool_]:
    """Return which tokens to keep, from a plain sort in float64; `slack` is added to top-p."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    ordered = logits[order].astype(np.float64)
    if 0 < parameters.top_k < len(logits):
        ordered[parameters.top_k :] = -np.inf
    weights = np.exp(ordered - ordered[0])
    before = (np.cumsum(weights) - weights) / weights.sum()
    stays = (ordered > -np.inf) & ((before < parameters.top_p + slack) if parameters.top_p < 1 else True)
    stays[0] = True
    kept = np.zeros(len(logits), dtype=bool)
    kept[order[stays]] = True
    if parameters.min_p > 0:
        kept &= logits >= np.float32(ordered[0]) + np.log(np.float32(parameters.min_p))
    return kept


def random_parameters(chance: np.random.Generator, vocabulary: int) -> SamplingParameters:
    return SamplingParameters(
        seed=int(chance.integers(1 << 40)),
        temperature=1.0,
        top_k=int(chance.choice([0, 0, 1, 5, 40, vocabulary // 2, vocabulary, 2 * vocabulary])),
        top_p=float(chance.choice([1.0, 0.999, 0.95, 0.9, 0.5, 0.1, 0.02, 0.003, 1e-310])),
        min_p=float(chance.choice([0.0, 0.0, 0.05, 0.9])),
    )


def compare(seed: int, vocabularies: tuple[int, ...]) -> int:
    """Check a batch with one row per shape, each with its own rules; return the number of tokens drawn."""
    chance = np.random.default_rng(seed)
    vocabulary, slots = int(chance.choice(vocabularies)), int(chance.integers(1, 4))
    values = np.stack([[logits_of(kind, chance, vocabulary) for _ in range(slots)] for kind in SHAPES])
    parameters = [random_parameters(chance, vocabulary) for _ in SHAPES]
    rows = [SampledRow(sampling, [1] * index, 0) for index, sampling in enumerate(parameters)]
    rounding = max(ROUNDING, vocabulary * ROUNDING_OF_A_TOKEN)
    cut = np.array(truncate(mx.array(values), parameters))
    noise = np.array(gumbel_noise(noise_keys(rows, slots), vocabulary))
    drawn: Any = draw(mx.array(values), rows).tolist()
    for row, wish in enumerate(parameters):
        for slot in range(slots):
            logits, place = values[row, slot], (seed, SHAPES[row], wish)
            fewest, most = (sorted_out(logits, wish, slack) for slack in (-rounding, rounding))
            kept = np.isfinite(cut[row, slot])
            assert not (fewest & ~kept).any(), place
            assert not (kept & ~most).any(), place
            perturbed = logits + noise[row, slot]
            wanted = {int(np.argmax(np.where(mask, perturbed, -np.inf))) for mask in (fewest, most, kept)}
            assert drawn[row][slot] in wanted, place
            if (fewest == most).all():
                assert len(wanted) == 1
    return len(SHAPES) * slots


def test_batches_of_any_shape_and_rule_keep_and_draw_what_sorting_does() -> None:
    assert sum(compare(seed, (7, 64, 97, 1000)) for seed in range(60)) > 500


def test_a_large_vocabulary_keeps_and_draws_what_sorting_does() -> None:
    assert compare(3, (151_936,)) >= len(SHAPES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousands_of_batches_keep_and_draw_what_sorting_does() -> None:
    assert sum(compare(seed, (2, 7, 64, 97, 1000, 5000)) for seed in range(1000, 3000)) > 20_000


def test_the_best_tokens_are_told_in_order_the_lower_id_first() -> None:
    values = mx.array(np.random.default_rng(2).integers(0, 9, (3, 2, 500)).astype(np.float32))
    for count in (1, 5, 64, 500):
        expected = np.argsort(-np.array(values), axis=-1, kind="stable")[..., :count]
        assert np.array_equal(np.array(best_of(values, count)), expected)


def test_a_row_draws_the_same_beside_rows_with_other_rules() -> None:
    logits = mx.random.normal((4, 2, 300), key=mx.random.key(4))
    rules: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 4}, {"temperature": 0.0}, {"top_p": 0.01}]
    rows = [SampledRow(SamplingParameters(seed=7, **rule), [], 0) for rule in rules]
    together = draw(logits, rows)
    for index, row in enumerate(rows):
        assert mx.array_equal(draw(logits[index : index + 1], [row])[0], together[index])
