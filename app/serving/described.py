"""Settings as plain rows for the page, the API and the command line: value, where it comes from, when it is felt."""

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from app.core.setting_texts import plain
from app.core.speculative_config import SpeculativeConfig
from app.model_settings import ModelSettings
from app.serving.live_settings import LiveSettings
from app.settings import Settings

KINDS: Mapping[Any, str] = {
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


def describe(live: LiveSettings) -> list[dict[str, Any]]:
    """Every setting of the server, in the order of the schema.

    `value` is what a restart would bring, `in_effect` whether it is felt already; `stored` is what goes behind a
    command line or an environment that says something else.
    """
    return [describe_one(live, name) for name in Settings.model_fields]


def describe_one(live: LiveSettings, name: str) -> dict[str, Any]:
    """One setting of the server. Raises KeyError for an unknown name."""
    field = Settings.model_fields[name]
    row = _row(name, field)
    value = getattr(live.wanted, name)
    if name == "language":
        row |= {"kind": "choice", "options": ["", *live.languages]}
    return row | {
        "default": plain(field.get_default(call_default_factory=True)),
        "value": plain(value),
        "origin": live.origin(name),
        "stored": live.stored(name),
        "in_effect": value == getattr(live.current, name),
        "variable": f"PACELINE_{name.upper()}",
    }


def describe_model(live: LiveSettings, model_id: str) -> list[dict[str, Any]]:
    """Every setting of one model; `inherited` is what holds where nothing is set, None: the usual way."""
    given = live.model(model_id).given()
    return [
        _row(name, field)
        | {
            "value": given.get(name),
            "origin": "store" if name in given else "default",
            "inherited": plain(getattr(live.current, name)) if name in INHERITED else None,
        }
        for name, field in ModelSettings.model_fields.items()
    ]


INHERITED = frozenset({"policy", "acceptance", "num_draft_tokens", "idle_seconds"})
"""What the server has a setting of the same name for."""


def _row(name: str, field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
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
    """How a form asks for a value of this type, and what there is to choose from."""
    outer, inner = get_origin(annotation), get_args(annotation)
    if outer is Annotated:
        return _kind(inner[0])
    if outer in {Union, types.UnionType}:
        return _kind(next(each for each in inner if each is not types.NoneType))
    if outer is Literal:
        return "choice", [str(each) for each in inner]
    if outer is tuple:
        return "list", _kind(inner[0])[1]
    return KINDS[outer or annotation], []


def _limits(field: FieldInfo) -> dict[str, Any]:
    found: dict[str, Any] = {"least": None, "most": None, "longest": None, "whole": int in _types(field.annotation)}
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge):
            found["least"] = limit.ge
        elif isinstance(limit, annotated_types.Gt):
            found["least"] = limit.gt
        elif isinstance(limit, annotated_types.Le):
            found["most"] = limit.le
        elif isinstance(limit, annotated_types.MaxLen):
            found["longest"] = limit.max_length
    return found


def _types(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) or (annotation,)
