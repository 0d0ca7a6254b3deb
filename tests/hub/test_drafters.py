"""Feature drafters of published formats: which ones fit, which are refused before anything is loaded, and why."""

import re
from pathlib import Path
from typing import Any

import pytest

from app.core.safe_files import read_header, read_integers
from app.hub.pairing import default_draft, pair, suits
from tests.hub.drafters import (
    DFLASH,
    DFLASH_TENSORS,
    EAGLE3,
    EAGLE3_TENSORS,
    LAYER,
    MTP,
    MTP_TENSORS,
    catalog,
    write_drafter,
    write_main,
)
from tests.hub.folders import write_model

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
    """Why the drafter is refused; "" when it fits."""
    write_main(root / "main", **main)
    write_drafter(root / "draft", config, tensors, d2t=d2t)
    found = catalog(root)
    pairing = pair(found["main"], found["draft"])
    assert "\n" not in pairing.reason
    assert str(root) not in pairing.reason
    assert (found["draft"].kind, pairing.method) == ("drafter", found["draft"].method)
    assert "drafter itself" in pair(found["draft"], found["main"]).reason
    return pairing.reason


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
    assert reason(tmp_path, {**DFLASH, **changes}, DFLASH_TENSORS) == ""


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
    assert "has no tensor fc.weight" in reason(tmp_path / "one", DFLASH, {"norm.weight": ("F16", (4,))})
    assert "it is quantised" in reason(tmp_path / "two", DFLASH, packed)


def test_a_truncated_drafter_is_refused(tmp_path: Path) -> None:
    write_main(tmp_path / "main")
    file = write_drafter(tmp_path / "draft", DFLASH, DFLASH_TENSORS) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    found = catalog(tmp_path)
    assert "model.safetensors is truncated or corrupt" in pair(found["main"], found["draft"]).reason


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
        ({}, {}, (0, 5, 14), "its d2t leads beyond the main model's 16 tokens"),
        ({}, {}, (-1, 5, 13), "its d2t leads beyond"),
        ({}, {"d2t": ("I64", (2,))}, (), "its d2t is not a table of its 3 tokens"),
        ({}, {"d2t": None}, (), "has no table d2t"),
        ({}, {"t2d": ("BOOL", (17,))}, (), "its t2d is not a table"),
        ({}, {"lm_head.weight": ("F16", (4, 4))}, (), "its lm_head.weight is 4 x 4"),
        (
            {},
            {"fc.weight": ("F16", (4, 8))},
            (),
            "its fc.weight is 4 x 8, its config and the main model ask for 4 x 12",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}, {}, (), "ask for 4 x 8"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}}, {}, (), "reads layers that the main"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}}, {}, (), "reads layers that the main"),
        ({"target_hidden_size": 8}, {}, (), "made for a hidden size of 8"),
        ({"draft_vocab_size": 17}, {}, (), "drafts from 17 tokens, the main model has 16"),
        ({"vocab_size": 15}, {}, (), "made for 15 tokens"),
        ({"num_hidden_layers": 2}, {}, (), "an EAGLE-3 drafter here has one"),
        ({"fc_norm": True}, {}, (), "norms the states before it joins them"),
        ({"fc_norm": True, "norm_before_fc": True}, {}, (), "which exclude"),
        ({"architectures": ["EagleLlamaForCausalLM"], "draft_vocab_size": None}, {}, (), "choose an EAGLE-3 one"),
    ],
)
def test_an_eagle3_drafter_that_was_made_for_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Any], d2t: tuple[int, ...], words: str
) -> None:
    kept = {name: info for name, info in {**EAGLE3_TENSORS, **tensors}.items() if info is not None}
    assert words in reason(tmp_path, {**EAGLE3, **changes}, kept, d2t=d2t)


def test_integers_are_read_from_their_place_in_the_file(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "draft", EAGLE3, EAGLE3_TENSORS, d2t=(1, -2, 1 << 40))
    assert read_integers(folder, read_header(folder / "model.safetensors")["d2t"]) == [1, -2, 1 << 40]


# --- MTP --------------------------------------------------------------------------------------------------------


def test_a_multi_token_head_in_a_folder_of_its_own_fits_its_family(tmp_path: Path) -> None:
    assert reason(tmp_path / "one", MTP, MTP_TENSORS, **NEXT) == ""
    refusal = "the multi-token head of a qwen3 model cannot run here"
    assert refusal in reason(tmp_path / "two", MTP, MTP_TENSORS)
    assert "mtp.fc.weight is 4 x 9" in reason(tmp_path / "three", MTP, {"mtp.fc.weight": ("F16", (4, 9))}, **NEXT)


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
    own = {"model.embed_tokens.weight": ("F16", (16, 4)), name: ("F16", (4, 8))}
    write_drafter(tmp_path / "head", {}, own)
    (tmp_path / "head" / "model.safetensors").replace(tmp_path / "main" / "model.safetensors")
    main = catalog(tmp_path)["main"]
    assert main.head is not None
    assert (main.head.id, main.head.method, main.head.size_bytes) == ("main", "mtp", 64)
    assert pair(main, main.head).fits
    assert default_draft(main, [main]) == main.head


def test_a_model_without_a_head_has_none(tmp_path: Path) -> None:
    write_main(tmp_path / "main", model_type="deepseek_v3")
    assert catalog(tmp_path)["main"].head is None


# --- choosing ---------------------------------------------------------------------------------------------------


def test_the_default_drafter_is_the_best_method_that_fits(tmp_path: Path) -> None:
    write_main(tmp_path / "demo-main", **NEXT)
    write_model(tmp_path / "demo-small", rows=1, added={"<|mask|>": 8, "<|end|>": 10, "<|turn|>": 11})
    write_drafter(tmp_path / "demo-main-eagle3", EAGLE3, EAGLE3_TENSORS)
    write_drafter(tmp_path / "demo-main-mtp", MTP, MTP_TENSORS)
    write_drafter(tmp_path / "demo-main-dflash", DFLASH, DFLASH_TENSORS)
    write_drafter(tmp_path / "demo-main-wrong", {**DFLASH, "num_target_layers": 9}, DFLASH_TENSORS)
    found = catalog(tmp_path)
    main = found["demo-main"]
    for expected in ("demo-main-dflash", "demo-main-mtp", "demo-main-eagle3", "demo-small"):
        best = default_draft(main, list(found.values()))
        assert best is not None
        assert best.id == expected
        del found[expected]
    assert default_draft(main, list(found.values())) is None


def test_the_default_drafter_may_be_limited_to_methods(tmp_path: Path) -> None:
    write_main(tmp_path / "demo-main")
    write_drafter(tmp_path / "demo-main-eagle3", EAGLE3, EAGLE3_TENSORS)
    write_drafter(tmp_path / "demo-main-dflash", DFLASH, DFLASH_TENSORS)
    found = catalog(tmp_path)
    main, models = found["demo-main"], list(found.values())
    assert default_draft(main, models, ("eagle3", "ngram")) == found["demo-main-eagle3"]
    assert default_draft(main, models, ("mtp",)) is None


def test_a_drafter_is_not_the_default_of_a_model_whose_name_is_farther_from_its_own(tmp_path: Path) -> None:
    write_main(tmp_path / "demo-main")
    write_main(tmp_path / "demo-other")
    write_drafter(tmp_path / "demo-main-dflash", DFLASH, DFLASH_TENSORS)
    found = catalog(tmp_path)
    models = list(found.values())
    main, other, drafter = found["demo-main"], found["demo-other"], found["demo-main-dflash"]
    assert pair(other, drafter).fits, "shapes alone do not tell"
    assert default_draft(main, models) == drafter
    assert default_draft(other, models) is None
    assert not suits(other, drafter, models)
    assert suits(other, drafter, [other, drafter]), "there is nobody nearer"
