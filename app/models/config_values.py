"""Values of an untrusted `config.json`, and the keys that model families use for them.

`ConfigValues` checks each value when it is read and raises `ModelUnavailable` with one line: what is wrong, and the
next action. `text_number` treats an unusable value as absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.core.errors import ModelUnavailable
from app.models.safe_files import DOWNLOAD_AGAIN

Config = Mapping[str, Any]

MAX_NUMBER = 1 << 31
CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "seq_length", "n_ctx")
VOCABULARY_KEYS = ("vocab_size", "padded_vocab_size")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
EXPERTS_KEYS = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk", "moe_top_k",
)  # fmt: skip
HEADS_KEYS = ("num_attention_heads", "n_head", "n_heads")
KEY_VALUE_HEADS_KEYS = ("num_key_value_heads", "n_kv_heads")
TEXT_DEFAULTS: Mapping[str, Config] = {
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
    }
}
"""Values that configs with a `text_config` leave out, by family (`Gemma3TextConfig` in transformers)."""
DEFAULT_CONTEXT_TOKENS = 32_768
"""Context length, in tokens, assumed for a model whose config states none."""


class ConfigValues:
    """Values of a config, checked when they are read. `parts` are searched in order for a key."""

    def __init__(self, *parts: Config) -> None:
        self._parts = parts

    def get(self, *keys: str) -> Any:
        values = (part.get(key) for key in keys for part in self._parts)
        return next((value for value in values if value is not None), None)

    def whole(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(*keys)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelUnavailable(f"its config.json names no {keys[0]}; {DOWNLOAD_AGAIN}")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MAX_NUMBER:
            given = next(key for key in keys if self.get(key) is not None)
            raise ModelUnavailable(f"its config.json gives no usable {given}; {DOWNLOAD_AGAIN}")
        return value

    def real(self, key: str, default: float) -> float:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float(1 << 62):
            raise ModelUnavailable(f"its config.json gives no usable {key}; {DOWNLOAD_AGAIN}")
        return float(value)

    def flag(self, *keys: str) -> bool:
        return self.get(*keys) is True

    def section(self, *keys: str) -> Config:
        value = self.get(*keys)
        return value if isinstance(value, dict) else {}

    def layer_ids(self, *keys: str) -> list[int] | None:
        value = self.get(*keys)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(type(layer_id) is int for layer_id in value):
            raise ModelUnavailable(f"its config.json gives no usable {keys[0]}; {DOWNLOAD_AGAIN}")
        return value


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts of a target that its drafters must match; 0 where its config does not state one."""

    hidden_size: int
    layers: int
    vocab_size: int
    context_tokens: int
    model_type: str

    @classmethod
    def read(cls, config: Config) -> "TargetFacts":
        values = ConfigValues(text_part(config))
        return cls(
            hidden_size=values.whole(*HIDDEN_KEYS, default=0),
            layers=values.whole(*LAYER_KEYS, default=0),
            vocab_size=values.whole(*VOCABULARY_KEYS, default=0),
            context_tokens=values.whole(*CONTEXT_KEYS, default=0),
            model_type=str(values.get("model_type") or config.get("model_type") or ""),
        )


def text_part(config: Config) -> Config:
    """Return the settings of the language model, which multimodal configs nest under `text_config`."""
    nested = config.get("text_config")
    return (
        {**TEXT_DEFAULTS.get(str(config.get("model_type")), {}), **config, **nested}
        if isinstance(nested, dict)
        else config
    )


def text_number(config: Config, *keys: str) -> int:
    """Return the first positive whole number under one of `keys`, nested text configs included; 0 if there is none."""
    nested = (config.get(name) for name in ("text_config", "transformer_layer_config", "llm_config"))
    for part in (config, *(value for value in nested if isinstance(value, dict))):
        for key in keys:
            value = part.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40:
                return value
    return 0


def first_position(config: Config) -> int:
    """Return the position of a text's first token: 0, or in RoBERTa and its kin the padding id plus 1."""
    padding = config.get("pad_token_id", 1)
    kin = config.get("model_type") in ("camembert", "roberta", "xlm-roberta")
    return 1 + (padding if type(padding) is int and 0 <= padding < MAX_NUMBER else 1) if kin else 0


def stated_context(config: Config) -> int:
    """Return the longest context that a config states, in tokens; 0 where it states none."""
    return max(0, text_number(config, *CONTEXT_KEYS) - first_position(config))


def context_tokens(config: Config) -> int:
    """Return the longest context in tokens, or a default where the config states none."""
    return stated_context(text_part(config)) or DEFAULT_CONTEXT_TOKENS
