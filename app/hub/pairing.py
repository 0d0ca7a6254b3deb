"""Which drafter fits which main model, and why not.

A draft model fits when its tokens are the main model's tokens, id by id, and it is not larger. A feature drafter
(DFlash, EAGLE-3, MTP) fits when it was made for the main model's width and depth. A draft that fits may still guess
badly: that costs time, never correctness, and the governor turns it off.
"""

import filecmp
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.errors import ModelUnavailable
from app.core.model_folder import text_number
from app.hub.catalog import CatalogModel
from app.hub.tokens import fingerprint, first_difference, read_tokens

DEFAULT_SIZE_SHARE = 1 / 3
"""A draft chosen without being asked for is at most this large, measured against the main model."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Whether `draft_id` can draft for `main_id`; `reason` is empty when it can, else one line."""

    main_id: str
    draft_id: str
    method: str
    fits: bool
    reason: str = ""


def pair(main: CatalogModel, draft: CatalogModel) -> Pairing:
    """Check one pair. Reads tokenizer files (cached by time and size), never weights; never raises."""
    try:
        reason = _refusal(main, draft)
    except ModelUnavailable as error:
        reason = error.message
    except OSError:
        reason = "its files cannot be read; check that the folder exists and is readable"
    return Pairing(main.id, draft.id, draft.method, not reason, reason and f'"{draft.id}" cannot draft: {reason}')


def candidates(main: CatalogModel, models: Iterable[CatalogModel]) -> list[CatalogModel]:
    """The models that fit `main`, the smallest first."""
    fitting = [model for model in models if model.id != main.id and pair(main, model).fits]
    return sorted(fitting, key=lambda model: (model.size_bytes, model.id))


def default_draft(main: CatalogModel, models: Iterable[CatalogModel]) -> CatalogModel | None:
    """The draft model to use when none was asked for, or None.

    A sibling from the same source that fits and has at most a third of the size: the same name family first
    (`demo-draft` for `demo-assistant`), then the smallest.
    """
    if main.kind != "main" or main.problem:
        return None
    limit = main.size_bytes * DEFAULT_SIZE_SHARE
    siblings = [
        model for model in models if model.source == main.source and model.kind == "main" and model.size_bytes <= limit
    ]
    ranked = sorted(siblings, key=lambda model: (_family(model.id) != _family(main.id), model.size_bytes, model.id))
    return next((model for model in ranked if pair(main, model).fits), None)


def _refusal(main: CatalogModel, draft: CatalogModel) -> str:
    for model in (main, draft):
        if model.problem:
            return model.problem
    if main.kind != "main":
        return f'"{main.id}" is a drafter itself; choose a main model'
    if draft.size_bytes > main.size_bytes:
        return (
            f"it is larger than the main model ({_megabytes(draft.size_bytes)} against {_megabytes(main.size_bytes)})"
        )
    return _other_tokens(main.path, draft.path) if draft.kind == "main" else _other_features(main.config, draft.config)


def _other_tokens(main: Path, draft: Path) -> str:
    """Why the tokens differ; "" when they are the same. Equal files need no parsing."""
    files = main / "tokenizer.json", draft / "tokenizer.json"
    if all(file.is_file() for file in files) and filecmp.cmp(*files, shallow=False):
        return ""
    ours, theirs = fingerprint(main), fingerprint(draft)
    if ours and ours == theirs:
        return ""
    if not (ours.startswith("tokens:") and theirs.startswith("tokens:")):
        return "its tokenizer cannot be compared; both models need a tokenizer.json"
    return f"it has another tokenizer: {first_difference(read_tokens(main), read_tokens(draft))}"


def _other_features(main: Mapping[str, Any], draft: Mapping[str, Any]) -> str:
    """Why a feature drafter was made for another target; what it does not tell is not held against it."""
    details = {**draft, **_section(draft, "dflash_config")}
    layers = text_number(main, "num_hidden_layers", "n_layer", "n_layers")
    width = text_number(main, "hidden_size", "n_embd", "d_model")
    wanted_width = text_number(details, "target_hidden_size", "hidden_size")
    if wanted_width and width != wanted_width:
        return f"it was made for a hidden size of {wanted_width}, the main model has {width}"
    wanted_layers = text_number(details, "num_target_layers")
    if wanted_layers and layers != wanted_layers:
        return f"it was made for {wanted_layers} layers, the main model has {layers}"
    taps = details.get("target_layer_ids")
    if layers and isinstance(taps, list) and any(not isinstance(tap, int) or not 0 <= tap < layers for tap in taps):
        return f"it reads layers that the main model does not have ({layers} layers)"
    rows, wanted_rows = text_number(main, "vocab_size"), text_number(details, "vocab_size")
    if wanted_rows and rows != wanted_rows:
        return f"it was made for {wanted_rows} tokens, the main model has {rows}"
    return ""


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _family(name: str) -> str:
    """The first letters of a name without its organisation: `qwen` for `mlx-community/Qwen3-8B-4bit`."""
    match = re.match(r"[a-z]+", name.rpartition("/")[2].lower())
    return match.group() if match else ""


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
