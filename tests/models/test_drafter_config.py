"""Meaning of the configs of published drafters: the layers that they tap, and the slots that each slot sees."""

from typing import Any

import pytest

from app.core.errors import ModelUnavailable
from app.models.drafters.config import FULL, SLIDING
from app.models.drafters.formats import DFlashConfig, Eagle3Config, MtpConfig

TARGET = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "max_position_embeddings": 40_960,
}
SIZES = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "vocab_size": 151_936,
}
DFLASH = {
    **SIZES,
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151_669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
EAGLE3 = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32_000}


def dflash(target: dict[str, Any] | None = None, **changes: Any) -> DFlashConfig:
    return DFlashConfig.read({**DFLASH, **changes}, target or TARGET)


def eagle3(**changes: Any) -> Eagle3Config:
    return Eagle3Config.read({**EAGLE3, **changes}, TARGET)


def test_a_published_dflash_config() -> None:
    config = dflash()
    assert (config.taps, config.block_size, config.mask_token_id) == ((1, 9, 17, 25, 33), 16, 151_669)
    assert (config.hidden_size, config.head_dim, config.rope_theta) == (2560, 128, 1_000_000.0)
    assert (config.causal, config.layer_types, config.sliding_window) == ((False,) * 5, (FULL,) * 5, 0)
    assert (config.rope_scaling, config.rope_traditional, config.attention_bias) == (None, False, False)


@pytest.mark.parametrize(
    ("layers", "depth", "taps"),
    [(5, 36, (1, 9, 17, 25, 33)), (5, 32, (1, 8, 15, 22, 29)), (5, 40, (1, 10, 19, 28, 37)), (1, 36, (18,))],
)
def test_without_layer_ids_the_taps_are_those_of_the_published_formula(
    layers: int, depth: int, taps: tuple[int, ...]
) -> None:
    target = {**TARGET, "num_hidden_layers": depth}
    changes = {"num_hidden_layers": layers, "num_target_layers": depth, "dflash_config": {"mask_token_id": 9}}
    assert dflash(target, **changes).taps == taps


def test_speculators_count_the_taps_from_one_and_have_blocks_of_eight() -> None:
    config = DFlashConfig.read(
        {
            "speculators_model_type": "dflash",
            "transformer_layer_config": {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
            "aux_hidden_state_layer_ids": [2, 10, 36],
            "mask_token_id": 9,
            "draft_vocab_size": 32_000,
        },
        TARGET,
    )
    assert (config.taps, config.block_size, config.draft_vocab_size) == ((1, 9, 35), 8, 32_000)
    assert (config.rope_theta, config.rope_scaling) == (5e6, None)


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, (False, True)),
        ({"sliding_window_non_causal": True}, (False, False)),
        ({"is_causal": False}, (False, False)),
        ({"dflash_config": {**DFLASH["dflash_config"], "causal": True}}, (True, True)),
        ({"dflash_query_causal": False}, (False, False)),
    ],
)
def test_sliding_layers_are_causal_inside_the_block_unless_told_otherwise(
    changes: dict[str, Any], causal: tuple[bool, ...]
) -> None:
    config = dflash(num_hidden_layers=2, layer_types=[FULL, SLIDING], sliding_window=2048, **changes)
    assert (config.causal, config.sliding_window) == (causal, 2048)


def test_sliding_layers_may_be_told_by_a_pattern_or_a_flag() -> None:
    assert dflash(sliding_window_pattern=5, sliding_window=9).layer_types == (SLIDING,) * 4 + (FULL,)
    section = {**DFLASH["dflash_config"], "use_swa": True, "swa_window_size": 7}
    config = dflash(dflash_config=section)
    assert (config.layer_types, config.sliding_window) == ((SLIDING,) * 5, 7)
    with pytest.raises(ModelUnavailable, match="names no sliding_window"):
        dflash(layer_types=[SLIDING] * 5)
    with pytest.raises(ModelUnavailable, match="no usable layer_types"):
        dflash(layer_types=[FULL])


def test_rotary_positions_keep_what_changes_them() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert dflash(rope_scaling=yarn).rope_scaling == yarn
    both = dflash(rope_theta=None, rope_parameters={**yarn, "rope_theta": 1e7, "partial_rotary_factor": 0.25})
    assert (both.rope_theta, both.partial_rotary_factor) == (1e7, 0.25)
    assert both.rope_scaling is not None
    assert both.rope_scaling["factor"] == 4.0
    assert dflash(is_neox_style=False).rope_traditional
    with pytest.raises(ModelUnavailable, match="differ by kind of layer"):
        dflash(rope_parameters={FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}})


@pytest.mark.parametrize("key", ["attention_sink_bias", "input_embedding_scale", "projector_type"])
def test_what_cannot_run_here_is_refused_not_ignored(key: str) -> None:
    with pytest.raises(ModelUnavailable, match=key):
        dflash(dflash_config={**DFLASH["dflash_config"], key: 2.0})


@pytest.mark.parametrize("value", [-1, 0, 1.5, "2560", True, [2560], 1 << 40])
def test_numbers_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(ModelUnavailable, match="no usable num_attention_heads"):
        dflash(num_attention_heads=value)


def test_eagle3_ids_name_the_layer_after_the_state_and_in_its_section_the_layer_itself() -> None:
    assert eagle3().taps == (1, 17, 32), "of [2, N / 2, N - 3]"
    assert eagle3(eagle_aux_hidden_state_layer_ids=[3, 19, 34]).taps == (2, 18, 33)
    assert eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}).taps == (1, 17, 32)
    both = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}}
    assert eagle3(eagle_aux_hidden_state_layer_ids=[3, 19, 34], **both).taps == (2, 18, 33)


def test_eagle3_flags_and_sizes() -> None:
    plain = eagle3()
    assert (plain.draft_vocab_size, plain.vocab_size, plain.target_hidden_size) == (32_000, 151_936, 2560)
    assert {plain.norm_before_residual, plain.norm_before_fc, plain.fc_norm, plain.norm_output} == {False}
    assert eagle3(norm_before_residual=True).norm_before_residual
    assert eagle3(norm_output=True).norm_output
    assert eagle3(draft_vocab_size=None).draft_vocab_size == 151_936
    narrow = eagle3(hidden_size=1280, target_hidden_size=2560)
    assert (narrow.hidden_size, narrow.target_hidden_size) == (1280, 2560)


def test_a_multi_token_head_says_what_its_target_does_not() -> None:
    target = {"model_type": "qwen3_5_moe", "text_config": {**TARGET, **SIZES, "model_type": "qwen3_5_moe_text"}}
    config = MtpConfig.read({"mtp_num_hidden_layers": 2, "rms_norm_eps": 1e-5}, target)
    assert (config.taps, config.layout, config.num_hidden_layers, config.target_layers) == ((-1,), "qwen", 2, 5)
    assert (config.rms_norm_eps, config.hidden_size) == (1e-5, 2560)
    deepseek = {**TARGET, **SIZES, "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    assert MtpConfig.read(deepseek, deepseek).layout == "deepseek"
    with pytest.raises(ModelUnavailable, match="multi-token head of a qwen3 model"):
        MtpConfig.read({}, {**TARGET, **SIZES})
