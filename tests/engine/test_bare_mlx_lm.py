"""Processes start without libraries that they never use: transformers in a worker, mlx in a text process."""

import subprocess
import sys

import pytest

EVERY_MODEL = """
import importlib, pkgutil, sys
from app.engine.platform import bare_mlx_lm
bare_mlx_lm(tokenizers=False)
import mlx_lm.models, mlx_lm.utils
for model in pkgutil.iter_modules(mlx_lm.models.__path__):
    if model.name != "olmo":  # it wants a package of its own
        importlib.import_module(f"mlx_lm.models.{model.name}")
print("transformers" in sys.modules, len(sys.modules) > 100)
"""
WORKER = "import sys; import app.worker.process; print('transformers' in sys.modules, 'mlx.core' in sys.modules)"
TEXTS = "import sys; import app.worker.text_process; print('mlx.core' in sys.modules, 'transformers' in sys.modules)"


@pytest.mark.parametrize("program", [EVERY_MODEL, WORKER, TEXTS], ids=["every model", "a worker", "a text process"])
def test_a_process_starts_without_what_it_never_uses(program: str) -> None:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.stdout, run.returncode) == ("False True\n", 0), run.stderr
