"""The models of one run, made on first use in a temporary folder, as Hugging Face folders that every side loads."""

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
    fast_dtype,
    make_attention_pair,
    make_copying_target,
    make_hybrid_pair,
    ring_of,
)

DEMO_MODELS = Path(app.__file__).parent / "demo_models"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
END_OF_SEQUENCE = 2
GROUP_SIZE = 64
"""Number of weights that share a scale in a quantised model."""
TARGET_ACCEPTANCE = 0.82
"""Acceptance for which ε is calibrated; the cases require 0.75 or more."""


@dataclass(frozen=True, slots=True)
class PairFolders:
    """A target on disk, its draft if it has one, and the acceptance that ε gives."""

    target: Path
    draft: Path | None
    acceptance: float = 0.0
    epsilon: float = 0.0


class Workshop:
    """Makes each model once. Acceptance is calibrated for draft length `drafts`; the models' matrices are then
    quantised to `bits` (0: not at all)."""

    def __init__(self, folder: Path, sizes: Sizes, drafts: int, bits: int = 0) -> None:
        self.folder = folder
        self.sizes = sizes
        self.drafts = drafts
        self.bits = bits
        self._folders: dict[str, PairFolders] = {}

    def attention_pair(self) -> PairFolders:
        """Return the qwen3 pair."""
        return self._pair("bench-attention", make_attention_pair)

    def hybrid_pair(self) -> PairFolders:
        """Return the qwen3_next pair."""
        return self._pair("bench-hybrid", make_hybrid_pair)

    def unrelated_pair(self) -> PairFolders:
        """Return the target of the qwen3 pair and an unrelated draft model: nothing is accepted."""
        if "strangers" not in self._folders:
            pair = make_attention_pair(self.sizes, seed=1)
            draft = self._write(pair.draft, pair.draft_config, "bench-stranger")
            self._folders["strangers"] = PairFolders(self.attention_pair().target, draft)
        return self._folders["strangers"]

    def copying_target(self) -> PairFolders:
        """Return the target that repeats a ring of tokens."""
        if "bench-copying" not in self._folders:
            pair = make_copying_target(self.sizes)
            target = self._write(pair.target, pair.target_config, "bench-copying")
            self._folders["bench-copying"] = PairFolders(target, None)
        return self._folders["bench-copying"]

    def demo_pair(self) -> PairFolders:
        """Return the embedded models."""
        return PairFolders(DEMO_MODELS / "demo-assistant", DEMO_MODELS / "demo-draft")

    def prompt(self, number: int, row: int = 0, length: int = 16) -> list[int]:
        """Return tokens unique to this round and row, so that no prefix cache helps either side."""
        rng = random.Random(f"{number} {row}")
        return [rng.randrange(SPECIAL_TOKENS, self.sizes.vocabulary) for _ in range(length)]

    def copying_prompt(self, number: int) -> list[int]:
        """Return one and a half laps of the ring, from a start that depends on the round."""
        ring = ring_of(64)
        start = (number * 7) % len(ring)
        return [ring[(start + step) % len(ring)] for step in range(96)]

    def _pair(self, name: str, make: Callable[[Sizes], LayerSkipPair]) -> PairFolders:
        if name not in self._folders:
            pair = make(self.sizes)
            prompts = [self.prompt(number) for number in range(4)]
            acceptance = calibrate(pair, prompts, target_acceptance=TARGET_ACCEPTANCE, drafts=self.drafts)
            target = self._write(pair.target, pair.target_config, name)
            draft = self._write(pair.draft, pair.draft_config, f"{name}-draft")
            self._folders[name] = PairFolders(target, draft, acceptance, pair.epsilon)
        return self._folders[name]

    def _write(self, model: nn.Module, config: dict[str, Any], name: str) -> Path:
        """Write a folder with the demo tokenizer, in the dtype that is fast here; the model is quantised in place."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        model.set_dtype(fast_dtype())
        if self.bits:
            nn.quantize(model, GROUP_SIZE, self.bits)
            config = {**config, "quantization": {"group_size": GROUP_SIZE, "bits": self.bits}}
        weights: Any = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        extra_config = {"eos_token_id": END_OF_SEQUENCE, "torch_dtype": str(fast_dtype()).removeprefix("mlx.core.")}
        (folder / "config.json").write_text(json.dumps({**config, **extra_config}), encoding="utf-8")
        for file in TOKENIZER_FILES:
            shutil.copy(DEMO_MODELS / "demo-assistant" / file, folder / file)
        return folder
