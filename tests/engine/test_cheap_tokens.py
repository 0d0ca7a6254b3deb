"""Cheap forward widths of an engine, derived from the chip and from the weights that are really loaded."""

import pytest
from mlx import nn
from mlx_lm.models import qwen3_moe

from app.core.unit import ModelSpecification
from app.engine.layers import cheap_tokens_of
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.opening import open_engine
from app.models.draft_lengths import cheap_tokens
from tests.tiny import tiny_config, tiny_model

M1, M4 = "applegpu_g13s", "applegpu_g16s"


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def unit(family: str, mode: str, config: dict[str, object]) -> LoadedUnit:
    if family == "qwen3_moe":
        arguments = {**tiny_config("qwen3"), **EXPERTS, "mlp_only_layers": [], "norm_topk_prob": True}
        model: nn.Module = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(arguments))
    else:
        model = tiny_model(family)
    if mode:
        nn.quantize(model, group_size=32, bits=4, mode=mode)
    return LoadedUnit(ModelSpecification(id=family, path=""), model, config, 0, 512, 64)


def cheap_tokens_on(loaded: LoadedUnit, architecture: str) -> tuple[int, ...]:
    return cheap_tokens_of(loaded.target, loaded.config, architecture)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("architecture", [M1, M4])
def test_the_mode_is_that_of_the_weights(architecture: str, mode: str) -> None:
    tokens = cheap_tokens_on(unit("qwen3", mode, {"num_experts_per_tok": 8}), architecture)
    assert tokens == cheap_tokens(architecture, mode=mode), "a dense model has no experts, whatever its config names"


def test_experts_are_those_of_the_config_nested_or_not() -> None:
    wanted = cheap_tokens(M4, mode="affine", experts_per_token=8)
    assert cheap_tokens_on(unit("qwen3_moe", "affine", {"num_experts_per_tok": 8}), M4) == wanted
    assert cheap_tokens_on(unit("qwen3_moe", "affine", {"text_config": {"moe_topk": 8}}), M4) == wanted


def test_weights_that_are_not_quantised_and_a_cpu_have_none() -> None:
    assert cheap_tokens_on(unit("qwen3", "", {}), M4) == ()
    assert open_engine(unit("qwen3", "affine", {})).limits.cheap_tokens == ()
