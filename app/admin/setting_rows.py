"""Rows that describe settings for pages, the API and the command line: schema, value, and origin of the value."""

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import annotated_types
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from app.core.setting_texts import to_json_value
from app.model_settings import PROFILED, ModelSettings
from app.serving.live_settings import LiveSettings, default_of
from app.settings import Settings
from app.speculative_config import SpeculativeConfig

VALUE_KINDS: Mapping[Any, str] = {
    bool: "switch",
    int: "number",
    float: "number",
    str: "text",
    Path: "text",
    tuple: "list",
    dict: "pairs",
    SecretStr: "secret",
    SpeculativeConfig: "json",
}
LONG_CHARACTERS = 1000
INHERITED = frozenset({"policy", "acceptance", "num_draft_tokens", "idle_seconds"})
"""Model settings that fall back to a server setting of the same name."""


def setting_rows(live: LiveSettings) -> list[dict[str, Any]]:
    """Return every setting of the server, in the order of the schema.

    `value` is the value after a restart, `in_effect` whether it applies already; `stored` is the stored value, even
    if the command line or the environment overrides it.
    """
    return [setting_row(live, name) for name in Settings.model_fields]


def setting_row(live: LiveSettings, name: str) -> dict[str, Any]:
    """Return one setting of the server. Raises KeyError for an unknown name."""
    field = Settings.model_fields[name]
    row = _row(name, field)
    value = getattr(live.pending, name)
    if name == "language":
        row |= {"kind": "choice", "options": ["", *live.languages]}
    return row | {
        "default": to_json_value(default_of(name)),
        "value": to_json_value(value),
        "origin": live.origin(name),
        "stored": live.stored(name),
        "in_effect": value == getattr(live.current, name),
        "variable": f"PACELINE_{name.upper()}",
    }


def model_setting_rows(live: LiveSettings, model_id: str, profile: str = "") -> list[dict[str, Any]]:
    """Return every setting of one model, or of one of its profiles.

    `inherited` is the value that applies if the setting has none; None: the default behaviour.
    """
    given = live.model(f"{model_id}:{profile}" if profile else model_id).given()
    inherited = live.current if not profile else live.model(model_id).over(_inherited_settings(live.current))
    return [
        _row(name, field)
        | {
            "value": given.get(name),
            "origin": "store" if name in given else "default",
            "inherited": to_json_value(getattr(inherited, name)) if profile or name in INHERITED else None,
        }
        | ({"takes_effect": "now"} if profile else {})
        for name, field in ModelSettings.model_fields.items()
        if not profile or name in PROFILED
    ]


def _inherited_settings(settings: Settings) -> ModelSettings:
    return ModelSettings.model_validate({name: getattr(settings, name) for name in INHERITED})


def _row(name: str, field: FieldInfo) -> dict[str, Any]:
    """Return the schema of a setting: its form field, its limits, and when a change takes effect."""
    extra = cast("dict[str, Any]", field.json_schema_extra)
    kind, options = _kind(field.annotation)
    limits = _limits(field)
    if extra.get("unit") == "bytes":
        kind = "size"
    is_long = kind == "text" and (limits.get("longest") or 0) > LONG_CHARACTERS
    return {
        "name": name,
        "description": field.description,
        "section": extra.get("section"),
        "kind": "long_text" if is_long else kind,
        "options": options,
        **limits,
        "unit": extra.get("unit"),
        "takes_effect": extra.get("takes_effect"),
        "may_be_stored": extra.get("stored", True),
    }


def _kind(annotation: Any) -> tuple[str, list[str]]:
    """Return the kind of form field for this type, and its options."""
    outer, inner = get_origin(annotation), get_args(annotation)
    if outer is Annotated:
        return _kind(inner[0])
    if outer in {Union, types.UnionType}:
        return _kind(next(member for member in inner if member is not types.NoneType))
    if outer is Literal:
        return "choice", [str(option) for option in inner]
    if outer is tuple:
        return "list", _kind(inner[0])[1]
    return VALUE_KINDS[outer or annotation], []


def _limits(field: FieldInfo) -> dict[str, Any]:
    limits: dict[str, Any] = {"least": None, "most": None, "longest": None, "whole": int in _types(field.annotation)}
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge):
            limits["least"] = limit.ge
        elif isinstance(limit, annotated_types.Gt):
            limits["least"] = limit.gt
        elif isinstance(limit, annotated_types.Le):
            limits["most"] = limit.le
        elif isinstance(limit, annotated_types.MaxLen):
            limits["longest"] = limit.max_length
    return limits


def _types(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) or (annotation,)
