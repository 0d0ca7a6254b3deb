"""Encoders (bidirectional models for embeddings only), and the pooling that files of sentence-transformers declare."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from app.core.errors import ModelUnavailable
from app.models.config_values import Config
from app.models.safe_files import DOWNLOAD_AGAIN, printable, read_json, read_object

ENCODERS = frozenset({"bert", "camembert", "modernbert", "roberta", "xlm-roberta"})
"""Model types that `app/engine/encoders.py` builds."""
OTHER_ENCODERS = frozenset(
    {"albert", "deberta", "deberta-v2", "distilbert", "electra", "eurobert", "mpnet", "new", "nomic_bert", "t5"}
)
BATCH_ROWS, BATCH_TOKENS = 32, 2048
"""Limits of a batch: texts, and tokens including padding; a longer text is encoded alone."""
UNKNOWN = "unknown"
"""Pooling of a folder that declares pooling but not which kind, such as the copies made by mlx-embeddings."""

MODULES_FILE = "modules.json"
POOLING_FILE = re.compile(r"\d{1,2}_Pooling/config\.json")
FLAG = "pooling_mode_"
POOLINGS = {
    "cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "mean_sqrt_len_tokens": "mean",
    "lasttoken": "last",
}  # fmt: skip
"""Poolings by sentence-transformers name. Embeddings are scaled to length 1, so `mean_sqrt_len_tokens` is a mean."""


def check_direction(config: Config) -> None:
    """Raise ModelUnavailable for a bidirectional model that is not supported, or was not made for embeddings."""
    kind = str(config.get("model_type"))
    name = next(iter(_texts(config.get("architectures"))), "")
    if kind in ENCODERS and (name.endswith("ForSequenceClassification") or config.get("is_decoder") is True):
        raise ModelUnavailable(f"it was not made for embeddings ({printable(name)}); choose another one")
    if kind in ENCODERS - {"modernbert"} and config.get("position_embedding_type") not in (None, "absolute"):
        raise ModelUnavailable("it uses relative position embeddings, which are not supported; choose another one")
    if kind in OTHER_ENCODERS or config.get("use_bidirectional_attention") in (True, "all"):
        raise ModelUnavailable(
            f"it is bidirectional; of these models, only {', '.join(sorted(ENCODERS))} are supported; choose one"
        )


def declared_pooling(root: Path, files: Collection[str]) -> str:
    """Return the pooling that a folder declares: `mean`, `last`, `cls` or `UNKNOWN`; "" if it declares none.

    Raises ModelUnavailable for an unsupported pooling, because any other would return wrong embeddings.
    """
    modules = read_json(root / MODULES_FILE) if MODULES_FILE in files else []
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    strange = [kind for kind in kinds if kind not in {"Transformer", "Pooling", "Normalize"}]
    if strange:
        raise ModelUnavailable(
            f"its embeddings pass a {printable(strange[0])}, which is not supported; choose another one"
        )
    file = next((name for name in files if POOLING_FILE.fullmatch(name)), "")
    if not file:
        return UNKNOWN if "Pooling" in kinds else ""
    config = read_object(root / file)
    flags = [key.removeprefix(FLAG) for key, value in config.items() if value is True and key.startswith(FLAG)]
    named = flags or _texts(config.get("pooling_mode"))
    if len(named) != 1 or named[0] not in POOLINGS:
        raise ModelUnavailable(
            f"its {file} asks for a pooling that does not run here ({printable(' and '.join(named)) or 'none'}); "
            f"choose another model, or {DOWNLOAD_AGAIN}"
        )
    return POOLINGS[named[0]]


def _texts(value: Any) -> list[str]:
    """Return the strings of a list, or a single string as a list."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
