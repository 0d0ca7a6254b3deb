"""Reads and checks an untrusted model folder: only data and headers are read, nothing is executed or loaded.

A folder is accepted when `config.json` is small JSON that asks for no more layers than there are tensors, every file is
a regular one, no link leads to another user's file, and every weight file is a safetensors file whose header matches
its length. These checks run before mlx, which accepts overlapping tensors and builds as many layers as a config asks
for. Python files and `auto_map`, which many conversions contain, are ignored; `model_file`, which mlx-lm would run, is
refused.
"""

import itertools
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from app.core.errors import DiskUnavailable, ModelUnavailable
from app.core.patience import patient
from app.models.config_values import VOCABULARY_KEYS, stated_context, text_number, text_part
from app.models.drafters.formats import template_text
from app.models.drafters.methods import drafter_method
from app.models.encoders import ENCODERS, check_direction, declared_pooling
from app.models.safe_files import (
    DOWNLOAD_AGAIN,
    DTYPE_BITS,
    TensorInfo,
    check_momentary,
    printable,
    read_header,
    read_object,
)

MAX_FILES = 10_000
MAX_DEPTH = 4

SHARD = re.compile(r"(?P<stem>.*)-\d{1,6}-of-(?P<count>\d{1,6})\.safetensors")
"""Pattern of the name of a weight file that is one of several shards."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
CODE_KEYS = frozenset({"model_file", "_attn_implementation_internal"})
"""Config keys that make a library fetch or run code, whatever its trust setting."""
CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files in which libraries look for `CODE_KEYS`."""
TEXT_SUFFIXES = (".json", ".jsonl", ".txt", ".jinja", ".model", ".tiktoken")
MAX_TEXT_BYTES = 128 * 1024 * 1024
"""Largest size, in bytes, of a file that is read as a whole."""
LAYER_COUNTS = frozenset(
    {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_kv_reuse_layers", "num_nextn_predict_layers"}
)
LAYER_LISTS = frozenset({"layer_types", "layers_block_type", "block_types", "hybrid_override_pattern"})
REASONING_MARKERS = (
    "think>", "<think:", "<|channel", "<|think:start|>", "<|open|>think", "[THINK]", "<|START_THINKING|>",
    "<|inner_prefix|>", "[BEGIN FINAL RESPONSE]",
)  # fmt: skip
"""Texts in the templates of models that reason, at least one for each way to mark it."""
EXPERT_COUNTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "o_groups"})


Signature = tuple[tuple[str, bool, int, int], ...]
"""Entries of a folder, sorted: the name, whether it is a link, the size in bytes and the time of the last change."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that passed all checks. Numbers are 0 where the config does not state them."""

    path: Path
    config: Mapping[str, Any]
    model_type: str
    drafter: str
    """Method of a feature drafter; empty for a standalone model."""
    tensors: Mapping[str, TensorInfo]
    weight_files: tuple[str, ...]
    size_bytes: int
    """Bytes of its tensors."""
    parameter_count: int
    bits: int
    """Bits per weight: as the quantisation declares, else the width of the dtype with the most bytes."""
    context: int
    """The longest context in tokens that the config declares."""
    has_chat_template: bool
    supports_reasoning: bool
    """Whether its template supports reasoning."""
    pooling: str = ""
    """Pooling of its embeddings: `mean`, `last`, `cls` or `encoders.UNKNOWN`; empty where the folder declares none."""

    @property
    def is_encoder(self) -> bool:
        """Whether it makes embeddings and nothing else."""
        return not self.drafter and self.model_type in ENCODERS


def inspect_folder(path: Path) -> ModelFolder:
    """Read a folder as `read_folder` does, but add its name, without the path, to the message of `ModelUnavailable`."""
    try:
        return read_folder(path)
    except DiskUnavailable:
        raise
    except ModelUnavailable as error:
        raise ModelUnavailable(f'model "{printable(path.name)}": {error.message}') from None


def read_folder(path: Path) -> ModelFolder:
    """Read and check the folder at `path`; costs one small read per file, whatever the size of the weights.

    Raises `ModelUnavailable` with one line: reason; next action.
    """
    try:
        return _inspect(path.resolve(strict=True))
    except OSError as error:
        check_momentary(error)
        reason = f"its folder cannot be read ({error.strerror}); check that it exists and is readable"
    except (ValueError, RuntimeError):
        reason = "its path is not usable; rename the folder"
    raise ModelUnavailable(reason)


def _inspect(root: Path) -> ModelFolder:
    if not root.is_dir():
        raise ModelUnavailable("it is not a folder; give the folder that holds config.json")
    files = tuple(sorted(_list_files(root, root, 0, itertools.count())))
    if "config.json" not in files:
        raise ModelUnavailable("it has no config.json; give a folder in Hugging Face layout with safetensors weights")
    config = read_object(root / "config.json")
    drafter = drafter_method(config)
    if not drafter:
        _refuse_code(root, files)
    weight_files = _weight_files(files)
    _check_shards(weight_files)
    tensors = _read_tensors(root, weight_files)
    if not drafter:
        _check_sizes(config, tensors)
        check_direction(config)
    if not drafter and not any(name in files for name in TOKENIZER_FILES):
        raise ModelUnavailable(f"it has no tokenizer; {DOWNLOAD_AGAIN} with its tokenizer.json")
    model_type = config.get("model_type")
    if not drafter and not (isinstance(model_type, str) and model_type):
        raise ModelUnavailable(f"its config.json names no model_type; {DOWNLOAD_AGAIN}")
    template = template_text(root)
    return ModelFolder(
        path=root,
        config=config,
        model_type=model_type if isinstance(model_type, str) else "",
        drafter=drafter,
        tensors=tensors,
        weight_files=weight_files,
        size_bytes=sum(tensor.size_bytes for tensor in tensors.values()),
        parameter_count=_parameter_count(config, tensors),
        bits=_bits(config, tensors),
        context=stated_context(text_part(config)),
        has_chat_template=bool(template) or _renders_natively(root, files),
        supports_reasoning=any(mark in template for mark in REASONING_MARKERS),
        pooling="" if drafter else declared_pooling(root, files),
    )


def _list_files(root: Path, folder: Path, depth: int, count: Iterator[int]) -> Iterator[str]:
    """Yield the paths, relative to `root`, of all files that are not hidden, by name; refuse links to other users'
    files, and entries that are neither a file nor a folder."""
    with os.scandir(folder) as entries:
        for entry in sorted(itertools.islice(entries, MAX_FILES + 1), key=lambda entry: entry.name):
            if next(count) >= MAX_FILES:
                raise ModelUnavailable(f"it holds more than {MAX_FILES} files; keep only the model's own files there")
            if entry.name.startswith("."):
                continue
            if entry.is_symlink():
                _check_link(root, Path(entry.path))
            if entry.is_dir(follow_symlinks=False) and not entry.name.endswith(".safetensors"):
                if depth < MAX_DEPTH:
                    yield from _list_files(root, Path(entry.path), depth + 1, count)
                continue
            _check_file(entry)
            yield Path(entry.path).relative_to(root).as_posix()


def _check_link(root: Path, link: Path) -> None:
    """Refuse a link whose target has another owner than the link, unless the target is in the folder or, for a Hugging
    Face snapshot, in the cache of the same repository."""
    allowed_root = root
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        allowed_root = root.parent.parent
    try:
        target = link.resolve(strict=True)
        is_foreign = target.stat().st_uid != link.lstat().st_uid
    except (OSError, RuntimeError):
        raise ModelUnavailable(f"{printable(link.name)} is a link to nothing; {DOWNLOAD_AGAIN}") from None
    if is_foreign and not target.is_relative_to(allowed_root):
        raise ModelUnavailable(
            f"{printable(link.name)} is a link to a file of another user; copy the file into the folder"
        )


def _check_file(entry: os.DirEntry[str]) -> None:
    status = entry.stat()
    if not stat.S_ISREG(status.st_mode) and not (entry.is_symlink() and stat.S_ISDIR(status.st_mode)):
        raise ModelUnavailable(f"{printable(entry.name)} is not a regular file; {DOWNLOAD_AGAIN}")
    if status.st_size > MAX_TEXT_BYTES and entry.name.endswith(TEXT_SUFFIXES):
        raise ModelUnavailable(f"{printable(entry.name)} is larger than {MAX_TEXT_BYTES >> 20} MiB; {DOWNLOAD_AGAIN}")


def _refuse_code(root: Path, files: tuple[str, ...]) -> None:
    """Refuse keys that make a library run code, in the files that libraries read; other files may contain them."""
    for name in CONFIG_FILES:
        if name in files:
            keys = (key for part in _objects(read_object(root / name)) for key in sorted(CODE_KEYS.intersection(part)))
            if key := next(keys, ""):
                raise ModelUnavailable(
                    f'{printable(name)} asks to run code ("{key}"), which is never done here; remove that key'
                )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value, itself included."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)


def _check_sizes(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a config that asks for more layers, experts or tokens than the weights have: mlx-lm builds them first."""
    max_rows = max((max(tensor.shape, default=0) for tensor in tensors.values()), default=0)
    limits = dict.fromkeys(LAYER_COUNTS | LAYER_LISTS, len(tensors)) | dict.fromkeys(
        EXPERT_COUNTS, max(len(tensors), max_rows)
    )
    for part in _objects(config):
        for key in limits.keys() & part.keys():
            value = part[key]
            count = len(value) if isinstance(value, str | list) else value
            if isinstance(count, int | float) and count > limits[key]:
                raise ModelUnavailable(
                    f"its config.json asks for more than its weights hold ({key}: {min(count, 10**12):,}, "
                    f"{len(tensors):,} tensors); {DOWNLOAD_AGAIN}"
                )
    if (vocabulary := text_number(config, *VOCABULARY_KEYS)) > max_rows:
        raise ModelUnavailable(
            f"its config.json states {vocabulary:,} tokens, its weights hold {max_rows:,} rows; {DOWNLOAD_AGAIN}"
        )


def _weight_files(files: tuple[str, ...]) -> tuple[str, ...]:
    """Return the weight files to load: `model*.safetensors` as in mlx-lm, or all of them when none has such a name."""
    weights = tuple(name for name in files if name.endswith(".safetensors") and "/" not in name)
    if not weights:
        raise ModelUnavailable(
            "it has no safetensors weights; GGUF and PyTorch files are not supported, convert the model"
        )
    return tuple(name for name in weights if name.startswith("model")) or weights


def _read_tensors(root: Path, names: Iterable[str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        header = read_header(root / name)
        if not tensors.keys().isdisjoint(header):
            raise ModelUnavailable(f"{printable(name)} repeats a tensor that another file has; {DOWNLOAD_AGAIN}")
        tensors.update(header)
    return tensors


def missing_shards(names: Iterable[str]) -> int:
    """Return how many shards are missing beside these, by their names."""
    shards = [match for name in names if (match := SHARD.fullmatch(name))]
    return sum(count for _, count in {(match["stem"], int(match["count"])) for match in shards}) - len(shards)


def _check_shards(names: Sequence[str]) -> None:
    """Raise ModelUnavailable if the names show missing shards; an index file often describes a different sharding."""
    if (missing := missing_shards(names)) > 0:
        raise ModelUnavailable(f"{missing} weight files are missing beside {printable(names[0])}; {DOWNLOAD_AGAIN}")


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("quantization", "quantization_config"):
        value = config.get(key)
        if isinstance(value, dict):
            return value
    return {}


class Packing(NamedTuple):
    """Quantisation applied to a feature drafter at load if its target is quantised: affine, in whole groups per row."""

    bits: int
    group_size: int

    @classmethod
    def for_target(cls, target_config: Mapping[str, Any]) -> "Packing | None":
        """Return the packing with the target's bits, but at least 4; None where the target is not quantised."""
        quantisation = _quantisation(target_config)
        bits, group_size = text_number(quantisation, "bits"), text_number(quantisation, "group_size") or 64
        return cls(max(4, bits), max(32, group_size)) if 2 <= bits <= 8 else None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a weight of this shape can be packed."""
        return len(shape) > 1 and shape[-1] % self.group_size == 0

    def packed(self, tensors: Mapping[str, TensorInfo], *, item_bytes: int) -> dict[str, TensorInfo]:
        """Return a drafter's tensors as packed; a scale and a bias of `item_bytes` bytes each are added per group."""
        return {
            name: self._packed(tensor, item_bytes) if self._is_packable(name, tensor) else tensor
            for name, tensor in tensors.items()
        }

    def _is_packable(self, name: str, tensor: TensorInfo) -> bool:
        is_layer = name.endswith(".weight") and "embed" not in name
        return is_layer and tensor.dtype in {"F16", "BF16", "F32"} and self.fits(tensor.shape)

    def _packed(self, tensor: TensorInfo, item_bytes: int) -> TensorInfo:
        weight_count = math.prod(tensor.shape)
        size = weight_count * self.bits // 8 + weight_count // self.group_size * 2 * item_bytes
        return replace(tensor, dtype="U32", size_bytes=size)


def _bits(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> int:
    declared = text_number(_quantisation(config), "bits")
    sizes = Counter[str]()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.size_bytes
    return declared or (DTYPE_BITS[sizes.most_common(1)[0][0]] if sizes else 0)


def _parameter_count(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> int:
    """Count the weights before quantisation: packed ones by their scales (one per group); scales are not counted."""
    quantisation = _quantisation(config)
    count = 0
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        scales = tensors.get(f"{stem}.scales")
        if scales is None:
            count += math.prod(tensor.shape)
        elif leaf == "weight":
            layer = quantisation.get(stem)
            group = text_number(layer if isinstance(layer, dict) else {}, "group_size")
            count += math.prod(scales.shape) * (group or text_number(quantisation, "group_size") or 64)
    return count


def _renders_natively(root: Path, files: tuple[str, ...]) -> bool:
    """Return whether mlx-lm itself contains the chat template of this model."""
    return "tokenizer_config.json" in files and bool(
        read_object(root / "tokenizer_config.json").get("chat_template_type")
    )


@patient(otherwise=())
def signature_of(folder: Path) -> Signature:
    """Return the stamps of a folder's files (at most `MAX_FILES`), which differ after a change. Raises OSError for a
    folder that cannot be read."""
    with os.scandir(folder) as entries:
        return tuple(sorted(_file_stamp(entry) for entry in itertools.islice(entries, MAX_FILES)))


def _file_stamp(entry: os.DirEntry[str]) -> tuple[str, bool, int, int]:
    try:
        status = entry.stat()
    except OSError:
        return (entry.name, True, -1, -1)
    return (entry.name, entry.is_symlink(), status.st_size, status.st_ctime_ns)  # rights may change, too
