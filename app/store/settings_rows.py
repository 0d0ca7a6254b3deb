"""What is set, as rows: the settings of the server, and those of each model. The schemas are not known here."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from sqlmodel import Session, col, select

from app.model_settings import ModelSettings
from app.store.glance import LOCKED_DOWN
from app.store.store import Store
from app.store.tables import KeyRow, ModelSettingsRow, SettingRow


class StoredSettings:
    """The settings of a store. Reading never makes the file; `clock` tells Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    @property
    def version(self) -> int:
        """Another number after anybody wrote."""
        return self._store.version

    def settings(self) -> dict[str, Any]:
        """Every stored setting as plain JSON values."""
        if not self._store.exists:
            return {}
        with self._store.reading() as session:
            rows = session.exec(select(SettingRow).where(col(SettingRow.name) != LOCKED_DOWN))
            return {row.name: row.value for row in rows}

    def change_settings(self, changes: Mapping[str, Any], *, source: str) -> None:
        """Keep these values, all or none; None forgets one. `source` says who chose."""
        with self._store.session() as session:
            for name, value in changes.items():
                if value is None:
                    _forget(session, session.get(SettingRow, name))
                else:
                    session.merge(SettingRow(name=name, value=value, source=source, updated_at=self._clock()))

    def models(self) -> dict[str, ModelSettings]:
        """What is set for each model that something is set for."""
        if not self._store.exists:
            return {}
        with self._store.reading() as session:
            return {row.model_id: ModelSettings.read(row.values) for row in session.exec(MODELS)}

    def model(self, model_id: str) -> ModelSettings | None:
        """What is set for one model; None: nothing."""
        return self.models().get(model_id)

    def save_model(self, model_id: str, settings: ModelSettings, *, source: str) -> None:
        """Keep what is set for a model in the place of what was; nothing set is no row."""
        values = settings.given()
        with self._store.session() as session:
            if not values:
                _forget(session, session.get(ModelSettingsRow, model_id))
            else:
                row = ModelSettingsRow(model_id=model_id, values=values, source=source, updated_at=self._clock())
                session.merge(row)

    def has_keys(self) -> bool:
        """Whether an API key was made and not revoked."""
        if not self._store.exists:
            return False
        with self._store.reading() as session:
            return session.exec(select(KeyRow.id).where(col(KeyRow.revoked_at).is_(None))).first() is not None


MODELS = select(ModelSettingsRow)


def _forget(session: Session, row: SettingRow | ModelSettingsRow | None) -> None:
    if row is not None:
        session.delete(row)
