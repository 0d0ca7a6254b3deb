"""Costs of steps on real chips: tables built from published figures, not measured here. None of this ran on Metal.

The unit of all costs is one reading of the target's weights, the cost of a plain step without context. A forward costs

    matmul(rows x width) + rows x context x kv bytes / weight bytes x pieces(width)

- `matmul`, relative to one token (thresholds of mlx, mlx#3839, mlx PR 3791; shared reference, metal §2). M3/M4, 4 bit:
  one reading per five tokens up to 10, a third one up to 12, tiles of 32 from 13; an M4 Pro takes 1.47 at 4, 2.07 at 6,
  2.69 at 8, about 4 in a tile. M5, for a 70B: 76, 85, 108, 168, 295, 296 ms at 1, 3, 5, 8, 12, 16. M1/M2: one reading
  per token up to 5, tiles from 6 on. Between two known widths, costs are interpolated.
- Weights at 4 bit in groups of 64 take 4.5 bits: 8B 4.6 GB, 32B 18.4 GB. A token of 30B-A3B reads 3.3B parameters,
  1.86 GB; six tenths are experts. Below 4 tokens per expert these share no reading, so every token costs one.
- KV cache per token (bf16): 8B 147 kB, 32B 262 kB, 30B-A3B 98 kB (metal §1).
- `pieces`: attention reads the keys once per min(8, 32 // group) queries; `group`, the query heads per KV head, is 4 or
  8 (metal §2).
- Drafters at 4 bit, by size: a draft model of 0.6B (0.34 GB, KV 115 kB per token), or one EAGLE-3 or MTP layer with a
  head (0.2, 0.4, 0.1 GB, KV of one layer), runs once per draft, DFlash (five layers and the head, 8 wide) once a step.

The context before a prompt is in the drafters' caches too, as after a prefix hit; they read the rest when first used.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil
from statistics import median

from app.models.draft_lengths import cheap_tokens
from app.serving.sweep.grid import GOVERNOR, Setting
from tests.scheduler.replayed import ROUNDS, Server, Step, TraceEngine, fixed_steps, recorded

TILE = 32
BATCH_ROWS = 4
"""Number of rows in the batch that a load measures in addition to a single row."""
DELIVERY_STEPS = 0.001
"""Cost, in plain steps, of a step that only delivers a forward launched earlier, and of an n-gram lookup."""
READING_STEPS = 0.01
"""Cost, in plain steps, of each missed token that a draft model reads: as recorded on the CPU."""


@dataclass(frozen=True, eq=False)
class Chip:
    """A chip, with its `architecture` as mlx names it. `matmul` is the cost by tokens; its last entry fills a tile."""

    name: str
    architecture: str
    matmul: Mapping[int, float]

    def products(self, tokens: int) -> float:
        """Return the cost of matrix products over `tokens` tokens, in readings of the weights."""
        known = self.matmul
        widest = max(known)
        if tokens >= widest:
            return known[widest] * ceil(tokens / TILE)
        left, right = next(pair for pair in pairwise(sorted(known)) if tokens < pair[1])
        return known[left] + (known[right] - known[left]) * (tokens - left) / (right - left)


@dataclass(frozen=True, eq=False)
class Weights:
    """Sizes of a target and its drafters. A token reads `gigabytes`; the fraction `experts` is read once per token."""

    name: str
    gigabytes: float
    kv_kilobytes: float
    group: int
    layers: int
    head_gigabytes: float
    block_gigabytes: float
    experts: float = 0.0
    experts_per_token: int = 0


CHIPS = (
    Chip("M1", "applegpu_g13s", {1: 1.0, 2: 1.9, 3: 2.8, 4: 3.7, 5: 4.6, 6: 5.5, 16: 5.5}),
    Chip("M4", "applegpu_g16s", {1: 1.0, 4: 1.47, 5: 1.65, 6: 2.07, 8: 2.69, 10: 3.1, 11: 3.7, 12: 3.9, 13: 4.0}),
    Chip("M5", "applegpu_g17s", {1: 1.0, 3: 1.12, 5: 1.42, 6: 1.9, 8: 2.21, 10: 2.6, 11: 3.7, 12: 3.88, 13: 3.89}),
)
MODELS = (
    Weights("8B", 4.6, 147, group=4, layers=36, head_gigabytes=0.2, block_gigabytes=0.9),
    Weights("32B", 18.4, 262, group=8, layers=64, head_gigabytes=0.4, block_gigabytes=1.8),
    Weights("30B-A3B", 1.86, 98, 8, 48, head_gigabytes=0.1, block_gigabytes=0.4, experts=0.6, experts_per_token=8),
)
CONTEXTS = (1_024, 8_192, 32_768)


@dataclass(frozen=True, eq=False)
class ChipTable:
    """Prices of steps on one chip, for one model, after a context of `context_tokens`."""

    chip: Chip
    weights: Weights
    context_tokens: int

    @property
    def name(self) -> str:
        return f"{self.chip.name} {self.weights.name} {self.context_tokens // 1024}k"

    @property
    def cheap_tokens(self) -> tuple[int, ...]:
        """Token counts of cheap forwards, as the engine reports them."""
        experts = self.weights.experts_per_token
        return cheap_tokens(self.chip.architecture, mode="affine", experts_per_token=experts)

    def of(self, step: Step) -> tuple[float, float]:
        """Return the cost of drafting, and that of the rest of the step."""
        if step.drafts is None:
            return 0.0, DELIVERY_STEPS
        drafting = self._drafting(step, step.drafts) + step.unread * READING_STEPS * (step.method == "draft_model")
        return drafting, self._forward(step.rows, 1 + max(0, step.drafts), step.context)

    def _forward(self, rows: int, width: int, context: int) -> float:
        weights = self.weights
        shared = (1 - weights.experts) * self.chip.products(rows * width) + weights.experts * rows * width
        pieces = ceil(width / min(8, 32 // weights.group))
        return shared + rows * context * weights.kv_kilobytes / (weights.gigabytes * 1e6) * pieces

    def _drafting(self, step: Step, drafts: int) -> float:
        weights, layer = self.weights, self.weights.kv_kilobytes / self.weights.layers
        if step.method == "ngram" or drafts <= 0:
            return DELIVERY_STEPS
        if step.method == "dflash":
            kilobytes, gigabytes = 5 * layer, weights.block_gigabytes * self.chip.products(8 * step.rows)
            drafts = 1
        else:
            is_model = step.method == "draft_model"
            kilobytes, gigabytes = (115.0, 0.34) if is_model else (layer, weights.head_gigabytes)
            gigabytes *= self.chip.products(step.rows)
        return drafts * (gigabytes + step.rows * step.context * kilobytes / 1e6) / weights.gigabytes


TABLES = tuple(ChipTable(*combination) for combination in product(CHIPS, MODELS, CONTEXTS))


def fixed_rates_on(table: ChipTable) -> dict[str, dict[Setting, float]]:
    """Return the tokens per reading of the weights, by workload and fixed setting."""
    tokens = {
        workload["name"]: sum(request["tokens"] for request in workload["requests"])
        for workload in recorded()["workloads"]
    }
    offset = table.context_tokens
    return {
        name: {
            setting: tokens[name] / sum(sum(table.of(step._replace(context=step.context + offset))) for step in steps)
            for setting, steps in settings.items()
        }
        for name, settings in fixed_steps().items()
    }


def governed_rates_on(table: ChipTable, seed: int) -> dict[str, float]:
    """Run all workloads in turn, `ROUNDS` times on the same servers; return the governor's median rate for each."""
    chance = random.Random(seed)
    servers = {
        name: Server(
            TraceEngine(model, chance, table, table.cheap_tokens, table.context_tokens), measured_rows=(1, BATCH_ROWS)
        )
        for name, model in recorded()["models"].items()
    }
    workloads = list(recorded()["workloads"])
    answers = [
        (workload["name"], servers[workload["model"]].answer(workload, GOVERNOR)) for workload in workloads * ROUNDS
    ]
    return {
        workload["name"]: median(rate for name, rate in answers if name == workload["name"]) for workload in workloads
    }
