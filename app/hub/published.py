"""Drafters that somebody published, by the model that they draft for, and pairs that suit a computer's memory.

They are listed in `published.json`, from the project's reference. Sizes are rough: the hub is asked for the exact ones
before anything is fetched. Whether a drafter fits is decided by its own files once they are here.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.drafters import DRAFT_MODEL, MTP
from app.hub.catalog import CatalogModel

BILLION = 1_000_000_000
ROOM_BYTES = 1_500_000_000


@dataclass(frozen=True, slots=True)
class Published:
    """One drafter on the hub. `size_bytes` is 0 where the reference does not tell it.

    An `mtp` head without a `repository` lies inside the original checkpoint; most smaller copies have lost it.
    """

    method: str
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


_KNOWN = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
SIZES_GB: Mapping[str, float] = _KNOWN["sizes_gb"]
FEATURE_DRAFTERS: tuple[tuple[str, str, str], ...] = tuple(map(tuple, _KNOWN["feature_drafters"]))
"""By the start of the main model's name, in small letters: method and repository."""
SMALL_MODELS: tuple[tuple[str, float, str], ...] = tuple(map(tuple, _KNOWN["small_models"]))
"""Small models of a family, by the start of its names, with their parameters in billions, the smallest first."""
PAIRS: tuple[tuple[str, str, str | None], ...] = tuple(map(tuple, _KNOWN["pairs"]))
"""Main model, drafter and method; none for a model that is too small to gain."""

LARGEST_DRAFTS = ((30.0, 7.0), (13.0, 3.0), (6.5, 1.3))
"""A main model of so many billion parameters gains from a draft of at most so many; below 6.5 from none."""

HEADED = ("qwen3_next", "qwen3_5", "deepseek_v3")
"""Starts of the model types whose original checkpoints hold a multi-token head that can run here."""

RECOMMENDED = 3


def published_for(main: CatalogModel) -> list[Published]:
    """The known drafters of a main model on this disk, the best method first; empty for a drafter or an unknown one."""
    if main.kind != "main":
        return []
    name = _plain(main.id)
    found = [_published(method, draft) for target, method, draft in FEATURE_DRAFTERS if _is_for(target, name)]
    if main.head is None and main.model_type.startswith(HEADED):
        found.append(Published(MTP.name, ""))
    limit = next((most for least, most in LARGEST_DRAFTS if main.parameter_count >= least * BILLION), 0.0)
    small = (draft for start, size, draft in SMALL_MODELS if name.startswith(start) and size <= limit)
    return [*found, *(_published(DRAFT_MODEL.name, draft) for draft in small)]


def recommended(memory_bytes: int) -> list[Pair]:
    """Pairs that fit into so much memory for models, the largest first."""
    every = [
        Pair(main, _size(main), None if method is None else _published(method, draft)) for main, draft, method in PAIRS
    ]
    fitting = sorted((pair for pair in every if pair.needed_bytes <= memory_bytes), key=lambda pair: pair.needed_bytes)
    return fitting[: -RECOMMENDED - 1 : -1]


def _published(method: str, repository: str) -> Published:
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
