"""Drafters of every method load together with one main model; those that cannot be used are left out."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest
from mlx.utils import tree_flatten

from app.core.errors import ModelUnavailable
from app.core.reason import Reason
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine import memory
from app.engine.drafters.mtp import MtpModel, _layer
from app.engine.drafters.registry import REGISTRY
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.loader import load_unit
from app.engine.loading.opening import open_engine
from app.models.drafters.formats import MtpConfig
from app.models.folder import inspect_folder
from tests.engine.published import (
    DRAFT_TOKENS,
    mtp_weights,
    published_experts,
    target_config,
    write_dflash,
    write_eagle3,
    write_mtp,
)
from tests.tiny import BYTE_VOCABULARY_SIZE, write_tiny_model

WRITERS: dict[str, Callable[[Path], Path]] = {"dflash": write_dflash, "eagle3": write_eagle3, "mtp": write_mtp}

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def specification(root: Path, *methods: str, family: str = "qwen3") -> ModelSpecification:
    """Write a tiny main model and these drafters, each to a folder named after its method; return the specification."""
    target = write_tiny_model(root / "main", family)
    drafts = []
    for method in methods:
        if method == "draft_model":
            folder = write_tiny_model(root / method, "qwen3", noise=0.03)
        else:
            folder = WRITERS[method](root / method)
        drafts.append(DrafterSpecification(f"the-{method}", str(folder), method))
    return ModelSpecification(id="main", path=str(target), drafters=tuple(drafts), max_rows=2, prefill_chunk_tokens=16)


def load(spec: ModelSpecification) -> LoadedUnit:
    steps = load_unit(spec, slice_bytes=4096)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            unit: LoadedUnit = finished.value
            return unit


def test_several_drafters_are_one_unit(tmp_path: Path) -> None:
    spec = specification(tmp_path, "dflash", "eagle3", "draft_model")
    unit = load(spec)
    assert [(drafter.method, drafter.id) for drafter in unit.drafters] == [
        ("dflash", "the-dflash"),
        ("eagle3", "the-eagle3"),
        ("draft_model", "the-draft_model"),
    ]
    sizes = [drafter.vocabulary_size for drafter in unit.drafters]
    assert sizes == [BYTE_VOCABULARY_SIZE, DRAFT_TOKENS, BYTE_VOCABULARY_SIZE]
    modules = (unit.target, *(drafter.model for drafter in unit.drafters))
    weights = sum(value.nbytes for module in modules for _, value in tree_flatten(module.parameters()))
    assert unit.weights_bytes == weights <= memory.footprint(spec).total_bytes
    assert set(open_engine(unit).limits.drafters) >= {"dflash", "eagle3", "draft_model", "ngram"}


def test_only_the_chosen_methods_may_draft(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(specification(tmp_path, "dflash"), methods=("dflash",))
    limits = open_engine(load(spec)).limits
    assert limits.drafters == ("dflash",)
    assert str(limits.unavailable["ngram"]) == "this model's settings allow only dflash to draft"


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_a_loaded_drafter_has_the_weights_that_were_written(tmp_path: Path, method: str) -> None:
    unit = load(specification(tmp_path, method))
    written = mx.load(str(tmp_path / method / "model.safetensors"))
    loaded = dict(tree_flatten(unit.drafters[0].model.parameters()))
    assert loaded.keys() == written.keys() - {"t2d"}
    assert all(mx.array_equal(value, written[name]) for name, value in loaded.items())
    assert unit.drafters[0].max_context_tokens == 4096


def test_half_precision_becomes_float32_on_the_cpu_and_tables_stay_whole_numbers(tmp_path: Path) -> None:
    spec = specification(tmp_path, "eagle3")
    file = str(tmp_path / "eagle3" / "model.safetensors")
    halved = {
        name: value if value.dtype in {mx.int64, mx.bool_} else value.astype(mx.bfloat16)
        for name, value in mx.load(file).items()
    }
    mx.save_safetensors(file, halved)
    loaded = dict(tree_flatten(load(spec).drafters[0].model.parameters()))
    wide = mx.float32 if memory.on_cpu() else mx.bfloat16
    assert {value.dtype for name, value in loaded.items() if name != "d2t"} == {wide}
    assert loaded["d2t"].dtype == mx.int64


def test_a_head_is_loaded_from_its_folder_or_from_inside_the_checkpoint(tmp_path: Path) -> None:
    unit = load(specification(tmp_path / "own", "mtp", family="qwen3_next"))
    inside = specification(tmp_path / "inside", family="qwen3_next")
    mx.save_safetensors(str(tmp_path / "inside" / "main" / "model-head.safetensors"), mtp_weights())
    spec = ModelSpecification(
        id="main", path=inside.path, drafters=(DrafterSpecification("main", inside.path, "mtp"),), max_rows=2
    )
    loaded = load(spec)
    parts = [dict(tree_flatten(source.drafters[0].model.parameters())) for source in (unit, loaded)]
    assert parts[0].keys() == parts[1].keys()
    assert all(mx.array_equal(value, parts[1][name]) for name, value in parts[0].items())
    assert loaded.weights_bytes == unit.weights_bytes <= memory.footprint(spec).total_bytes
    assert "mtp" in open_engine(loaded).limits.drafters


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_experts_and_norms_of_a_head_become_what_mlx_lm_keeps(tmp_path: Path, *, fused: bool, centred: bool) -> None:
    config = {**target_config("qwen3_next"), **EXPERTS}
    wanted = mtp_weights(**EXPERTS)
    tensors = published_experts(wanted, fused=fused)
    if centred:
        tensors = {name: value - 1.0 if "norm" in name else value for name, value in tensors.items()}
    folders = [write_mtp(tmp_path / name, weights) for name, weights in (("a", wanted), ("b", tensors))]
    plain, stacked = (
        dict(tree_flatten(MtpModel.load(inspect_folder(folder), config).parameters())) for folder in folders
    )
    assert plain.keys() == stacked.keys() >= {"layer.mlp.switch_mlp.gate_proj.weight"}
    assert all(mx.allclose(value, stacked[name], atol=1e-6) for name, value in plain.items())


def test_a_head_leaves_the_config_of_its_target_as_it_was() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = {**target_config("qwen3_next"), "model_type": "qwen3_5", "rope_parameters": rope}
    before = deepcopy(config)
    _layer(MtpConfig.read({}, config), config, ())
    assert config == before


def test_a_head_with_a_tensor_too_many_is_refused(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "head", {**mtp_weights(), "mtp.layers.1.strange.weight": mx.zeros((2,))})
    with pytest.raises(ModelUnavailable, match="its tensors are not those of its config"):
        MtpModel.load(inspect_folder(folder), target_config("qwen3_next"))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda root: write_dflash(root, num_target_layers=9), "made for 9 layers, the main model has 2"),
        (lambda root: write_dflash(root, vocab_size=261), "made for 261 tokens"),
        (
            lambda root: write_dflash(root, dflash_config={"mask_token_id": 65, "target_layer_ids": [0, 1]}),
            "mask token 65 is an ordinary token",
        ),
        (
            lambda root: write_dflash(root, dflash_config={"mask_token_id": 259, "target_layer_ids": [1]}),
            "its fc.weight is 32 x 64, its config.json and the main model ask for 32 x 32",
        ),
        (lambda root: write_dflash(root, num_hidden_layers=3), "its weights lack layers.2.input_layernorm.weight"),
        (lambda root: write_eagle3(root, draft_vocab_size=41), "its lm_head.weight is 40 x 32"),
    ],
)
def test_a_drafter_that_does_not_fit_is_left_out(tmp_path: Path, write: Callable[[Path], Path], words: str) -> None:
    spec = specification(tmp_path)
    folder = write(tmp_path / "drafter")
    method = "eagle3" if "eagle" in (folder / "config.json").read_text() else "dflash"
    unit = load(
        ModelSpecification(id="main", path=spec.path, drafters=(DrafterSpecification("d", str(folder), method),))
    )
    reason = unit.load_failures[method]
    assert reason.startswith(f'{method} drafter "d": ')
    assert words in reason
    assert str(tmp_path) not in reason
    assert unit.weights_bytes == load(spec).weights_bytes
    assert open_engine(unit).limits.unavailable[method] == Reason("cannot_draft", {"detail": reason})


def test_a_method_without_a_builder_is_left_out(tmp_path: Path) -> None:
    folder = write_dflash(tmp_path / "drafter")
    spec = specification(tmp_path)
    unit = load(
        ModelSpecification(id="main", path=spec.path, drafters=(DrafterSpecification("d", str(folder), "other"),))
    )
    assert "it is a drafter" in unit.load_failures["other"]


def test_a_drafter_whose_weights_cannot_be_read_is_left_out_and_the_others_draft(tmp_path: Path) -> None:
    spec = specification(tmp_path, "draft_model", "dflash")
    (file,) = Path(spec.drafters[0].path).glob("*.safetensors")
    steps = load_unit(spec, slice_bytes=4096)
    while next(steps)[0] == "checking":
        pass
    file.write_bytes(file.read_bytes()[:-4096])  # a disk that fails after the check
    try:
        while True:
            next(steps)
    except StopIteration as finished:
        unit: LoadedUnit = finished.value
    assert [drafter.method for drafter in unit.drafters] == ["dflash"]
    assert "cannot be read" in unit.load_failures["draft_model"]


def test_a_drafter_that_fails_to_open_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = load(specification(tmp_path, "draft_model", "dflash"))

    def fails(_unit: LoadedUnit) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(REGISTRY["dflash"], "open", fails)
    limits = open_engine(unit).limits
    assert limits.drafters == ("draft_model", "ngram")
    assert limits.unavailable["dflash"] == Reason("cannot_draft", {"detail": "ZeroDivisionError"})
