"""A read-only snapshot of the store through SQLite alone, so that short commands do not wait for the store's libraries.

It diagnoses nothing: for a damaged, older or locked file it returns None, and `Store` reports the reason.
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
"""Names of rows in the setting table that are not settings: the lock-down, and the remaining steps of the first run."""


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """Settings as plain JSON values, by name, and the settings of each model that has some."""

    settings: dict[str, Any] = field(default_factory=dict)
    models: dict[str, ModelSettings] = field(default_factory=dict)
    measurements: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Results of the measurements of each model, latest first."""


def read_snapshot(path: Path) -> StoreSnapshot | None:
    """Read the settings in the store at `path`: empty where there is none, None if it is unusable. Changes nothing."""
    try:
        if not path.is_file():  # SQLite would wait for ever on a pipe
            is_left = path.exists() or path.is_symlink() or any(path.parent.glob(f"{path.name}-*"))
            return None if is_left else StoreSnapshot()
        address = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, timeout=WAIT_SECONDS, uri=True)) as file:
            settings = file.execute(
                "SELECT name, value FROM setting WHERE name NOT IN (?, ?)", (LOCKED_DOWN, FIRST_RUN)
            ).fetchall()
            models = file.execute('SELECT model_id, "values" FROM model_settings').fetchall()
            kept = file.execute("SELECT model_id, results FROM benchmark ORDER BY created_at DESC, id DESC").fetchall()
        measurements: dict[str, list[dict[str, Any]]] = {}
        for name, results in kept:
            measurements.setdefault(name, []).append(stored_json.decode(results, dict))
        return StoreSnapshot(
            {name: stored_json.decode(value) for name, value in settings},
            {name: ModelSettings.read(stored_json.decode(values, dict)) for name, values in models},
            measurements,
        )
    except (OSError, sqlite3.Error, ValueError, TypeError, AttributeError):
        return None
