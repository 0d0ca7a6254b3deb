"""mlx-lm without its package's imports: mlx, and tokenizers and transformers, which take half of a worker's start.

For processes that need only a few of its modules. Call `bare_mlx_lm` before anything imports mlx-lm.
"""

import importlib.util
import sys
from types import ModuleType

TOKENIZER_MODULE = "mlx_lm.tokenizer_utils"


def bare_mlx_lm(*, tokenizers: bool) -> None:
    """Let `import mlx_lm.…` find its modules without running its `__init__`.

    Without `tokenizers`, the tokenizer module is a stub whose names are all `object`.
    """
    package = ModuleType("mlx_lm")
    package.__path__ = list(importlib.util.find_spec("mlx_lm").submodule_search_locations or ())  # type: ignore[union-attr]
    sys.modules["mlx_lm"] = package
    if not tokenizers:
        module = ModuleType(TOKENIZER_MODULE)
        module.TokenizerWrapper = module.load = object  # type: ignore[attr-defined]
        sys.modules[TOKENIZER_MODULE] = module
