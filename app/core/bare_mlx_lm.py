"""mlx-lm without what its package imports first: tokenizers and transformers, half of a worker's start, and mlx.

For processes that need a few of its modules. Call `bare_mlx_lm` before anything imports it.
"""

import importlib.util
import sys
from types import ModuleType

TOKENIZER_MODULE = "mlx_lm.tokenizer_utils"


def bare_mlx_lm(*, tokenizers: bool) -> None:
    """Let `import mlx_lm.…` find its modules without running its `__init__`.

    Without `tokenizers`, the names of that module which others import stand for nothing.
    """
    package = ModuleType("mlx_lm")
    package.__path__ = list(importlib.util.find_spec("mlx_lm").submodule_search_locations or ())  # type: ignore[union-attr]
    sys.modules["mlx_lm"] = package
    if not tokenizers:
        module = ModuleType(TOKENIZER_MODULE)
        module.TokenizerWrapper = module.load = object  # type: ignore[attr-defined]
        sys.modules[TOKENIZER_MODULE] = module
