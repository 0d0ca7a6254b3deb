"""The models of one run, made on first use in one temporary folder, as Hugging Face folders that every side loads."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

import app
from bench.comparison.pairs import (
    SPECIAL_TOKENS,
    LayerSkipPair,
    Sizes,
    calibrate,
    make_attention_pair,
    make_copying_target,
    make_hybrid_pair,
    ring_of,
)

DEMO_MODELS = Path(app.__file__).parent / "demo_models"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
END_OF_SEQUENCE = 2
AIM = 0.82
"""Acceptance that ε is chosen for; the issue asks for 0.75 or more."""


@dataclass(frozen=True, slots=True)
class PairFolders:
    """A target on disk, its draft when it has one, and the acceptance that ε gives."""

    target: Path
    draft: Path | None
    acceptance: float = 0.0
    epsilon: float = 0.0


class Workshop:
    """Makes each model once. `drafts` is the draft length that acceptance is calibrated for."""

    def __init__(self, folder: Path, sizes: Sizes, drafts: int) -> None:
        self.folder = folder
        self.sizes = sizes
        self.drafts = drafts
        self._made: dict[str, PairFolders] = {}

    def attention_pair(self) -> PairFolders:
        """The qwen3 pair."""
        return self._pair("bench-attention", make_attention_pair)

    def hybrid_pair(self) -> PairFolders:
        """The qwen3_next pair."""
        return self._pair("bench-hybrid", make_hybrid_pair)

    def strangers(self) -> PairFolders:
        """The target of the qwen3 pair and a draft model that never saw it: nothing is accepted."""
        if "strangers" not in self._made:
            pair = make_attention_pair(self.sizes, seed=1)
            draft = write_model(pair.draft, pair.draft_config, self.folder / "bench-stranger")
            self._made["strangers"] = PairFolders(self.attention_pair().target, draft)
        return self._made["strangers"]

    def copying_target(self) -> PairFolders:
        """The target that repeats a ring of tokens."""
        if "bench-copying" not in self._made:
            pair = make_copying_target(self.sizes)
            target = write_model(pair.target, pair.target_config, self.folder / "bench-copying")
            self._made["bench-copying"] = PairFolders(target, None)
        return self._made["bench-copying"]

    def demo_pair(self) -> PairFolders:
        """The embedded models."""
        return PairFolders(DEMO_MODELS / "demo-assistant", DEMO_MODELS / "demo-draft")

    def prompt(self, number: int, row: int = 0, length: int = 16) -> list[int]:
        """Tokens that no other (round, row) starts with, so that no prefix cache helps anyone."""
        chooser = random.Random(f"{number} {row}")
        return [chooser.randrange(SPECIAL_TOKENS, self.sizes.vocabulary) for _ in range(length)]

    def copying_prompt(self, number: int) -> list[int]:
        """One and a half rounds of the ring, from a place that depends on the round."""
        ring = ring_of(64)
        start = (number * 7) % len(ring)
        return [ring[(start + step) % len(ring)] for step in range(96)]

    def _pair(self, name: str, make: Callable[[Sizes], LayerSkipPair]) -> PairFolders:
        if name not in self._made:
            pair = make(self.sizes)
            prompts = [self.prompt(number) for number in range(4)]
            acceptance = calibrate(pair, prompts, aim=AIM, drafts=self.drafts)
            target = write_model(pair.target, pair.target_config, self.folder / name)
            draft = write_model(pair.draft, pair.draft_config, self.folder / f"{name}-draft")
            self._made[name] = PairFolders(target, draft, acceptance, pair.epsilon)
        return self._made[name]


def write_model(model: nn.Module, config: dict[str, Any], folder: Path) -> Path:
    """Write a folder with the demo tokenizer: float32 on a CPU, half precision where that is fast."""
    folder.mkdir(parents=True)
    exact = mx.default_device().type == mx.DeviceType.cpu
    dtype = mx.float32 if exact else mx.float16
    parameters: Any = tree_flatten(model.parameters())
    weights = {name: value.astype(dtype) for name, value in parameters}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    ends = {"eos_token_id": END_OF_SEQUENCE, "torch_dtype": "float32" if exact else "float16"}
    (folder / "config.json").write_text(json.dumps({**config, **ends}), encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODELS / "demo-assistant" / name, folder / name)
    return folder
