"""Drafters that somebody published, by the model that they draft for, and pairs that suit a computer's memory.

Names and sizes are from the project's reference; sizes are rough, and the hub is asked for the exact ones before
anything is fetched. Whether a drafter fits is decided by its own files once they are here.
"""

import re
from dataclasses import dataclass
from typing import Literal

from app.hub.catalog import CatalogModel

BILLION = 1_000_000_000
ROOM_BYTES = 1_500_000_000

Method = Literal["dflash", "eagle3", "mtp", "draft_model"]


@dataclass(frozen=True, slots=True)
class Published:
    """One drafter on the hub. `size_bytes` is 0 where the reference does not tell it.

    An `mtp` head without a `repository` lies inside the original checkpoint; most smaller copies have lost it.
    """

    method: Method
    repository: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """A main model with the drafter that suits it; `draft` is None for a model that is too small to gain."""

    main: str
    main_bytes: int
    draft: Published | None

    @property
    def needed_bytes(self) -> int:
        """Both with room for their caches."""
        draft_bytes = self.draft.size_bytes if self.draft is not None else 0
        return round((self.main_bytes + draft_bytes) * 1.25) + ROOM_BYTES


SIZES_GB = {
    "z-lab/Qwen3-4B-DFlash-b16": 1.07,
    "z-lab/Qwen3-8B-DFlash-b16": 2.1,
    "z-lab/Qwen3.5-4B-DFlash": 1.2,
    "z-lab/Qwen3.5-9B-DFlash": 2.3,
    "z-lab/Qwen3.5-27B-DFlash": 3.5,
    "RedHatAI/Qwen3-8B-speculator.eagle3": 2.04,
    "RedHatAI/Qwen3-14B-speculator.eagle3": 2.78,
    "mlx-community/Qwen3-0.6B-4bit": 0.34,
    "mlx-community/Qwen3-1.7B-4bit": 0.97,
    "mlx-community/Qwen3-4B-4bit": 2.26,
    "mlx-community/Qwen3-8B-4bit": 4.61,
    "mlx-community/Qwen3-14B-4bit": 8.31,
    "mlx-community/Qwen3-32B-4bit": 18.4,
    "mlx-community/Qwen3.5-0.8B-MLX-4bit": 0.6,
    "mlx-community/Qwen3.5-27B-4bit": 16.0,
    "mlx-community/Qwen2.5-0.5B-Instruct-4bit": 0.28,
    "mlx-community/Qwen2.5-1.5B-Instruct-4bit": 0.87,
    "mlx-community/Llama-3.2-1B-Instruct-4bit": 0.7,
    "mlx-community/Llama-3.3-70B-Instruct-4bit": 39.7,
    "mlx-community/gemma-3-1b-it-4bit": 0.73,
}

FEATURE_DRAFTERS: tuple[tuple[str, Method, str], ...] = (
    ("qwen3-4b", "dflash", "z-lab/Qwen3-4B-DFlash-b16"),
    ("qwen3-8b", "dflash", "z-lab/Qwen3-8B-DFlash-b16"),
    ("qwen3-coder-30b-a3b", "dflash", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
    ("qwen3-coder-next", "dflash", "z-lab/Qwen3-Coder-Next-DFlash"),
    ("qwen3.5-4b", "dflash", "z-lab/Qwen3.5-4B-DFlash"),
    ("qwen3.5-9b", "dflash", "z-lab/Qwen3.5-9B-DFlash"),
    ("qwen3.5-27b", "dflash", "z-lab/Qwen3.5-27B-DFlash"),
    ("qwen3.5-35b-a3b", "dflash", "z-lab/Qwen3.5-35B-A3B-DFlash"),
    ("qwen3.5-122b-a10b", "dflash", "z-lab/Qwen3.5-122B-A10B-DFlash"),
    ("qwen3.5-397b-a17b", "dflash", "z-lab/Qwen3.5-397B-A17B-DFlash"),
    ("qwen3.6-27b", "dflash", "z-lab/Qwen3.6-27B-DFlash"),
    ("qwen3.6-35b-a3b", "dflash", "z-lab/Qwen3.6-35B-A3B-DFlash"),
    ("llama-3.1-8b-instruct", "dflash", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    ("gpt-oss-20b", "dflash", "z-lab/gpt-oss-20b-DFlash"),
    ("gpt-oss-120b", "dflash", "z-lab/gpt-oss-120b-DFlash"),
    ("gemma-4-31b-it", "dflash", "z-lab/gemma-4-31B-it-DFlash"),
    ("gemma-4-26b-a4b-it", "dflash", "z-lab/gemma-4-26B-A4B-it-DFlash"),
    ("kimi-k2.5", "dflash", "z-lab/Kimi-K2.5-DFlash"),
    ("laguna-xs-2.1", "dflash", "poolside/Laguna-XS-2.1-DFlash"),
    ("muse-glimmer-30b", "dflash", "meta-models/Muse-Glimmer-30B-assistant"),
    ("qwen3-8b", "eagle3", "RedHatAI/Qwen3-8B-speculator.eagle3"),
    ("qwen3-14b", "eagle3", "RedHatAI/Qwen3-14B-speculator.eagle3"),
    ("qwen3-32b", "eagle3", "RedHatAI/Qwen3-32B-speculator.eagle3"),
    ("gpt-oss-20b", "eagle3", "RedHatAI/gpt-oss-20b-speculator.eagle3"),
    ("gemma-4-26b-a4b-it", "eagle3", "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3"),
)
"""By the start of the main model's name, in small letters."""

SMALL_MODELS: tuple[tuple[str, float, str], ...] = (
    ("qwen3-", 0.6, "mlx-community/Qwen3-0.6B-4bit"),
    ("qwen3-", 1.7, "mlx-community/Qwen3-1.7B-4bit"),
    ("qwen3-", 4.0, "mlx-community/Qwen3-4B-4bit"),
    ("qwen3.5-", 0.8, "mlx-community/Qwen3.5-0.8B-MLX-4bit"),
    ("qwen2.5-", 0.5, "mlx-community/Qwen2.5-0.5B-Instruct-4bit"),
    ("qwen2.5-", 1.5, "mlx-community/Qwen2.5-1.5B-Instruct-4bit"),
    ("llama-3", 1.2, "mlx-community/Llama-3.2-1B-Instruct-4bit"),
    ("gemma-3-", 1.0, "mlx-community/gemma-3-1b-it-4bit"),
)
"""Small models of a family, by the start of its names, with their parameters in billions, the smallest first."""

LARGEST_DRAFTS = ((30.0, 7.0), (13.0, 3.0), (6.5, 1.3))
"""A main model of so many billion parameters gains from a draft of at most so many; below 6.5 from none."""

HEADED = ("qwen3_next", "qwen3_5", "deepseek_v3")
"""Starts of the model types whose original checkpoints hold a multi-token head that can run here."""

PAIRS: tuple[tuple[str, str, Method | None], ...] = (
    ("mlx-community/Qwen3-1.7B-4bit", "", None),
    ("mlx-community/Qwen3-4B-4bit", "z-lab/Qwen3-4B-DFlash-b16", "dflash"),
    ("mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-0.6B-4bit", "draft_model"),
    ("mlx-community/Qwen3-8B-4bit", "z-lab/Qwen3-8B-DFlash-b16", "dflash"),
    ("mlx-community/Qwen3-14B-4bit", "mlx-community/Qwen3-1.7B-4bit", "draft_model"),
    ("mlx-community/Qwen3.5-27B-4bit", "z-lab/Qwen3.5-27B-DFlash", "dflash"),
    ("mlx-community/Qwen3-32B-4bit", "mlx-community/Qwen3-4B-4bit", "draft_model"),
    ("mlx-community/Llama-3.3-70B-Instruct-4bit", "mlx-community/Llama-3.2-1B-Instruct-4bit", "draft_model"),
)
RECOMMENDED = 3


def published_for(main: CatalogModel) -> list[Published]:
    """The known drafters of a main model on this disk, the best method first; empty for a drafter or an unknown one."""
    if main.kind != "main":
        return []
    name = _plain(main.id)
    found = [_published(method, draft) for target, method, draft in FEATURE_DRAFTERS if _is_for(target, name)]
    if main.head is None and main.model_type.startswith(HEADED):
        found.append(Published("mtp", ""))
    limit = next((most for least, most in LARGEST_DRAFTS if main.parameter_count >= least * BILLION), 0.0)
    small = (draft for start, size, draft in SMALL_MODELS if name.startswith(start) and size <= limit)
    return [*found, *(_published("draft_model", draft) for draft in small)]


def recommended(memory_bytes: int) -> list[Pair]:
    """Pairs that fit into so much memory for models, the largest first."""
    every = [
        Pair(main, _size(main), None if method is None else _published(method, draft)) for main, draft, method in PAIRS
    ]
    fitting = sorted((pair for pair in every if pair.needed_bytes <= memory_bytes), key=lambda pair: pair.needed_bytes)
    return fitting[: -RECOMMENDED - 1 : -1]


def _published(method: Method, repository: str) -> Published:
    return Published(method, repository, _size(repository))


def _size(repository: str) -> int:
    return round(SIZES_GB.get(repository, 0.0) * 1e9)


def _is_for(target: str, name: str) -> bool:
    """Whole words: `qwen3-4b` is for `qwen3-4b-8bit`, never for `qwen3-4bit`."""
    return name == target or name.startswith(f"{target}-")


def _plain(model_id: str) -> str:
    """`llama-3.1-8b-instruct-4bit` for `mlx-community/Meta-Llama-3.1-8B-Instruct-4bit`."""
    name = model_id.rpartition("/")[2].lower().replace("_", "-").removeprefix("meta-")
    return re.sub(r"^llama-?(?=3)", "llama-", name)
