"""A DFlash drafter of real size whose drafts come from a script: its cost is real, its acceptance is chosen."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.drafters.dflash import DFlash, DFlashModel
from app.engine.drafters.registry import Drafters
from app.engine.engine import Engine
from app.engine.layers import Target
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.opening import open_engine
from app.engine.runner import Runner
from app.engine.sampling.drawing import SampledRow
from app.models.drafters.formats import DFlashConfig

BLOCK_SIZE = 8
LAYERS = 2
"""Layers of the drafter: an eighth of the target's, as in published drafters (5 of 36)."""
MASK_TOKEN = 31
TAPS = (1, 7, 13)


class Script:
    """The target's recorded answer to each prompt, and the probability that a draft is right."""

    def __init__(self, acceptance: float) -> None:
        self._acceptance = acceptance
        self._texts: dict[tuple[int, ...], list[int]] = {}

    def record(self, prompt: Sequence[int], text: Sequence[int]) -> None:
        """Record the greedy text of a prompt."""
        self._texts[tuple(prompt)] = list(text)

    def drafts(self, prompt: Sequence[int], generated: int, count: int) -> list[int]:
        """Return `count` drafts after the first `generated` tokens, each wrong with the same probability."""
        text = self._texts.get(tuple(prompt), [])
        ahead = (text[generated : generated + count] + [0] * count)[:count]
        return [
            token if random.Random(f"{prompt[0]} {generated + index}").random() < self._acceptance else token ^ 1
            for index, token in enumerate(ahead)
        ]


class ScriptedDFlash(DFlash):
    """Runs the whole draft forward but proposes the script's drafts."""

    def __init__(self, runner: Runner, target: Target, script: Script) -> None:
        super().__init__(runner, target)
        self._script = script

    def _draft(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow], width: int) -> tuple[mx.array, mx.array]:
        drawn, logits = super()._draft(rows, sampled, width)
        scripted = [
            self._script.drafts(row.tokens[: row.prompt_length], len(row.tokens) - row.prompt_length, width)
            for row in rows
        ]
        return mx.array(scripted, dtype=mx.int32) + 0 * drawn, logits  # the sum makes the drafts wait for the forward


def open_scripted(unit: LoadedUnit, script: Script) -> Engine:
    """Open the unit's target with a scripted drafter and no other."""
    engine = open_engine(unit)
    if not isinstance(engine.runner, Runner):
        raise TypeError("the target of a benchmark has caches that can be rewound")
    module = DFlashModel(DFlashConfig.read(drafter_config(dict(unit.config)), unit.config))
    mx.eval(module.parameters())
    target = Target(unit.target, unit.config, unit.vocabulary_size)
    drafter = ScriptedDFlash(Runner(module), target, script)
    engine.runner.tap(drafter.taps)
    limits = replace(engine.limits, drafters=(drafter.name,), unavailable={})
    return Engine(engine.runner, Drafters({drafter.name: drafter}), limits, engine.prefixes)


def drafter_config(target: dict[str, Any]) -> dict[str, Any]:
    """Build a config with layers as wide as the target's and taps at the start, in the middle and near the end."""
    layers = target["num_hidden_layers"]
    shared = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "vocab_size",
        "max_position_embeddings",
    )
    return {
        **{name: target[name] for name in shared},
        "num_hidden_layers": LAYERS,
        "num_target_layers": layers,
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": MASK_TOKEN,
            "target_layer_ids": [min(tap, layers - 1) for tap in TAPS] if layers > TAPS[-1] else [0, layers - 1],
        },
    }
