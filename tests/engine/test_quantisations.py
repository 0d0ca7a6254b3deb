"""Checkpoints that mlx-lm's converter writes serve and draft: every width, group size, mode, recipe and layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.convert import QUANT_RECIPES, convert
from mlx_lm.models import qwen3, qwen3_moe
from mlx_lm.utils import load_model

from app.core.request import Request, SamplingParameters
from app.core.step import DecodeRow, DecodeStep, PrefillRow, PrefillStep
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine import memory
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.loader import load_unit
from app.engine.loading.opening import open_engine
from app.models.footprint import drafter_footprint, main_footprint
from tests.engine.driving import naive
from tests.engine.test_demo_pairs import DEMO_MODELS, PAIRS
from tests.shares import one_in
from tests.tiny import fill_at_random, tiny_config, write_tiny_tokenizer

GREEDY = SamplingParameters(temperature=0.0)
PROMPT = (72, 101, 108, 108, 111, 32, 72, 101, 108, 108, 111, 32, 72, 101)
OUTPUT_TOKENS = 8
TRAP = "from pathlib import Path\n\nPath(__file__).with_name('it-ran').write_text('')\n"
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 2, "vocab_size": 260}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def write_original(folder: Path, *, experts: bool = False, noise: float = 0.0) -> Path:
    """Write a checkpoint as published: half precision, several files with an index, code that `auto_map` names."""
    config = tiny_config("qwen3") | WIDE | (EXPERTS if experts else {}) | {"eos_token_id": 258}
    module: Any = qwen3_moe if experts else qwen3
    model = module.Model(module.ModelArgs.from_dict(config))
    fill_at_random(model, seed=3, noise=noise)
    model.set_dtype(mx.float16)
    folder.mkdir()
    write_shards(folder, dict(tree_flatten(model.parameters())))
    config |= {"torch_dtype": "float16", "auto_map": {"AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_tiny.py").write_text(TRAP)
    write_tiny_tokenizer(folder)
    return folder


def write_shards(folder: Path, weights: Mapping[str, mx.array]) -> None:
    """Write three files and their index, named as mlx-lm names them."""
    names = sorted(weights)
    index = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        mine = {name: weights[name] for name in names[number::3]}
        mx.save_safetensors(str(folder / file), mine, metadata={"format": "mlx"})
        index |= dict.fromkeys(mine, file)
    total = sum(value.nbytes for value in weights.values())
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def split_up(folder: Path) -> Path:
    """Split what the converter wrote into several files, as the converter does above 5 GB."""
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    write_shards(folder, weights)
    return folder


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    return {
        "dense": write_original(root / "dense"),
        "draft": write_original(root / "draft", noise=0.03),
        "experts": write_original(root / "experts", experts=True),
    }


def load(spec: ModelSpecification) -> LoadedUnit:
    steps = load_unit(spec)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            loaded: LoadedUnit = finished.value
            return loaded


def specification(folder: Path, draft: Path) -> ModelSpecification:
    drafts = (DrafterSpecification("small", str(draft)),)
    return ModelSpecification(id="tiny", path=str(folder), drafters=drafts, max_context_tokens=256)


def truth(folder: Path) -> list[int]:
    """Return the tokens that mlx-lm alone generates, computing in the same dtype as Paceline."""
    model, _ = load_model(folder)
    if memory.on_cpu():
        model.set_dtype(mx.float32)
    return naive(model, PROMPT, OUTPUT_TOKENS, GREEDY)


def speculated(unit: LoadedUnit, method: str) -> tuple[list[int], int]:
    """Return the tokens and the number of accepted drafts of an answer to `PROMPT`, with up to 3 drafts per step."""
    engine = open_engine(unit)
    engine.admit(Request(id="a", prompt_tokens=PROMPT, max_tokens=OUTPUT_TOKENS, sampling=GREEDY))
    engine.step(PrefillStep((PrefillRow("a", PROMPT, 0, len(PROMPT) - 1),)))
    tokens, computed, accepted = list(PROMPT), len(PROMPT) - 1, 0
    while (left := OUTPUT_TOKENS - (len(tokens) - len(PROMPT))) > 0:
        row = DecodeRow("a", tokens, len(PROMPT), computed, left, method=method, num_draft_tokens=min(3, left - 1))
        outcome = engine.step(DecodeStep((row,))).outcomes[0]
        tokens += outcome.emitted
        computed, accepted = outcome.computed, accepted + outcome.accepted
    engine.close()
    return tokens[len(PROMPT) :], accepted


def check(folder: Path, draft: Path) -> tuple[LoadedUnit, int]:
    """Check answers, the memory estimate and that no code in the folders ran; return the unit and accepted drafts."""
    spec = specification(folder, draft)
    unit = load(spec)
    wanted = truth(folder)
    output, accepted = speculated(unit, "draft_model")
    assert output == wanted
    assert speculated(unit, "ngram")[0] == wanted
    widen = memory.on_cpu()
    expected = main_footprint(spec, widen=widen).weights_bytes + sum(
        drafter_footprint(drafter, spec, widen=widen).weights_bytes for drafter in spec.drafters
    )
    assert expected == pytest.approx(unit.weights_bytes, rel=0.05)
    assert not list(folder.rglob("it-ran")) + list(draft.rglob("it-ran"))
    return unit, accepted


def widths(model: nn.Module) -> set[tuple[int, int, str]]:
    """Return the bits, group size and mode of each kind of packed layer in the model."""
    packed = (module for _, module in model.named_modules() if hasattr(module, "bits") and hasattr(module, "scales"))
    return {(module.bits, module.group_size, module.mode) for module in packed}


@pytest.mark.parametrize(("bits", "group_size"), one_in(3, [2, 3, 4, 5, 6, 8], [32, 64, 128]))
def test_every_width_and_group_is_served_and_drafted_with(
    tmp_path: Path, originals: dict[str, Path], bits: int, group_size: int
) -> None:
    folder = tmp_path / "converted"
    convert(str(originals["dense"]), str(folder), quantize=True, q_bits=bits, q_group_size=group_size)
    assert list(folder.glob("*.py")), "the converter copies code"
    unit, accepted = check(split_up(folder), originals["draft"])
    assert widths(unit.target) == {(bits, group_size, "affine")}
    assert widths(unit.drafters[0].model) == set()
    assert accepted > 0 or bits < 4


@pytest.mark.parametrize(
    ("kind", "wanted"),
    one_in(2, ["dense", "experts"], [(4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")]),
)
def test_floating_point_modes_are_served_and_drafted_with(
    tmp_path: Path, originals: dict[str, Path], kind: str, wanted: tuple[int, int, str]
) -> None:
    folder = tmp_path / "converted"
    convert(str(originals[kind]), str(folder), quantize=True, q_mode=wanted[2])
    unit, _ = check(folder, originals["draft"])
    assert wanted in widths(unit.target)


@pytest.mark.parametrize("recipe", QUANT_RECIPES)
def test_mixed_recipes_are_served_and_drafted_with(tmp_path: Path, originals: dict[str, Path], recipe: str) -> None:
    folder = tmp_path / "converted"
    convert(str(originals["dense"]), str(folder), quantize=True, q_group_size=64, quant_predicate=recipe)
    unit, _ = check(split_up(folder), originals["draft"])
    low, high = (int(bits) for bits in recipe.removeprefix("mixed_").split("_"))
    assert widths(unit.target) == {(low, 64, "affine"), (high, 64, "affine")}


@pytest.mark.parametrize(("bits", "draft_bits"), [(4, 8), (8, 2), (3, 4)])
def test_a_drafter_may_have_other_bits_than_its_target(
    tmp_path: Path, originals: dict[str, Path], bits: int, draft_bits: int
) -> None:
    folder, draft = tmp_path / "converted", tmp_path / "converted draft"
    convert(str(originals["dense"]), str(folder), quantize=True, q_bits=bits)
    convert(str(originals["draft"]), str(draft), quantize=True, q_bits=draft_bits, q_group_size=32)
    unit, _ = check(folder, split_up(draft))
    assert widths(unit.target) == {(bits, 64, "affine")}
    assert widths(unit.drafters[0].model) == {(draft_bits, 32, "affine")}


def test_experts_keep_their_router_wide_where_the_config_says_so(tmp_path: Path, originals: dict[str, Path]) -> None:
    folder = tmp_path / "converted"
    convert(str(originals["experts"]), str(folder), quantize=True)
    unit, _ = check(folder, originals["draft"])
    assert {(4, 64, "affine")} <= widths(unit.target) <= {(4, 64, "affine"), (8, 64, "affine")}


def test_layers_of_their_own_widths_as_dwq_writes_them_are_served(tmp_path: Path, originals: dict[str, Path]) -> None:
    """mlx-lm's DWQ and dynamic quantisation state each layer's width in the config, and leave some unquantised."""

    def choose(path: str, _module: nn.Module) -> bool | dict[str, Any]:
        if "q_proj" in path:
            return {"group_size": 32, "bits": 5, "mode": "affine"}
        if "lm_head" in path:
            return {"group_size": 32, "bits": 8, "mode": "mxfp8"}
        return "layers.1.mlp" not in path

    folder = tmp_path / "converted"
    convert(str(originals["dense"]), str(folder), quantize=True, q_bits=4, q_group_size=128, quant_predicate=choose)
    unit, _ = check(folder, originals["draft"])
    assert widths(unit.target) == {(4, 128, "affine"), (5, 32, "affine"), (8, 32, "mxfp8")}


@pytest.mark.parametrize("zeros", [True, False])
def test_checkpoints_packed_by_autoawq_are_served(tmp_path: Path, originals: dict[str, Path], zeros: bool) -> None:
    weights: dict[str, mx.array] = {}
    for file in originals["dense"].glob("*.safetensors"):
        loaded: Any = mx.load(str(file))
        weights |= loaded
    packed: dict[str, mx.array] = {}
    for name, value in weights.items():
        if "proj.weight" in name:
            packed |= awq(name.removesuffix(".weight"), value.astype(mx.float32), zeros=zeros)
        else:
            packed[name] = value
    folder = tmp_path / "awq"
    folder.mkdir()
    write_shards(folder, packed)
    config = json.loads((originals["dense"] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(folder)
    unit, _ = check(folder, originals["draft"])
    assert widths(unit.target) == {(4, 64, "affine")}
    if zeros:  # the estimate counts zero points, which published checkpoints have
        loaded_bytes = sum(value.nbytes for _, value in tree_flatten(unit.target.parameters()))
        footprint = main_footprint(unit.spec, widen=memory.on_cpu())
        assert footprint.weights_bytes == pytest.approx(loaded_bytes, rel=1e-3)


def awq(name: str, weight: mx.array, *, zeros: bool) -> dict[str, mx.array]:
    """Pack a matrix [outputs, inputs] as AutoAWQ does: [inputs, outputs / 8], with each eight columns reordered."""
    outputs, inputs = weight.shape
    groups = weight.reshape(outputs, inputs // 64, 64)
    scales = mx.max(mx.abs(groups), axis=-1) / 7
    places = mx.clip(mx.round(groups / scales[..., None]) + 8, 0, 15).reshape(outputs, inputs).astype(mx.uint32)
    order = mx.array([0, 2, 4, 6, 1, 3, 5, 7])

    def pack(values: mx.array) -> mx.array:
        eights = values.reshape(values.shape[0], -1, 8)[..., order]
        return (eights << (4 * mx.arange(8, dtype=mx.uint32))).sum(axis=-1).astype(mx.uint32).view(mx.int32)

    parts = {f"{name}.qweight": pack(places.T), f"{name}.scales": scales.T.astype(mx.float16)}
    if zeros:
        parts[f"{name}.qzeros"] = pack(mx.full((inputs // 64, outputs), 8, dtype=mx.uint32))
    return parts


@pytest.mark.parametrize(("method", "bits"), one_in(3, ["dflash", "eagle3", "mtp"], [3, 4, 8]))
def test_a_drafter_that_reads_features_is_packed_as_its_target_is(tmp_path: Path, method: str, bits: int) -> None:
    original, drafter = (DEMO_MODELS / name for name in PAIRS[method])
    folder = tmp_path / "converted"
    convert(str(original), str(folder), quantize=True, q_bits=bits, q_group_size=32)
    drafts = (DrafterSpecification(drafter.name, str(drafter), method),)
    spec = ModelSpecification(id="packed", path=str(folder), drafters=drafts, max_context_tokens=256)
    unit = load(spec)
    packed = (max(4, bits), 32, "affine")
    assert widths(unit.drafters[0].model) == {packed}
    taken = sum(value.nbytes for _, value in tree_flatten(unit.drafters[0].model.parameters()))
    widen = memory.on_cpu()
    assert drafter_footprint(drafts[0], spec, widen=widen).weights_bytes == pytest.approx(taken, rel=0.1)
    free = load(ModelSpecification(id="whole", path=str(original), drafters=drafts, max_context_tokens=256))
    whole = sum(value.nbytes for _, value in tree_flatten(free.drafters[0].model.parameters()))
    assert taken < (0.3 if packed[0] == 4 else 0.4) * whole
    assert speculated(unit, method)[0] == truth(folder)
