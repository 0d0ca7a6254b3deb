"""The settings of one model on this computer, set by a person or by `paceline bench --apply`.

None means unset: the setting of the server, or the default, applies. `takes_effect` is as in `app.settings`.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from app.core.errors import InvalidSetting
from app.core.request import MAX_DRAFT_TOKENS, UNQUANTISED, AcceptanceRule, DraftingPolicy, Quantisation
from app.models.drafters.methods import DRAFT_METHODS, METHOD_NAMES, NGRAM
from app.models.footprint import QUANTISED_FROM_TOKENS

Values = TypeVar("Values")


@dataclass(frozen=True, slots=True)
class Conflict(Generic[Values]):
    """Settings that must not be combined: `names` are those that clash, `advice` says why and what to do."""

    names: tuple[str, ...]
    advice: str
    clashes: Callable[[Values], bool]
    translation_key: str = ""
    """Key of the dashboard's text for this conflict; empty: `conflict_` and the first name."""


def refuse_conflicts(values: Values, conflicts: Iterable[Conflict[Values]]) -> None:
    """Raise `InvalidSetting` for the first conflict that these values have."""
    for conflict in conflicts:
        if conflict.clashes(values):
            message, name = f"{', '.join(conflict.names)}: {conflict.advice}", conflict.names[0]
            translation_key = conflict.translation_key or f"conflict_{name}"
            raise InvalidSetting(message, code="conflicting_settings", parameter=name, translation_key=translation_key)


logger = logging.getLogger("paceline.settings")

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[METHOD_NAMES]  # one name per method
SPECULATION = (
    "drafts", "methods", "num_draft_tokens", "policy", "acceptance", "prompt_lookup_min", "prompt_lookup_max",
)  # fmt: skip
"""Names of the settings that control drafting; measurements recommend their values."""
PROFILED = (
    "system_prompt", "temperature", "top_p", "top_k", "min_p", "max_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "policy", "methods", "num_draft_tokens",
)  # fmt: skip
"""Settings that a profile may have: only what a request can set, so that all profiles of a model share one engine."""
PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Bits = Annotated[Literal[8, 4], BeforeValidator(lambda value: {"8": 8, "4": 4}.get(str(value), value))]
"""Bits of a quantised number; forms and command lines write them as text."""
Id = Annotated[str, Field(min_length=1, max_length=300)]


def _setting(description: str, takes_effect: Literal["now", "reload"], unit: str = "", **limits: Any) -> Any:
    extra: dict[str, Any] = {"takes_effect": takes_effect, "unit": unit}
    return Field(None, description=description, json_schema_extra=extra, **limits)


class ModelSettings(BaseModel):
    """Settings of one model: drafting, time in memory, and defaults of its requests."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    drafts: tuple[Id, ...] | None = _setting("Drafter ids, best first; an empty list: none.", "reload")
    methods: tuple[MethodName, ...] | None = _setting("Methods that may draft; unset: all available.", "reload")
    num_draft_tokens: int | None = _setting(
        "Draft length: exact with one method chosen, else the maximum; unset: automatic (governor).",
        "reload",
        "tokens",
        ge=1,
        le=MAX_DRAFT_TOKENS,
    )
    policy: DraftingPolicy | None = _setting("When to draft, as the server's `policy`.", "reload")
    acceptance: AcceptanceRule | None = _setting("Acceptance rule, as the server's `acceptance`.", "reload")
    prompt_lookup_min: int | None = _setting("Shortest n-gram to look up.", "reload", "tokens", ge=1, le=32)
    prompt_lookup_max: int | None = _setting("Longest n-gram to look up.", "reload", "tokens", ge=1, le=32)
    kv_bits: Bits | None = _setting(
        "Bits to which the keys and values of long prompts are quantized; unset: they stay as they are.",
        "reload",
        "bits",
    )
    kv_bits_from: int | None = _setting(
        f"Shortest prompt whose keys and values `kv_bits` quantizes; unset: {QUANTISED_FROM_TOKENS}.",
        "reload",
        "tokens",
        ge=0,
        le=(1 << 31) - 1,
    )
    alias: str | None = _setting(
        "Additional name that requests may use.", "now", pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}$"
    )
    pinned: bool | None = _setting("Keep the model loaded until it is unloaded manually.", "now")
    idle_seconds: float | None = _setting(
        "Idle time after which the model is unloaded.", "now", "seconds", ge=1, le=31_536_000
    )
    system_prompt: str | None = _setting(
        "System message for chats without one.", "now", min_length=1, max_length=100_000
    )
    temperature: float | None = _setting("0 always picks the most likely token.", "now", ge=0, le=2)
    top_p: float | None = _setting(
        "Samples from the most likely tokens up to this total probability.", "now", gt=0, le=1
    )
    top_k: int | None = _setting("Samples from the K most likely tokens; 0: all.", "now", "tokens", ge=0, le=1 << 20)
    min_p: float | None = _setting(
        "Drops tokens below this fraction of the top token's probability.", "now", ge=0, le=1
    )
    max_tokens: int | None = _setting("Max tokens of a reply.", "now", "tokens", ge=1, le=(1 << 31) - 1)
    repetition_penalty: float | None = _setting("Above 1: discourages repetition.", "now", gt=0, le=10)
    presence_penalty: float | None = _setting("Above 0: favors tokens that have not occurred yet.", "now", ge=-2, le=2)
    frequency_penalty: float | None = _setting(
        "Above 0: penalizes tokens by how often they occurred.", "now", ge=-2, le=2
    )

    def given(self) -> dict[str, Any]:
        """Return what is set, as plain JSON values."""
        return self.model_dump(mode="json", exclude_none=True)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "ModelSettings":
        """Read stored values, possibly of another version; unknown names and invalid values are dropped."""
        known = {name: value for name, value in values.items() if name in cls.model_fields}
        try:
            return cls.model_validate(known)
        except ValidationError as error:
            invalid = {str(detail["loc"][0]) for detail in error.errors()}
            logger.warning("stored settings of a model are left out: %s", ", ".join(sorted(invalid)))
            return cls.model_validate({name: value for name, value in known.items() if name not in invalid})

    @property
    def quantisation(self) -> Quantisation:
        """Quantisation of keys and values, where the model allows it."""
        shortest = QUANTISED_FROM_TOKENS if self.kv_bits_from is None else self.kv_bits_from
        return Quantisation(self.kv_bits, shortest) if self.kv_bits else UNQUANTISED

    def over(self, other: "ModelSettings") -> "ModelSettings":
        """Return these settings, with those of `other` where they are unset."""
        return ModelSettings.model_validate(other.given() | self.given())


def split_profile(name: str) -> tuple[str, str]:
    """Split `MODEL:PROFILE` into model and profile; both empty if the name has another form."""
    model, _, profile = name.rpartition(":")
    return (model, profile) if model and PROFILE_NAME.fullmatch(profile) else ("", "")


CONFLICTS: tuple[Conflict[ModelSettings], ...] = (
    Conflict(
        ("policy", "drafts", "methods", "num_draft_tokens"),
        "the policy off never drafts: unset drafts, methods and num_draft_tokens, or choose another policy",
        lambda model: model.policy == "off" and bool(model.drafts or model.methods or model.num_draft_tokens),
    ),
    Conflict(
        ("drafts", "methods"),
        f"none of the methods can draft without a drafter: choose a drafter, or allow {NGRAM.name}",
        lambda model: model.drafts == () and bool(model.methods) and set(DRAFT_METHODS).issuperset(model.methods or ()),
    ),
    Conflict(
        ("prompt_lookup_min", "prompt_lookup_max"),
        "prompt_lookup_min must not be above prompt_lookup_max",
        lambda model: (model.prompt_lookup_min or 1) > (model.prompt_lookup_max or 32),
    ),
    Conflict(
        ("methods", "prompt_lookup_min", "prompt_lookup_max"),
        "prompt_lookup_min and prompt_lookup_max are for ngram, which the methods leave out: allow it, or unset them",
        lambda model: bool(
            model.methods and NGRAM.name not in model.methods and (model.prompt_lookup_min or model.prompt_lookup_max)
        ),
    ),
    Conflict(
        ("pinned", "idle_seconds"),
        "a pinned model is never unloaded for being idle: unset idle_seconds, or do not pin it",
        lambda model: bool(model.pinned and model.idle_seconds),
    ),
)
