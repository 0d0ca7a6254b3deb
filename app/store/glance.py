"""A glance at what is set, by SQLite alone: commands that make one HTTP call do not wait for the store's libraries.

It judges nothing: a damaged, older or locked file is no answer, and `Store` tells why.
"""

import contextlib
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.model_settings import ModelSettings
from app.store import stored_json

FILE_NAME = "paceline.sqlite3"
WAIT_SECONDS = 1.0
LOCKED_DOWN, FIRST_RUN = "locked_down", "first_run"
"""The row of the setting table that keeps the server closed; no setting is called so."""


@dataclass(frozen=True, slots=True)
class Glance:
    """Settings as plain JSON values, by name, and what is set for each model that something is set for."""

    settings: dict[str, Any] = field(default_factory=dict)
    models: dict[str, ModelSettings] = field(default_factory=dict)
    measurements: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What was measured of each model, the latest first."""


def glance(path: Path) -> Glance | None:
    """What is set in the store at `path`; nothing where there is none, None where it does not tell. Changes nothing."""
    try:
        if not path.is_file():  # SQLite would wait at a pipe for ever
            is_left = path.exists() or path.is_symlink() or any(path.parent.glob(f"{path.name}-*"))
            return None if is_left else Glance()
        address = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, timeout=WAIT_SECONDS, uri=True)) as file:
            settings = file.execute(
                "SELECT name, value FROM setting WHERE name NOT IN (?, ?)", (LOCKED_DOWN, FIRST_RUN)
            ).fetchall()
            models = file.execute('SELECT model_id, "values" FROM model_settings').fetchall()
            kept = file.execute("SELECT model_id, results FROM benchmark ORDER BY created_at DESC, id DESC").fetchall()
        measurements: dict[str, list[dict[str, Any]]] = {}
        for name, results in kept:
            measurements.setdefault(name, []).append(stored_json.read(results, dict))
        return Glance(
            {name: stored_json.read(value) for name, value in settings},
            {name: ModelSettings.read(stored_json.read(values, dict)) for name, values in models},
            measurements,
        )
    except (OSError, sqlite3.Error, ValueError, TypeError, AttributeError):
        return None
