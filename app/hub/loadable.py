"""Which architectures mlx-lm can load, told by the names of its files: nothing of it is imported here."""

import functools
import importlib.util
from pathlib import Path

OTHER_NAMES = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
}
"""Model types that mlx-lm loads under another name."""


def is_loadable(model_type: str) -> bool:
    """Whether mlx-lm has an architecture for this model type; True when it cannot be told."""
    known = model_types()
    return not known or not model_type or OTHER_NAMES.get(model_type, model_type) in known


@functools.cache
def model_types() -> frozenset[str]:
    """Every architecture of the installed mlx-lm; empty when it is not installed."""
    found = importlib.util.find_spec("mlx_lm")
    if found is None or found.origin is None:
        return frozenset()
    return frozenset(path.stem for path in (Path(found.origin).parent / "models").glob("*.py"))
