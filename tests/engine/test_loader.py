"""Loading in slices; a broken folder is refused with one line, and no memory stays allocated."""

import inspect
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from app.core.errors import ModelUnavailable
from app.core.request import SamplingParameters
from app.core.step import DecodeRow
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine import memory
from app.engine.drafters.draft_model import DraftModel
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.loader import load_unit
from app.engine.sampling.drawing import SampledRow
from tests.tiny import FAMILIES, tiny_model, write_tiny_model

SMALL_SLICE_BYTES = 4096


def specification(folder: Path, draft: Path | None = None, **changes: Any) -> ModelSpecification:
    drafts = (DrafterSpecification("small", str(draft)),) if draft else ()
    return ModelSpecification(id="tiny", path=str(folder), drafters=drafts, **changes)


def run(spec: ModelSpecification, **options: Any) -> tuple[list[tuple[str, float]], LoadedUnit]:
    steps = load_unit(spec, **options)
    progress = []
    while True:
        try:
            progress.append(next(steps))
        except StopIteration as finished:
            return progress, finished.value


# --- good folders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantised", [False, True])
def test_a_loaded_model_computes_what_was_written(tmp_path: Path, family: str, quantised: bool) -> None:
    write_tiny_model(tmp_path, family, quantised=quantised)
    _, unit = run(specification(tmp_path))
    again = run(specification(tmp_path), slice_bytes=SMALL_SLICE_BYTES)[1]
    tokens = mx.array([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    logits = unit.target(tokens)
    assert mx.array_equal(logits, again.target(tokens))
    assert logits.dtype == mx.float32
    assert (unit.vocabulary_size, unit.drafters) == (260, ())
    assert unit.weights_bytes == sum(value.nbytes for _, value in tree_flatten(unit.target.parameters()))
    assert unit.max_context_tokens == 4096
    assert mx.std(logits).item() > 0.1


def test_half_precision_becomes_float32_on_the_cpu_and_nowhere_else(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", dtype=mx.bfloat16, quantised=True)
    _, unit = run(specification(tmp_path))
    wide = mx.float32 if memory.on_cpu() else mx.bfloat16
    kinds = {value.dtype for _, value in tree_flatten(unit.target.parameters())}
    assert kinds == {wide, mx.uint32}


def test_progress_rises_to_one_through_both_models(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    progress, unit = run(specification(target, draft), slice_bytes=SMALL_SLICE_BYTES)
    fractions = [fraction for _, fraction in progress]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert [phase for phase, _ in progress].count("weights") > 5
    assert list(dict.fromkeys(phase for phase, _ in progress)) == ["checking", "weights", "draft"]
    (loaded,) = unit.drafters
    assert (loaded.method, loaded.id, loaded.vocabulary_size) == ("draft_model", "small", 260)
    assert (loaded.config["model_type"], loaded.max_context_tokens) == ("qwen3", 4096)


def test_weights_are_read_slice_by_slice(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3", dtype=mx.bfloat16)
    memory.release()
    before = mx.get_active_memory()
    steps = load_unit(specification(tmp_path), slice_bytes=SMALL_SLICE_BYTES)
    held = [mx.get_active_memory() - before for phase, _ in steps if phase == "weights"]
    assert held == sorted(held)
    assert 0 < held[0] < held[-1] / 4


def test_the_context_is_the_smaller_of_asked_and_stated(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3", context_tokens=512)
    assert run(specification(tmp_path, max_context_tokens=100))[1].max_context_tokens == 100
    assert run(specification(tmp_path, max_context_tokens=9999))[1].max_context_tokens == 512


@pytest.mark.parametrize("slices", [0, 1, 2, 5])
def test_a_cancelled_load_frees_what_it_read(tmp_path: Path, slices: int) -> None:
    target, draft = pair(tmp_path)
    memory.release()
    before = mx.get_active_memory()
    steps = load_unit(specification(target, draft), slice_bytes=SMALL_SLICE_BYTES)
    for _ in range(slices):
        next(steps)
    steps.close()
    memory.release()
    assert (mx.get_active_memory(), mx.get_cache_memory()) == (before, 0)


def test_a_dropped_unit_frees_everything(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    memory.release()
    before = mx.get_active_memory()
    unit = run(specification(target, draft))[1]
    mx.eval(unit.target(mx.array([[1, 2, 3]])))
    assert mx.get_active_memory() - before >= unit.weights_bytes
    del unit
    memory.release()
    assert mx.get_active_memory() == before


# --- drafts ---------------------------------------------------------------------------------------------------


def test_padding_rows_do_not_keep_a_draft_away(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", "qwen3", vocabulary_size=288)
    draft = write_tiny_model(tmp_path / "draft", "qwen3", vocabulary_size=264)
    unit = run(specification(target, draft))[1]
    assert (unit.vocabulary_size, unit.drafters[0].vocabulary_size) == (288, 264)


def test_a_draft_with_other_tokens_is_left_out(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    left_out(specification(target, draft), 'draft model "small" does not fit "tiny".*token 97')


def test_a_draft_without_rows_for_every_token_is_left_out(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    write_tiny_model(draft, "qwen3", vocabulary_size=258)
    left_out(specification(target, draft), "its embedding of 258 rows lacks token 259")


def test_a_draft_without_a_row_for_pictures_reads_its_last_one_instead(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    write_tiny_model(draft, "qwen3", vocabulary_size=259)
    for folder in (target, draft):
        path = folder / "tokenizer.json"
        path.write_text(path.read_text().replace("<|pad|>", "<|image_pad|>"))
    unit = run(specification(target, draft))[1]
    drafter, tokens = DraftModel.open(unit), [65, 259, 66, 259]
    row = DecodeRow("a", tokens, 4, 3, 50, method="draft_model", num_draft_tokens=2)
    proposal = drafter.propose([row], [SampledRow(SamplingParameters(seed=1), tokens, 4)])
    known = [65, 258, 66, 258]
    same = replace(row, sequence_id="b", tokens=known)
    assert (
        proposal.tokens.tolist()
        == drafter.propose([same], [SampledRow(SamplingParameters(seed=1), tokens, 4)]).tokens.tolist()
    )


@pytest.mark.parametrize("name", ["Qwen3 [4bit]", "what?", "a*b"])
def test_a_folder_may_have_a_name_that_looks_like_a_pattern(tmp_path: Path, name: str) -> None:
    assert run(specification(write_tiny_model(tmp_path / name, "qwen3")))[1].weights_bytes > 0


def test_without_tokenizer_json_equal_files_are_equal_tokens(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    for folder in (target, draft):
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert len(run(specification(target, draft))[1].drafters) == 1
    (draft / "tokenizer.model").write_bytes(b"another one")
    left_out(specification(target, draft), "cannot be compared; both models need a tokenizer.json")


def test_a_draft_with_another_added_token_is_left_out_here_as_the_server_refuses_it(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    path = draft / "tokenizer.json"
    path.write_text(path.read_text().replace("<|pad|>", "<|think|>"))
    left_out(specification(target, draft), "token 259 is '<|pad|>' in the main model and '<|think|>' in the draft")


def test_a_broken_draft_is_named_and_left_out(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    edit_config(draft, model_type="no_such_architecture")
    left_out(specification(target, draft), 'draft model "small" cannot be loaded.*no_such_architecture not supported')


def test_a_draft_with_a_broken_tokenizer_is_left_out(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    (draft / "tokenizer.json").write_text("[]")
    left_out(specification(target, draft), "tokenizer.json is not valid")


# --- broken folders -------------------------------------------------------------------------------------------


def edit_config(folder: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> None:
    path = folder / "config.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(content | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, mx.array]], None]) -> None:
    weights = dict(tree_flatten(tiny_model("qwen3", vocabulary_size=260).parameters()))
    change(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def misshape(weights: dict[str, mx.array]) -> None:
    weights["model.norm.weight"] = mx.ones(7)


def overlap(folder: Path) -> None:
    """Write two tensors over the same bytes: the reference library refuses such a file, mlx does not."""
    header = {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "b")}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def replace_by_fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def rename_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def name_code(folder: Path) -> None:
    (folder / "architecture.txt").write_text("raise SystemExit('code from the folder ran')")
    edit_config(folder, model_file="architecture.txt")


BROKEN: dict[str, Callable[[Path], Any]] = {
    "folder is gone": shutil.rmtree,
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config is no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "config is a list": lambda folder: (folder / "config.json").write_text("[]"),
    "config is empty": lambda folder: (folder / "config.json").write_text("{}"),
    "config is huge": lambda folder: (folder / "config.json").write_text(" " * (9 << 20)),
    "no model type": partial(edit_config, drop=("model_type",)),
    "unknown architecture": partial(edit_config, model_type="no_such_architecture"),
    "model type is a path": partial(edit_config, model_type="../../../tmp/evil"),
    "model type is a number": partial(edit_config, model_type=7),
    "model type is no model": partial(edit_config, model_type="cache"),
    "a missing number": partial(edit_config, drop=("hidden_size",)),
    "a wrong number": partial(edit_config, hidden_size="large"),
    "no heads": partial(edit_config, num_attention_heads=0),
    "negative layers": partial(edit_config, num_hidden_layers=-1),
    "more layers than weights": partial(edit_config, num_hidden_layers=3),
    "fewer layers than weights": partial(edit_config, num_hidden_layers=1),
    "another vocabulary": partial(edit_config, vocab_size=1000),
    "quantisation without numbers": partial(edit_config, quantization={"mode": "affine"}),
    "unknown packing": partial(
        edit_config, quantization_config={"quant_method": "compressed-tensors", "format": "float-quantized"}
    ),
    "missing tensor": lambda folder: edit_weights(folder, lambda weights: weights.pop("model.norm.weight")),
    "extra tensor": lambda folder: edit_weights(folder, lambda weights: weights.update(extra=mx.ones(3))),
    "misshapen tensor": lambda folder: edit_weights(folder, misshape),
    "overlapping tensors": overlap,
    "truncated weights": truncate,
    "empty weights": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weights under another name": rename_weights,
    "weights are a FIFO": replace_by_fifo,
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "model_file": name_code,
    "a billion layers": partial(edit_config, num_hidden_layers=1_000_000_000),
    "a feature drafter": partial(edit_config, architectures=["LlamaForCausalLMEagle3"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_one_clear_line_and_the_next_load_works(tmp_path: Path, case: str) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3")
    memory.release()
    before = mx.get_active_memory()
    BROKEN[case](folder)
    started = time.process_time()
    refused(specification(folder), ".")
    assert time.process_time() - started < 2
    memory.release()
    assert mx.get_active_memory() == before
    shutil.rmtree(folder, ignore_errors=True)
    write_tiny_model(folder, "qwen3")
    assert run(specification(folder))[1].vocabulary_size == 260


def left_out(spec: ModelSpecification, pattern: str) -> None:
    """Check that the unit loads without its drafter, for a reason that matches `pattern`."""
    unit = run(spec)[1]
    assert not unit.drafters
    assert re.search(pattern, unit.load_failures["draft_model"])


def refused(spec: ModelSpecification, pattern: str) -> None:
    with pytest.raises(ModelUnavailable, match=pattern) as caught:
        run(spec)
    message = caught.value.message
    caught.value.__traceback__ = caught.value.__cause__ = caught.value.__context__ = None
    assert "\n" not in message
    assert len(message) < 500
    assert str(Path(spec.path).parent) not in message


def pair(folder: Path) -> tuple[Path, Path]:
    target = write_tiny_model(folder / "target", "qwen3")
    return target, write_tiny_model(folder / "draft", "qwen3", noise=0.03)


def test_mlx_lm_finds_the_classes_of_a_model_by_the_private_name_that_is_wrapped_here() -> None:
    assert inspect.signature(load_model).parameters["get_model_classes"].default is _get_classes
    kind, arguments = _get_classes({"model_type": "qwen3"})
    assert kind.__name__ == "Model"
    assert arguments.__name__ == "ModelArgs"
