"""Layer-skip pairs agree less often as ε grows, and become folders that both sides load."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn

from app.core.request import SpeculationRequest
from bench.comparison.ours import PLAIN, OurSide
from bench.comparison.pairs import (
    SPECIAL_TOKENS,
    Sizes,
    accepted_share,
    calibrate,
    greedy_text,
    make_attention_pair,
    make_copying_target,
    make_hybrid_pair,
    measure_acceptance,
    ring_of,
)
from bench.comparison.reference import generate_in_batch, generate_with_draft, load_reference, raw_cycle
from bench.comparison.workshop import Workshop
from tests.shares import LANDING

TINY = Sizes(hidden=64, layers=4, vocabulary=2048)
PROMPTS = [[40, 50, 60, 70], [41, 51, 61, 71]]


@pytest.mark.parametrize("make", [make_attention_pair, make_hybrid_pair])
def test_without_the_upper_layers_the_draft_is_the_target(make: type) -> None:
    pair = make(TINY, epsilon=0.0)
    assert measure_acceptance(pair, PROMPTS, tokens=16, drafts=2) == 1.0


def test_acceptance_falls_with_epsilon_and_is_calibrated() -> None:
    pair = make_attention_pair(TINY, epsilon=5.0)
    assert measure_acceptance(pair, PROMPTS, tokens=24) < 0.7
    reached = calibrate(pair, PROMPTS, target_acceptance=0.95, tolerance=0.05, tokens=24)
    assert reached >= 0.9
    assert pair.epsilon < 5.0


def test_special_tokens_are_never_said() -> None:
    said = greedy_text(make_attention_pair(TINY).target, PROMPTS, 16)
    assert mx.all(said >= SPECIAL_TOKENS).item()


def test_the_copying_target_walks_around_its_ring() -> None:
    ring = ring_of(64)
    said = greedy_text(make_copying_target(TINY).target, [ring[:3]], 70).tolist()
    assert said == [[ring[(3 + step) % 64] for step in range(70)]]


@pytest.mark.parametrize(
    ("agreement", "share"),
    [
        ([True] * 9, 1.0),
        ([False] * 9, 0.0),
        ([True, False, True, True, False, True, True, True, True], 5 / 6),
    ],
)
def test_the_accepted_share_counts_what_a_run_would_draft(agreement: list[bool], share: float) -> None:
    assert accepted_share(agreement, 2) == share


@pytest.mark.parametrize("bits", [0, pytest.param(4, marks=LANDING)])
def test_both_sides_load_a_pair_and_say_the_same(tmp_path: Path, bits: int) -> None:
    workshop = Workshop(tmp_path, TINY, drafts=2, bits=bits)
    folders = workshop.attention_pair()
    assert workshop.attention_pair() is folders
    assert folders.draft is not None
    prompt = workshop.prompt(0)
    ours = OurSide(folders)
    run = ours.run([prompt], 8, SpeculationRequest(method="draft_model", num_draft_tokens=2))
    assert run.tokens == 8
    assert run.notes()["acceptance"] > 0
    assert ours.run([prompt, workshop.prompt(1)], 4, PLAIN).tokens == 8
    ours.close()
    target, tokenizer = load_reference(folders.target)
    assert isinstance(target.lm_head, nn.QuantizedLinear) == bool(bits)
    draft, _ = load_reference(folders.draft)
    assert generate_in_batch(target, [prompt, workshop.prompt(1)], 4).value > 0
    assert generate_with_draft(target, tokenizer, draft, prompt, 8, 2).value > 0
    assert set(raw_cycle(target, draft, prompt, 2, 2).notes) == {"draft ms", "verify ms"}


def test_rounds_never_share_a_beginning(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, TINY, drafts=2)
    prompts = [tuple(workshop.prompt(number, row)) for number in range(-1, 4) for row in range(8)]
    assert len(set(prompts)) == len(prompts)
