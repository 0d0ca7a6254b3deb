"""The server expects of a checkpoint exactly the tensors that the worker's modules have."""

from collections.abc import Callable
from pathlib import Path

import pytest

from app.models.pairing import refusal
from tests.engine.published import write_dflash, write_eagle3, write_mtp
from tests.models.drafters import catalog
from tests.tiny import write_tiny_model


@pytest.mark.parametrize(
    ("write", "family"), [(write_dflash, "qwen3"), (write_eagle3, "qwen3"), (write_mtp, "qwen3_next")]
)
def test_every_tensor_of_a_module_is_expected_and_no_other(
    tmp_path: Path, write: Callable[[Path], Path], family: str
) -> None:
    write_tiny_model(tmp_path / "main", family)
    write(tmp_path / "drafter")
    models = catalog(tmp_path)
    assert refusal(models["main"], models["drafter"]) == ""
