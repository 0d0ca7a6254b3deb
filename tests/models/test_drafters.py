"""Feature drafters of published formats: those that fit, those refused before anything is loaded, and why."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from app.models.pairing import default_draft, is_best_match, refusal
from app.models.safe_files import read_header, read_integers
from tests.models.drafters import (
    DFLASH,
    DFLASH_TENSORS,
    EAGLE3,
    EAGLE3_TENSORS,
    LAYER,
    MAIN,
    MTP,
    MTP_TENSORS,
    catalog,
    layer_tensors,
    write_drafter,
    write_main,
)
from tests.models.folders import tensors_of, tokenizer, write_model

NEXT = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "transformer_layer_config": {**LAYER, "num_hidden_layers": 2},
    "aux_hidden_state_layer_ids": [2, 4, 6],
    "mask_token_id": 8,
    "draft_vocab_size": 16,
}


def reason(root: Path, config: dict[str, Any], tensors: Any, *, d2t: tuple[int, ...] = (), **main: Any) -> str:
    """Return why the drafter is refused; "" when it fits."""
    write_main(root / "main", **main)
    write_drafter(root / "draft", config, tensors, d2t=d2t)
    models = catalog(root)
    message = refusal(models["main"], models["draft"])
    assert "\n" not in message
    assert not message or "; " in message, "it says what to do"
    assert str(root) not in message
    assert models["draft"].kind == "drafter"
    assert "drafter itself" in refusal(models["draft"], models["main"])
    return message


def without(tensors: Any, *names: str) -> dict[str, Any]:
    return {name: info for name, info in tensors.items() if name not in names}


# --- DFlash -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": None, "num_target_layers": None, "dflash_config": {**DFLASH["dflash_config"], "block_size": 6}},
        {"dflash_config": {"num_target_layers": 8, "mask_token_id": 9, "target_layer_ids": [1, 3, 5]}},
        {"dflash_config": None, "mask_token_id": 9, "target_layer_ids": [0, 1, 7]},
        {"dflash_config": {"mask_token_id": 15}, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
        {"dflash_config": {"mask_token_id": 8, "target_layer_ids": [1, 3, 5]}},
    ],
    ids=["old", "section", "depth in the section", "top", "default taps", "a mask that nobody writes"],
)
def test_every_layout_of_a_dflash_config_fits(tmp_path: Path, changes: dict[str, Any]) -> None:
    third = layer_tensors("layers.2") if changes.get("num_hidden_layers") == 3 else {}
    assert reason(tmp_path, {**DFLASH, **changes}, {**DFLASH_TENSORS, **third}) == ""


def test_the_speculators_format_fits(tmp_path: Path) -> None:
    assert reason(tmp_path, SPECULATORS, DFLASH_TENSORS) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 5}, "made for a hidden size of 5, the main model has 4"),
        ({"num_target_layers": 36}, "made for 36 layers, the main model has 8"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3, 8]}}, "reads layers that the main model"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 1, 3]}}, "twice or out of order"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3]}}, "fc.weight is 4 x 12, .* ask for 4 x 8"),
        ({"vocab_size": 17}, "made for 17 tokens, the main model has 16"),
        ({"dflash_config": {"mask_token_id": 16}}, "mask token 16 is beyond the main model's 16 tokens"),
        ({"dflash_config": {"mask_token_id": 3}}, "mask token 3 is an ordinary token"),
        ({"dflash_config": {"mask_token_id": 10}}, "mask token 10 is a special token in the answers"),
        ({"dflash_config": {"mask_token_id": 11}}, "mask token 11 is a special token in the answers"),
        ({"dflash_config": {}}, "names no mask_token_id"),
        ({"block_size": None}, "names no block_size"),
        ({"block_size": 1}, "no usable block_size"),
        ({"block_size": 66}, "blocks of 66 tokens"),
        ({"sample_from_anchor": True}, "anchor's own slot"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"num_attention_heads": "two"}, "no usable num_attention_heads"),
    ],
)
def test_a_dflash_drafter_that_was_made_for_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    changes = {**changes}
    if changes.get("dflash_config"):
        changes["dflash_config"] = {"target_layer_ids": [1, 3, 5], **changes["dflash_config"]}
    assert re.search(words, reason(tmp_path, {**DFLASH, **changes}, DFLASH_TENSORS))


def test_missing_and_quantised_tensors_are_refused(tmp_path: Path) -> None:
    packed = {**DFLASH_TENSORS, "fc.scales": ("F16", (4, 1))}
    missing = without(DFLASH_TENSORS, "fc.weight")
    assert "its weights lack the tensor fc.weight" in reason(tmp_path / "one", DFLASH, missing)
    assert "it is quantised" in reason(tmp_path / "two", DFLASH, packed)


def test_a_truncated_drafter_is_refused(tmp_path: Path) -> None:
    write_main(tmp_path / "main")
    file = write_drafter(tmp_path / "draft", DFLASH, DFLASH_TENSORS) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    models = catalog(tmp_path)
    assert "model.safetensors is truncated or corrupt" in refusal(models["main"], models["draft"])


# --- EAGLE-3 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eagle_config": None},
        {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 4, 8]},
        {
            **dict.fromkeys(LAYER),
            "num_hidden_layers": None,
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {**LAYER, "num_hidden_layers": 1},
        },
    ],
    ids=["own section", "default ids", "top", "speculators"],
)
def test_every_layout_of_an_eagle3_config_fits(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert reason(tmp_path, {**EAGLE3, **changes}, EAGLE3_TENSORS, d2t=(0, 5, 13)) == ""


@pytest.mark.parametrize(
    ("changes", "tensors", "d2t", "words"),
    [
        ({}, {}, (0, 5, 14), "its d2t maps to ids beyond the main model's 16 tokens"),
        ({}, {}, (-1, 5, 13), "its d2t maps to ids beyond"),
        ({}, {"d2t": ("I64", (2,))}, (), "its d2t is 2, its config.json and the main model ask for 3"),
        ({}, {"d2t": None}, (), "has no table d2t"),
        ({}, {"t2d": ("BOOL", (17,))}, (), "its t2d is not a table"),
        ({}, {"lm_head.weight": ("F16", (4, 4))}, (), "its lm_head.weight is 4 x 4"),
        (
            {},
            {"fc.weight": ("F16", (4, 8))},
            (),
            "its fc.weight is 4 x 8, its config.json and the main model ask for 4 x 12",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}, {}, (), "ask for 4 x 8"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}, {}, (), "reads layers that the main"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}}, {}, (), "reads layers that the main"),
        ({"target_hidden_size": 8}, {}, (), "made for a hidden size of 8"),
        ({"draft_vocab_size": 17}, {}, (), "drafts from 17 tokens, the main model has 16"),
        ({"vocab_size": 15}, {}, (), "made for 15 tokens"),
        ({"num_hidden_layers": 2}, {}, (), "an EAGLE-3 drafter here has one"),
        ({"fc_norm": True}, {}, (), "norms the states before it joins them"),
        ({"fc_norm": True, "norm_before_fc": True}, {}, (), "both norm_before_fc and fc_norm"),
        ({"architectures": ["EagleLlamaForCausalLM"], "draft_vocab_size": None}, {}, (), "choose an EAGLE-3 one"),
    ],
)
def test_an_eagle3_drafter_that_was_made_for_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Any], d2t: tuple[int, ...], words: str
) -> None:
    drafter_tensors = {name: info for name, info in {**EAGLE3_TENSORS, **tensors}.items() if info is not None}
    assert words in reason(tmp_path, {**EAGLE3, **changes}, drafter_tensors, d2t=d2t)


def test_integers_are_read_from_their_place_in_the_file(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "draft", EAGLE3, EAGLE3_TENSORS, d2t=(1, -2, 1 << 40))
    assert read_integers(folder, read_header(folder / "model.safetensors")["d2t"]) == [1, -2, 1 << 40]


# --- MTP --------------------------------------------------------------------------------------------------------


def test_a_multi_token_head_in_a_folder_of_its_own_fits_its_family(tmp_path: Path) -> None:
    assert reason(tmp_path / "one", MTP, MTP_TENSORS, **NEXT) == ""
    refusal = "the multi-token head of a qwen3 model cannot run here"
    assert refusal in reason(tmp_path / "two", MTP, MTP_TENSORS)
    wide = {**MTP_TENSORS, "mtp.fc.weight": ("F16", (4, 9))}
    assert "mtp.fc.weight is 4 x 9" in reason(tmp_path / "three", MTP, wide, **NEXT)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (NEXT, "mtp.fc.weight"),
        ({"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"]}, "model.mtp.fc.weight"),
        (
            {"model_type": "deepseek_v3", "architectures": ["DeepseekV3"], "num_nextn_predict_layers": 1},
            "model.layers.8.eh_proj.weight",
        ),
    ],
)
def test_a_head_inside_a_checkpoint_drafts_for_its_own_model(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    write_main(tmp_path / "main", **config)
    prefix = name.removesuffix("mtp.fc.weight")
    rest = {} if prefix == name else {f"{prefix}{tensor}": info for tensor, info in MTP_TENSORS.items()}
    head = {**rest, name: ("F16", (4, 8))}
    own = {**tensors_of(16, MAIN), **head}
    write_drafter(tmp_path / "head", {}, own)
    (tmp_path / "head" / "model.safetensors").replace(tmp_path / "main" / "model.safetensors")
    main = catalog(tmp_path)["main"]
    assert main.head is not None
    assert (main.head.id, main.head.method, main.head.size_bytes) == (
        "main",
        "mtp",
        2 * sum(math.prod(shape) for _, shape in head.values()),
    )
    assert not refusal(main, main.head)
    assert default_draft(main, [main]) == main.head


def test_a_model_without_a_head_has_none(tmp_path: Path) -> None:
    write_main(tmp_path / "main", model_type="deepseek_v3")
    assert catalog(tmp_path)["main"].head is None


# --- every tensor ----------------------------------------------------------------------------------------------


def test_the_sizes_of_a_sparse_head_are_left_to_the_worker(tmp_path: Path) -> None:
    dense = {name: info for name, info in MTP_TENSORS.items() if ".mlp." not in name}
    experts = {f"mtp.layers.0.mlp.experts.{index}.up_proj.weight": ("F16", (3, 4)) for index in range(2)}
    assert reason(tmp_path / "one", MTP, {**dense, **experts}, **NEXT) == ""
    assert "lack" in reason(tmp_path / "two", MTP, without({**dense, **experts}, "mtp.norm.weight"), **NEXT)


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (DFLASH, {**DFLASH_TENSORS, "embed_tokens.weight": ("F16", (16, 4)), "lm_head.weight": ("F16", (16, 4))}),
        (DFLASH, {f"model.{name}": info for name, info in DFLASH_TENSORS.items()}),
        (
            {**DFLASH, "attention_bias": True, "num_hidden_layers": 1},
            {
                **{name: info for name, info in DFLASH_TENSORS.items() if "layers.1" not in name},
                **{f"layers.0.self_attn.{name}_proj.bias": ("F16", (4 if name in "qo" else 2,)) for name in "qkvo"},
            },
        ),
        (EAGLE3, {name.replace("midlayer", "layers.0"): info for name, info in EAGLE3_TENSORS.items()}),
        (EAGLE3, {"embed_tokens.weight": ("F16", (16, 4)), **EAGLE3_TENSORS}),
        ({**EAGLE3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, EAGLE3_TENSORS),
    ],
    ids=["borrowed", "prefix", "bias", "layers.0", "own embedding", "rope"],
)
def test_what_published_checkpoints_hold_besides_fits(tmp_path: Path, config: dict[str, Any], tensors: Any) -> None:
    assert reason(tmp_path, config, tensors) == ""


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        (
            DFLASH,
            without(DFLASH_TENSORS, "layers.1.mlp.up_proj.weight"),
            "its weights lack the tensor layers.1.mlp.up_proj.weight, which its config.json asks for; download",
        ),
        ({**DFLASH, "num_hidden_layers": 3}, DFLASH_TENSORS, "lack layers.2.input_layernorm.weight and 10 more"),
        ({**DFLASH, "num_hidden_layers": 1}, DFLASH_TENSORS, "hold layers.1.input_layernorm.weight and 10 more"),
        ({**DFLASH, "num_hidden_layers": 1_000_000}, DFLASH_TENSORS, "asks for 1000000 layers"),
        (
            DFLASH,
            {**DFLASH_TENSORS, "layers.0.mlp.down_proj.weight": ("F16", (2, 6))},
            "its layers.0.mlp.down_proj.weight is 2 x 6, its config.json and the main model ask for 4 x 6",
        ),
        (DFLASH, {**DFLASH_TENSORS, "fc.weight": ("U8", (4, 12))}, "its fc.weight is stored as U8"),
        ({**DFLASH, "num_key_value_heads": 3}, DFLASH_TENSORS, "its 2 attention heads cannot share 3"),
        ({**DFLASH, "partial_rotary_factor": 50.0}, DFLASH_TENSORS, "covers 100 of 2 dimensions of a head"),
        ({**DFLASH, "rope_scaling": {"rope_type": "odd"}}, DFLASH_TENSORS, "of the kind odd, which is not supported"),
        ({**DFLASH, "rope_scaling": {"rope_type": "yarn"}}, DFLASH_TENSORS, "gives no usable factor"),
        ({**DFLASH, "rope_scaling": {"type": "linear", "factor": "x"}}, DFLASH_TENSORS, "gives no usable factor"),
        (
            {**DFLASH, "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 32}},
            DFLASH_TENSORS,
            "gives no factors",
        ),
        (EAGLE3, without(EAGLE3_TENSORS, "midlayer.hidden_norm.weight"), "lack the tensor midlayer.hidden_norm"),
        (EAGLE3, {"midlayer.extra": ("F16", (1,)), **EAGLE3_TENSORS}, "hold the tensor midlayer.extra"),
    ],
)
def test_a_checkpoint_that_is_not_what_its_config_says_is_refused(
    tmp_path: Path, config: dict[str, Any], tensors: Any, words: str
) -> None:
    assert words in reason(tmp_path, config, tensors)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (without(MTP_TENSORS, "mtp.layers.0.self_attn.k_norm.weight"), "lack the tensor mtp.layers.0.self_attn.k_norm"),
        ({**MTP_TENSORS, "mtp.layers.1.norm": ("F16", (4,))}, "hold the tensor mtp.layers.1.norm"),
        ({**MTP_TENSORS, "mtp.layers.0.mlp.up_proj.weight": ("F16", (5, 4))}, "is 5 x 4, .* ask for 6 x 4"),
    ],
)
def test_a_head_with_other_layers_than_its_main_model_is_refused(tmp_path: Path, tensors: Any, words: str) -> None:
    assert re.search(words, reason(tmp_path, MTP, tensors, **NEXT))


def test_a_drafter_with_another_tokenizer_beside_it_is_refused(tmp_path: Path) -> None:
    main, folder = write_main(tmp_path / "main"), write_drafter(tmp_path / "draft", DFLASH, DFLASH_TENSORS)
    own = folder / "tokenizer.json"

    def refusal_with(content: str) -> str:
        own.write_text(content)
        models = catalog(tmp_path)
        return refusal(models["main"], models["draft"])

    assert refusal_with((main / "tokenizer.json").read_text()) == ""
    assert refusal_with(json.dumps(tokenizer(list("abcdefgh"), {"<another mask>": 9}))) == ""
    foreign = refusal_with(json.dumps(tokenizer(list("abxdefgh"))))
    assert "made for another tokenizer: token 2 is 'c' in the main model and 'x' in the draft; choose" in foreign
    assert "tokenizer.json is not valid; download" in refusal_with("{")
    assert "tokenizer.json is not valid; download" in refusal_with('{"model": 3}')


# --- choosing ---------------------------------------------------------------------------------------------------


def test_the_default_drafter_is_the_best_method_that_fits(tmp_path: Path) -> None:
    write_main(tmp_path / "demo-main", **NEXT)
    added = {"<|mask|>": 8, "<|end|>": 10, "<|turn|>": 11}
    write_model(tmp_path / "demo-small", rows=12, vocab_size=12, added=added)
    write_drafter(tmp_path / "demo-main-eagle3", EAGLE3, EAGLE3_TENSORS)
    write_drafter(tmp_path / "demo-main-mtp", MTP, MTP_TENSORS)
    write_drafter(tmp_path / "demo-main-dflash", DFLASH, DFLASH_TENSORS)
    write_drafter(tmp_path / "demo-main-wrong", {**DFLASH, "num_target_layers": 9}, DFLASH_TENSORS)
    models = catalog(tmp_path)
    main = models["demo-main"]
    for expected in ("demo-main-dflash", "demo-main-mtp", "demo-main-eagle3", "demo-small"):
        best = default_draft(main, list(models.values()))
        assert best is not None
        assert best.id == expected
        del models[expected]
    assert default_draft(main, list(models.values())) is None


def test_a_broken_drafter_is_never_the_default_nor_in_the_way_of_a_sound_one(tmp_path: Path) -> None:
    write_main(tmp_path / "demo-main")
    write_drafter(tmp_path / "demo-main-dflash", DFLASH, without(DFLASH_TENSORS, "layers.0.mlp.up_proj.weight"))
    write_drafter(tmp_path / "demo-main-eagle3", EAGLE3, EAGLE3_TENSORS)
    cut = write_drafter(tmp_path / "demo-main-eagle3-cut", EAGLE3, EAGLE3_TENSORS)
    (cut / "model.safetensors").write_bytes(b"")
    bare = write_drafter(tmp_path / "demo-main-eagle3-bare", EAGLE3, EAGLE3_TENSORS)
    (bare / "config.json").unlink()
    models = catalog(tmp_path)
    assert default_draft(models["demo-main"], list(models.values())) == models["demo-main-eagle3"]
    assert models["demo-main-eagle3-cut"].method == "eagle3"


def test_the_default_drafter_may_be_limited_to_methods(tmp_path: Path) -> None:
    write_main(tmp_path / "demo-main")
    write_drafter(tmp_path / "demo-main-eagle3", EAGLE3, EAGLE3_TENSORS)
    write_drafter(tmp_path / "demo-main-dflash", DFLASH, DFLASH_TENSORS)
    by_id = catalog(tmp_path)
    main, models = by_id["demo-main"], list(by_id.values())
    assert default_draft(main, models, ("eagle3", "ngram")) == by_id["demo-main-eagle3"]
    assert default_draft(main, models, ("mtp",)) is None


def test_a_drafter_is_not_the_default_of_a_model_whose_name_is_farther_from_its_own(tmp_path: Path) -> None:
    write_main(tmp_path / "demo-main")
    write_main(tmp_path / "demo-other")
    write_drafter(tmp_path / "demo-main-dflash", DFLASH, DFLASH_TENSORS)
    by_id = catalog(tmp_path)
    models = list(by_id.values())
    main, other, drafter = by_id["demo-main"], by_id["demo-other"], by_id["demo-main-dflash"]
    assert not refusal(other, drafter), "shapes alone do not tell"
    assert default_draft(main, models) == drafter
    assert default_draft(other, models) is None
    assert not is_best_match(other, drafter, models)
    assert is_best_match(other, drafter, [other, drafter]), "there is nobody nearer"
