"""Whether the files of a feature drafter are what its config says, before anything is loaded: headers and small files.

Both processes ask: the server when it pairs, the worker before it builds. Refusals are `ModelUnavailable`, one line.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from app.core.config_values import Config, text_part
from app.core.drafter_config import DFlashConfig, DrafterConfig, Eagle3Config, MtpConfig
from app.core.errors import ModelUnavailable
from app.core.safe_files import DOWNLOAD_AGAIN, TensorInfo, read_integers, read_object
from app.core.tokenizer_file import ORDINARY, Tokenizer

FEATURE_METHODS = ("dflash", "mtp", "eagle3")
"""Methods whose drafters read the target's hidden states, the best first."""
MAX_TEMPLATE_BYTES = 1 << 20

Tensors = Mapping[str, TensorInfo]
Value = TypeVar("Value")


def head_tensors(config: Config, tensors: Mapping[str, Value]) -> dict[str, Value]:
    """The multi-token head that lies inside a main model's checkpoint, by name; empty when there is none.

    Qwen calls its tensors `mtp.*`; DeepSeek adds layers behind the `num_hidden_layers` that the config counts.
    """
    text = text_part(config)
    prefix = f"model.layers.{text.get('num_hidden_layers')}."
    further = prefix if text.get("num_nextn_predict_layers") else "mtp."
    return {name: info for name, info in tensors.items() if name.startswith(further) or _is_head(name)}


def _is_head(name: str) -> bool:
    return name.startswith("mtp.") or ".mtp." in name


def read_drafter(method: str, config: Config, target_config: Config) -> DrafterConfig:
    """The config of a drafter of this method, checked against the target's. Raises ModelUnavailable."""
    readers: Mapping[str, Any] = {"dflash": DFlashConfig, "eagle3": Eagle3Config, "mtp": MtpConfig}
    if method not in readers:
        raise ModelUnavailable(f"drafters of the kind {method or 'unknown'} cannot run here; choose another one")
    found: DrafterConfig = readers[method].read(config, target_config)
    return found


def check_drafter(
    method: str, folder: Path, config: Config, tensors: Tensors, *, target: Tokenizer, target_config: Config
) -> DrafterConfig:
    """Everything about a drafter that can be known without loading it; its config. Raises ModelUnavailable.

    `target` is the tokenizer of the main model. `tensors` are the drafter's own, by name; those of a head inside the
    target's checkpoint lie in the same folder.
    """
    found = read_drafter(method, config, target_config)
    names = {name.removeprefix("model."): info for name, info in tensors.items()}
    if any(name.endswith(".scales") for name in names):
        raise ModelUnavailable("it is quantised, which a drafter of this kind cannot be here; choose the original")
    match found:
        case DFlashConfig():
            _check_width(names, "fc.weight", (found.hidden_size, len(found.taps) * found.target_hidden_size))
            _check_mask_token(target, found.mask_token_id)
        case Eagle3Config():
            if found.norm_before_fc or found.fc_norm:
                raise ModelUnavailable("it norms the states before it joins them, which cannot run here")
            _check_width(names, "fc.weight", (found.hidden_size, len(found.taps) * found.target_hidden_size))
            _check_draft_vocabulary(folder, names, found)
        case MtpConfig():
            name = next((name for name in names if name.endswith(("mtp.fc.weight", ".eh_proj.weight"))), "fc.weight")
            _check_width(names, name, (found.hidden_size, 2 * found.hidden_size))
    return found


def _check_width(tensors: Tensors, name: str, wanted: tuple[int, int]) -> None:
    if name not in tensors:
        raise ModelUnavailable(f"it has no tensor {name}; {DOWNLOAD_AGAIN}")
    if tensors[name].shape != wanted:
        shape, needed = (" x ".join(map(str, each)) for each in (tensors[name].shape, wanted))
        raise ModelUnavailable(f"its {name} is {shape}, its config and the main model ask for {needed}")


def _check_draft_vocabulary(folder: Path, tensors: Tensors, config: Eagle3Config) -> None:
    """The head has a row for each draft token, and `d2t` leads from each to a token of the target."""
    rows, vocabulary = config.draft_vocab_size, config.vocab_size
    _check_width(tensors, "lm_head.weight", (rows, config.hidden_size))
    if "embed_tokens.weight" in tensors:
        _check_width(tensors, "embed_tokens.weight", (vocabulary, config.hidden_size))
    elif config.hidden_size != config.target_hidden_size:
        raise ModelUnavailable("it has no embedding of its own, and that of the main model has another width")
    if "t2d" in tensors and tensors["t2d"].shape != (vocabulary,):
        raise ModelUnavailable(f"its t2d is not a table of the main model's {vocabulary} tokens")
    if "d2t" not in tensors:
        if rows != vocabulary:
            raise ModelUnavailable(f"it has no table d2t from its {rows} tokens to the main model's; {DOWNLOAD_AGAIN}")
        return
    if tensors["d2t"].shape != (rows,):
        raise ModelUnavailable(f"its d2t is not a table of its {rows} tokens; {DOWNLOAD_AGAIN}")
    offsets = read_integers(folder, tensors["d2t"])
    if any(not 0 <= token + offset < vocabulary for token, offset in enumerate(offsets)):
        raise ModelUnavailable(f"its d2t leads beyond the main model's {vocabulary} tokens")


def _check_mask_token(target: Tokenizer, token: int) -> None:
    """A mask that the target may also write would be drafted, and read, as text."""
    use = token_use(target, token)
    if use:
        raise ModelUnavailable(f"its mask token {token} is {use} of the main model")


def token_use(tokenizer: Tokenizer, token: int) -> str:
    """What a model with this tokenizer can write with this id, in words; "" for an id that no answer holds.

    A special token that ends no text and that no chat template mentions is free. Raises ModelUnavailable.
    """
    folder = tokenizer.folder
    if not (folder / "tokenizer.json").is_file():
        return ""
    use = tokenizer.use_of(token)
    if use == ORDINARY:
        return "an ordinary token"
    return "a special token in the answers" if use and (token in _ends(folder) or use in _template(folder)) else ""


def _ends(folder: Path) -> set[int]:
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        config = read_object(folder / name) if (folder / name).is_file() else {}
        for part in (config, text_part(config)):
            for key in ("eos_token_id", "bos_token_id"):
                value = part.get(key)
                found.update(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))
    return found


def _template(folder: Path) -> str:
    """Every chat template of the folder, as text to search."""
    files = [folder / name for name in ("tokenizer_config.json", "chat_template.json")]
    texts = [str(read_object(file).get("chat_template")) for file in files if file.is_file()]
    path = folder / "chat_template.jinja"
    if path.is_file() and path.stat().st_size <= MAX_TEMPLATE_BYTES:
        texts.append(path.read_text("utf-8", errors="replace"))
    return "\n".join(texts)
