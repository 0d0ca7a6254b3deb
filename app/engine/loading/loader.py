"""Loads a main model and its drafters from local folders, slice by slice, on the MLX thread.

`load_unit` is a generator: between two slices of some 64 MB the loop runs other steps, and `close()` abandons the load
and frees what was read. A folder is data: it is inspected before mlx-lm reads it, nothing in it is ever executed, and
any fault in it raises ModelUnavailable with a one-line reason.
"""

import glob
import logging
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from app.core.errors import InsufficientMemory, ModelUnavailable, PacelineError
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine import memory
from app.engine.drafters.registry import REGISTRY
from app.engine.encoders import build_encoder
from app.engine.loaded_unit import LoadedDrafter, LoadedUnit
from app.models.config_values import context_tokens, text_part
from app.models.drafters.formats import head_tensors
from app.models.drafters.methods import FEATURE_METHODS, check_drafter
from app.models.folder import ModelFolder, Packing, inspect_folder
from app.models.tokenizer_file import Tokenizer, TokenizerCache

SLICE_BYTES = 64 * 1024 * 1024

logger = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class _BuiltModel:
    """One model of a unit, built with weights that are not read yet."""

    path: Path
    model: nn.Module
    config: Mapping[str, Any]
    vocabulary_size: int
    context_tokens: int

    @property
    def weights_bytes(self) -> int:
        return sum(int(value.nbytes) for value in _parameters(self.model))


def load_unit(
    spec: ModelSpecification, *, slice_bytes: int = SLICE_BYTES
) -> Generator[tuple[str, float], None, LoadedUnit]:
    """Yield (phase, fraction 0–1) after every slice; the return value is the unit, ready to run.

    A drafter that cannot be loaded is left out; `load_failures` has the reason. Raises ModelUnavailable if the target's
    folder is broken, unsupported or contains code, InsufficientMemory if its weights do not fit into memory.
    """
    yield "checking", 0.0
    target = _build(spec.path, f'model "{spec.id}"', _build_model)
    drafters: dict[str, tuple[DrafterSpecification, _BuiltModel]] = {}
    load_failures: dict[str, str] = {}
    for drafter in spec.drafters:
        yield "checking", 0.0
        with _recording_failure(drafter, load_failures):
            drafters[drafter.method] = drafter, _build_drafter(spec, drafter, target)
    yield from _read_all(target, drafters, load_failures, slice_bytes)
    drafters = {method: drafters[method] for method in drafters if method not in load_failures}
    memory.release()
    return LoadedUnit(
        spec=spec,
        target=target.model,
        config=target.config,
        weights_bytes=target.weights_bytes + sum(built.weights_bytes for _, built in drafters.values()),
        max_context_tokens=min(target.context_tokens, spec.max_context_tokens or target.context_tokens),
        vocabulary_size=target.vocabulary_size,
        drafters=tuple(
            LoadedDrafter(
                drafter.method, drafter.id, built.model, built.config, built.context_tokens, built.vocabulary_size
            )
            for drafter, built in drafters.values()
        ),
        load_failures=load_failures,
    )


def _read_all(
    target: _BuiltModel,
    drafters: Mapping[str, tuple[DrafterSpecification, _BuiltModel]],
    load_failures: dict[str, str],
    slice_bytes: int,
) -> Iterator[tuple[str, float]]:
    """Read all weights, yielding (phase, fraction 0–1) after every slice."""
    total = target.weights_bytes + sum(built.weights_bytes for _, built in drafters.values())
    done = 0
    for read in _read_weights(target.model, slice_bytes):
        done += read
        yield "weights", min(1.0, done / max(1, total))
    for drafter, built in drafters.values():
        with _recording_failure(drafter, load_failures):
            for read in _read_weights(built.model, slice_bytes):
                done += read
                yield "draft", min(1.0, done / max(1, total))


@contextmanager
def _recording_failure(drafter: DrafterSpecification, reasons: dict[str, str]) -> Iterator[None]:
    """Record in `reasons` why a drafter failed to load: its target is served without it."""
    try:
        yield
    except PacelineError as error:
        logger.warning("%s is left out: %s", drafter.id, error.message)
        reasons[drafter.method] = error.message


def _build(path: str, name: str, make: Callable[[ModelFolder], _BuiltModel]) -> _BuiltModel:
    """Build the module tree with lazy weights. Whatever libraries raise on broken input becomes ModelUnavailable."""
    folder = inspect_folder(Path(path))
    try:
        built = make(folder)
        if memory.on_cpu():
            built.model.set_dtype(mx.float32)
    except ModelUnavailable as error:
        raise ModelUnavailable(f"{name}: {error.message}") from None
    except Exception as error:
        reason = _reason(error, folder.path)
        raise ModelUnavailable(f"{name} cannot be loaded: {reason}; download it again or choose another one") from error
    return built


def _build_model(folder: ModelFolder) -> _BuiltModel:
    """Build a standalone model: an encoder, or one of mlx-lm's."""
    _check_supported(folder)
    if folder.is_encoder:
        encoder = build_encoder(folder)
        rows = _embedding_rows(encoder, folder.config)
        return _BuiltModel(folder.path, encoder, folder.config, rows, context_tokens(folder.config))
    with _plain_path(folder.path) as path:
        model, config = load_model(
            path, lazy=True, strict=True, trust_remote_code=False, get_model_classes=_headless_classes
        )
    model.__class__ = type(model).__base__
    return _BuiltModel(folder.path, model, config, _embedding_rows(model, config), context_tokens(config))


@contextmanager
def _plain_path(folder: Path) -> Iterator[Path]:
    """Yield a path of `folder` without `[`, `*` and `?`: mlx-lm would take them for a pattern and find no weights."""
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with TemporaryDirectory() as parent:
        link = Path(parent) / "model"
        link.symlink_to(folder)
        yield link


def _headless_classes(config: dict[str, Any]) -> tuple[type[nn.Module], Any]:
    """Return mlx-lm's classes for a model, changed to drop the weights of a multi-token head in its checkpoint.

    mlx-lm itself drops the head of most published checkpoints, but not of every converted one.
    """
    kind, arguments = _get_classes(config)  # the default of `load_model`, which mlx-lm does not export

    def sanitize(self: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        sanitized = kind.sanitize(self, weights) if hasattr(kind, "sanitize") else weights
        head = head_tensors(config, sanitized)
        return {name: value for name, value in sanitized.items() if name not in head}

    return type(kind.__name__, (kind,), {"sanitize": sanitize, "__module__": kind.__module__}), arguments


def _build_drafter(spec: ModelSpecification, drafter: DrafterSpecification, target: _BuiltModel) -> _BuiltModel:
    """Build a drafter: a smaller model with the same token ids, or a module that reads the target's features."""
    if drafter.method not in FEATURE_METHODS:
        built = _build(drafter.path, f'draft model "{drafter.id}"', _build_model)
        cache = TokenizerCache()
        # check the server's pairing rule again: files may have changed since
        if misfit := Tokenizer(target.path, cache).mismatch(Tokenizer(built.path, cache), built.vocabulary_size):
            raise ModelUnavailable(f'draft model "{drafter.id}" does not fit "{spec.id}": {misfit}')
        return built
    is_in_target = drafter.path == spec.path
    make = partial(_build_feature_drafter, method=drafter.method, target=target, is_in_target=is_in_target)
    return _build(drafter.path, f'{drafter.method} drafter "{drafter.id}"', make)


def _build_feature_drafter(folder: ModelFolder, *, method: str, target: _BuiltModel, is_in_target: bool) -> _BuiltModel:
    """Build a feature drafter of a published format; if `is_in_target`, its tensors are in the target's checkpoint."""
    tensors = head_tensors(folder.config, folder.tensors) if is_in_target else folder.tensors
    tokenizer = Tokenizer(target.path, TokenizerCache())
    config = check_drafter(method, folder.path, folder.config, tensors, target=tokenizer, target_config=target.config)
    model = REGISTRY[method].load(folder, target.config)
    if packing := Packing.for_target(target.config):  # drafting time is the time to read these weights
        nn.quantize(model, packing.group_size, packing.bits, class_predicate=partial(_can_be_packed, packing))
    return _BuiltModel(folder.path, model, folder.config, config.draft_vocab_size, config.max_position_embeddings)


def _can_be_packed(packing: Packing, _: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and packing.fits(module.weight.shape)


def _parameters(model: nn.Module) -> list[mx.array]:
    """Return all weights, in the order of the layers."""
    return list(cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={})).values())


def _read_weights(model: nn.Module, slice_bytes: int) -> Generator[int, None, None]:
    """Evaluate the parameters in slices, yielding the bytes of each."""
    pending: list[mx.array] = []
    size = 0
    for value in _parameters(model):
        pending.append(value)
        size += int(value.nbytes)
        if size >= slice_bytes:
            yield _evaluate(pending, size)
            pending, size = [], 0
    if pending:
        yield _evaluate(pending, size)


def _evaluate(arrays: list[mx.array], size: int) -> int:
    try:
        mx.eval(arrays)
    except RuntimeError as error:
        if memory.is_exhausted(error):
            message = (
                f"the weights do not fit into the memory that is free: {_one_line(str(error))}; close other programs"
            )
            raise InsufficientMemory(message) from error
        raise ModelUnavailable(
            f"the weights cannot be read: {_one_line(str(error))}; download the model again"
        ) from error
    return size


def _check_supported(folder: ModelFolder) -> None:
    """Raise ModelUnavailable for a folder that passes inspection but that mlx-lm cannot run as a standalone model."""
    if folder.drafter:
        raise ModelUnavailable(f"it is a drafter ({folder.drafter}), not a standalone model: choose another one")
    if not folder.weight_files[0].startswith("model"):
        raise ModelUnavailable("its weight files must be named model*.safetensors: rename them")
    if not re.fullmatch(r"[A-Za-z0-9_\-]{1,64}", folder.model_type):
        raise ModelUnavailable("its config.json names no model_type: download the model again")


def _embedding_rows(model: nn.Module, config: Mapping[str, Any]) -> int:
    """Return the number of token embedding rows: the config's `vocab_size` if an embedding has that many, else the rows
    of the model's first embedding, which mlx lists last."""
    embeddings = (nn.Embedding, nn.QuantizedEmbedding)
    rows = [int(module.weight.shape[0]) for _, module in model.named_modules() if isinstance(module, embeddings)]
    if not rows:
        raise ModelUnavailable("it has no token embedding")
    stated = text_part(config).get("vocab_size")
    return stated if isinstance(stated, int) and stated in rows else rows[-1]


def _reason(error: Exception, folder: Path) -> str:
    """Return the error's message without the folder's path, or a message that mlx-lm cannot build this config."""
    if isinstance(error, ValueError | RuntimeError | OSError):
        return _one_line(str(error).replace(str(folder), "its folder").rstrip("."))
    detail = _one_line(f"{type(error).__name__}: {error}")
    return f"its config.json does not describe a model that mlx-lm can build ({detail})"


def _one_line(text: str) -> str:
    """Return `text` as one short printable line: parts of it come from untrusted files."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= 240 else f"{line[:239]}…"
