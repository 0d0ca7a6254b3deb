"""Settings, downloads, measurements and requests as rows: stored, listed, deleted. Settings have no schema here.

Requests are stored with metadata and figures; prompts and replies are stored only if that is switched on. Reading
never creates the file. Calls take milliseconds: make them in a thread.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, cast, get_args

from sqlalchemy import ColumnElement, delete, func, tuple_
from sqlmodel import Session, col, select

from app.core.download import Download, State
from app.core.request import OFF, FinishedRequest
from app.model_settings import ModelSettings
from app.store.snapshot import FIRST_RUN, LOCKED_DOWN
from app.store.store import Store
from app.store.tables import BenchmarkRow, DownloadRow, KeyRow, ModelSettingsRow, RequestRow, SettingRow


class StoredSettings:
    """The settings of a store. Reading never creates the file; `clock` returns Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def settings(self) -> dict[str, Any]:
        """Return every stored setting as a plain JSON value."""
        with self._store.read_session() as session:
            rows = session.exec(select(SettingRow).where(col(SettingRow.name).not_in((LOCKED_DOWN, FIRST_RUN))))
            return {row.name: row.value for row in rows}

    def change_settings(self, changes: Mapping[str, Any], *, source: str) -> None:
        """Store these values, all or none; None deletes a setting. `source` names the origin of the change."""
        with self._store.session(vital=True) as session:
            for name, value in changes.items():
                if value is None:
                    _delete_row(session, session.get(SettingRow, name))
                else:
                    session.merge(SettingRow(name=name, value=value, source=source, updated_at=self._clock()))

    def models(self) -> dict[str, ModelSettings]:
        """Return the settings of each model that has some."""
        with self._store.read_session() as session:
            return {row.model_id: ModelSettings.read(row.values) for row in session.exec(select(ModelSettingsRow))}

    def save_model(self, model_id: str, settings: ModelSettings, *, source: str) -> None:
        """Replace the settings of a model; if `settings` is empty, delete its row."""
        values = settings.given()
        with self._store.session(vital=True) as session:
            if not values:
                _delete_row(session, session.get(ModelSettingsRow, model_id))
            else:
                row = ModelSettingsRow(model_id=model_id, values=values, source=source, updated_at=self._clock())
                session.merge(row)

    def has_keys(self) -> bool:
        """Return whether there is an API key that is not revoked."""
        with self._store.read_session() as session:
            return session.exec(select(KeyRow.id).where(col(KeyRow.revoked_at).is_(None))).first() is not None


def _delete_row(session: Session, row: SettingRow | ModelSettingsRow | None) -> None:
    if row is not None:
        session.delete(row)


FirstStep = Literal["language", "folders", "models"]
FIRST_STEPS: tuple[FirstStep, ...] = get_args(FirstStep)


class FirstRun:
    """The remaining steps of the first run, stored beside the settings. Raises `StoreUnavailable`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def remaining(self) -> list[FirstStep]:
        """Return the remaining steps in order; none if the first run is over, or happened in an earlier version."""
        with self._store.read_session() as session:
            return _remaining_steps(session)

    def begin(self) -> None:
        """Mark every step as remaining."""
        with self._store.session(vital=True) as session:
            _save_steps(session, FIRST_STEPS)

    def finish(self, *steps: FirstStep) -> None:
        """Mark these steps as done."""
        with self._store.session(vital=True) as session:
            _save_steps(session, [step for step in _remaining_steps(session) if step not in steps])


def _remaining_steps(session: Session) -> list[FirstStep]:
    row = session.get(SettingRow, FIRST_RUN)
    remaining = row.value if row is not None and isinstance(row.value, list) else ()
    return [step for step in FIRST_STEPS if step in remaining]


def _save_steps(session: Session, remaining: Sequence[FirstStep]) -> None:
    session.merge(SettingRow(name=FIRST_RUN, value=list(remaining), source="dashboard", updated_at=time.time()))


STATES = get_args(State)


class DownloadRows:
    """Rows of the table `download`. Raises `StoreUnavailable`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self) -> list[Download]:
        """Return every stored download."""
        with self._store.read_session() as session:
            return [_download(row) for row in session.exec(select(DownloadRow))]

    def add(self, download: Download) -> Download:
        """Store a new download and return it with its id."""
        row = _row(download, id=None)
        with self._store.session() as session:
            session.add(row)
            session.flush()
            return _download(row)

    def save(self, downloads: Iterable[Download]) -> None:
        """Store the changes of all these downloads in one transaction."""
        with self._store.session() as session:
            for download in downloads:
                session.merge(_row(download))

    def delete(self, download_id: int) -> None:
        """Delete a download; unknown ids are ignored."""
        with self._store.session() as session:
            row = session.get(DownloadRow, download_id)
            if row is not None:
                session.delete(row)


def _row(download: Download, **changes: Any) -> DownloadRow:
    values = asdict(download) | changes
    del values["phase"]
    return DownloadRow(**values)


def _download(row: DownloadRow) -> Download:
    values = row.model_dump()
    state = cast("State", row.state) if row.state in STATES else "failed"
    return Download(**{**values, "id": row.id or 0, "state": state})


class StoredMeasurements:
    """The measurements in a store. Reading never creates the file; `clock` returns Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self.revision = 0
        """Number of changes made through this object."""

    def of(self, model_id: str = "") -> list[BenchmarkRow]:
        """Return the measurements of one model, or of all, latest first."""
        query = select(BenchmarkRow).order_by(col(BenchmarkRow.created_at).desc(), col(BenchmarkRow.id).desc())
        if model_id:
            query = query.where(BenchmarkRow.model_id == model_id)
        with self._store.read_session() as session:
            return list(session.exec(query))

    def latest(self) -> list[BenchmarkRow]:
        """Return the latest measurement of each model."""
        ids = select(func.max(BenchmarkRow.id)).group_by(col(BenchmarkRow.model_id))
        with self._store.read_session() as session:
            return list(session.exec(select(BenchmarkRow).where(col(BenchmarkRow.id).in_(ids))))

    def find(self, number: int) -> BenchmarkRow | None:
        """Return the measurement with this number; None when there is none."""
        if not 0 < number < 1 << 63:
            return None
        with self._store.read_session() as session:
            return session.get(BenchmarkRow, number)

    def save(
        self, model_id: str, *, versions: Mapping[str, Any], machine: Mapping[str, Any], results: Mapping[str, Any]
    ) -> int:
        """Store a measurement, whose three parts are plain JSON values; return its number."""
        row = BenchmarkRow(
            model_id=model_id,
            created_at=self._clock(),
            versions=dict(versions),
            machine=dict(machine),
            results=dict(results),
        )
        with self._store.session() as session:
            session.add(row)
            session.flush()
            number = row.id or 0
        self.revision += 1
        return number

    def delete(self, number: int) -> bool:
        """Delete a measurement; return False when there was none."""
        if not 0 < number < 1 << 63:
            return False
        with self._store.session() as session:
            row = session.get(BenchmarkRow, number)
            if row is not None:
                session.delete(row)
        self.revision += row is not None
        return row is not None


SUCCESS_OUTCOMES = ("stop", "length", "tool_calls")


def summary_of(past: FinishedRequest) -> dict[str, Any]:
    """Return the summary of a finished request for lists. Figures in another version's format count as empty."""
    speculation, usage = _section(past.figures, "speculation"), _section(past.figures, "usage")
    drafted = _number(speculation, "drafted")
    total_seconds = _number(_section(past.figures, "seconds"), "total")
    return {
        "id": past.id,
        "endpoint": past.endpoint,
        "model": past.model_id,
        "key": past.key_name,
        "started_at": past.created_at,
        "ended_at": past.created_at + total_seconds,
        "phase": "done",
        "outcome": past.outcome,
        "prompt_tokens": _number(usage, "prompt_tokens"),
        "completion_tokens": _number(usage, "completion_tokens"),
        "tokens_per_second": round(_number(_section(past.figures, "timings"), "predicted_per_second"), 1),
        "method": speculation.get("method", OFF),
        "drafted": drafted,
        "acceptance": round(_number(speculation, "accepted") / drafted, 3) if drafted else None,
        **{name: speculation.get(name) for name in ("reason", "reason_code", "reason_values")},
        "seconds": total_seconds,
    }


def _section(figures: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = figures.get(name)
    return section if isinstance(section, dict) else {}


def _number(section: Mapping[str, Any], name: str) -> float:
    number = section.get(name)
    return number if isinstance(number, int | float) else 0


class RequestHistory:
    """The table `request`. Raises `StoreUnavailable`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def save(self, requests: Sequence[FinishedRequest], limit: int) -> None:
        """Add these requests in one transaction, and delete the oldest beyond `limit`."""
        if not requests and not self._store.exists:
            return
        with self._store.session() as session:
            for request in requests:
                session.merge(RequestRow(**asdict(request)))
            session.flush()
            _prune(session, limit)

    def page(self, *, count: int, before: str = "", model_id: str = "", outcome: str = "") -> list[FinishedRequest]:
        """Return up to `count` requests that are older than the request `before`, latest first, without texts.

        `outcome`: `fine`, `cancelled`, `failed` or an exact outcome; empty: any.
        """
        query = select(RequestRow).order_by(col(RequestRow.created_at).desc(), col(RequestRow.id).desc()).limit(count)
        if model_id:
            query = query.where(RequestRow.model_id == model_id)
        if outcome:
            query = query.where(_has_outcome(outcome))
        with self._store.read_session() as session:
            if before:
                last = session.get(RequestRow, before)
                if last is None:
                    return []
                key = tuple_(col(RequestRow.created_at), col(RequestRow.id))
                query = query.where(key < (last.created_at, last.id))
            return [_past(row, texts=False) for row in session.exec(query)]

    def find(self, request_id: str) -> FinishedRequest | None:
        """Return a request, with its texts if they were stored."""
        with self._store.read_session() as session:
            row = session.get(RequestRow, request_id)
            return None if row is None else _past(row, texts=True)

    def models(self) -> list[str]:
        """Return the id of every model with a stored request."""
        with self._store.read_session() as session:
            return list(session.exec(select(RequestRow.model_id).distinct().order_by(RequestRow.model_id)))

    def last_models(self, count: int) -> list[str]:
        """Return the ids of the models of the last `count` requests, each once, latest first."""
        query = select(RequestRow.model_id).order_by(col(RequestRow.created_at).desc()).limit(count)
        with self._store.read_session() as session:
            return list(dict.fromkeys(session.exec(query)))

    def count(self) -> int:
        """Return the number of requests."""
        with self._store.read_session() as session:
            return int(session.exec(select(func.count()).select_from(RequestRow)).one())

    def clear(self) -> None:
        """Delete all requests; their contents are overwritten in the file, too."""
        if not self._store.exists:
            return
        with self._store.session(vital=True) as session:
            session.exec(delete(RequestRow))


def _has_outcome(outcome: str) -> ColumnElement[bool]:
    column = col(RequestRow.outcome)
    if outcome == "fine":
        return column.in_(SUCCESS_OUTCOMES)
    if outcome == "failed":
        return column.not_in([*SUCCESS_OUTCOMES, "cancelled"])
    return column == outcome


def _prune(session: Session, limit: int) -> None:
    surplus = int(session.exec(select(func.count()).select_from(RequestRow)).one()) - limit
    if surplus > 0:
        oldest = select(RequestRow.id).order_by(col(RequestRow.created_at), col(RequestRow.id)).limit(surplus)
        session.exec(delete(RequestRow).where(col(RequestRow.id).in_(oldest)))


def _past(row: RequestRow, *, texts: bool) -> FinishedRequest:
    values = row.model_dump()
    if not texts:
        values |= {"prompt": None, "reply": None}
    return FinishedRequest(**values)
