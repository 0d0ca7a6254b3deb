"""Which module reads the published folder of a feature drafter, by method."""

from collections.abc import Callable, Mapping
from typing import Any

from mlx import nn

from app.core.model_folder import ModelFolder
from app.engine.drafters.dflash import DFlashModel
from app.engine.drafters.eagle3 import Eagle3Model
from app.engine.drafters.mtp import MtpModel

MODULES: Mapping[str, Callable[[ModelFolder, Mapping[str, Any]], nn.Module]] = {
    "dflash": DFlashModel.load,
    "eagle3": Eagle3Model.load,
    "mtp": MtpModel.load,
}
"""Each takes a folder and the target's config."""
