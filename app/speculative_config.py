"""The setting `speculative_config`: how a model drafts, as one JSON object in vLLM's format."""

import json
from typing import Any

import msgspec

from app.core.request import MAX_DRAFT_TOKENS
from app.models.drafters.methods import METHOD_NAMES, METHODS, NGRAM, TEXT_METHODS

OTHER_NAMES = {other: method.name for method in METHODS for other in method.other_names}
MAX_LOOKUP_TOKENS = 32


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings. No `method`: that of the drafter `model`. No `target`: the default model, else all that fit."""

    method: str = ""
    model: str = ""
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    target: str = ""

    @classmethod
    def read(cls, text: str) -> "SpeculativeConfig":
        """Read the JSON text. Raises ValueError with a one-line message for anything but such an object."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, Any])
            config = msgspec.convert(fields, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f'give an object like {{"method": "ngram"}} ({" ".join(str(error).split())})') from None
        config = msgspec.structs.replace(config, method=OTHER_NAMES.get(config.method, config.method))
        if problem := _problem(config):
            raise ValueError(problem)
        return config


def _problem(config: SpeculativeConfig) -> str:
    shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
    if config.method and config.method not in METHOD_NAMES:
        return f"method: use one of {', '.join(reversed(METHOD_NAMES))}"
    if not (config.method or config.model):
        return "give a method, or the model that drafts"
    if config.method in TEXT_METHODS and config.model not in {"", config.method}:
        return f"model: the method {config.method} has none"
    if not _within(config.num_speculative_tokens, MAX_DRAFT_TOKENS):
        return f"num_speculative_tokens: give 1 to {MAX_DRAFT_TOKENS}"
    if config.method != NGRAM.name and (shortest is not None or longest is not None):
        return "prompt_lookup_min and prompt_lookup_max are for the method ngram"
    if not (_within(shortest, MAX_LOOKUP_TOKENS) and _within(longest, MAX_LOOKUP_TOKENS)):
        return f"prompt_lookup_min, prompt_lookup_max: give 1 to {MAX_LOOKUP_TOKENS}"
    if shortest is not None and longest is not None and shortest > longest:
        return "prompt_lookup_min must not be above prompt_lookup_max"
    return ""


def _within(number: int | None, maximum: int) -> bool:
    return number is None or 1 <= number <= maximum


def parse_setting(value: object) -> object:
    """Parse an object or its JSON text; None for an empty text. Other values are returned unchanged."""
    if isinstance(value, dict):
        value = json.dumps(value)
    if not isinstance(value, str):
        return value
    return SpeculativeConfig.read(value) if value.strip() else None
