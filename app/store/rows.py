"""Downloads and measurements as rows: kept, listed, deleted. Commands and the dashboard write the same ones."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast, get_args

from sqlmodel import col, select

from app.core.download import Download, State
from app.store.store import Store
from app.store.tables import BenchmarkRow, DownloadRow

STATES = get_args(State)


class DownloadRows:
    """Rows of the table `download`. Raises `StoreUnavailable`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self) -> list[Download]:
        """Every download that is kept."""
        with self._store.reading() as session:
            return [_download(row) for row in session.exec(select(DownloadRow))]

    def add(self, download: Download) -> Download:
        """Keep a new one; it gets its id here."""
        row = DownloadRow(**{**asdict(download), "id": None})
        with self._store.session() as session:
            session.add(row)
            session.flush()
            return _download(row)

    def save(self, downloads: Iterable[Download]) -> None:
        """Keep their changes in one transaction."""
        with self._store.session() as session:
            for download in downloads:
                session.merge(DownloadRow(**asdict(download)))

    def delete(self, download_id: int) -> None:
        """Forget one; forgotten ones are fine."""
        with self._store.session() as session:
            row = session.get(DownloadRow, download_id)
            if row is not None:
                session.delete(row)


def _download(row: DownloadRow) -> Download:
    values = row.model_dump()
    state = cast("State", row.state) if row.state in STATES else "failed"
    return Download(**{**values, "id": row.id or 0, "state": state})


class KeptMeasurements:
    """The measurements in a store. Reading never makes the file; `clock` tells Unix seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def of(self, model_id: str = "") -> list[BenchmarkRow]:
        """Those of one model, or of all, the latest first."""
        if not self._store.exists:
            return []
        wanted = select(BenchmarkRow).order_by(col(BenchmarkRow.created_at).desc(), col(BenchmarkRow.id).desc())
        if model_id:
            wanted = wanted.where(BenchmarkRow.model_id == model_id)
        with self._store.reading() as session:
            return list(session.exec(wanted))

    def find(self, number: int) -> BenchmarkRow | None:
        """One of them; None when it is not there."""
        if not self._store.exists or not 0 < number < 1 << 63:
            return None
        with self._store.reading() as session:
            return session.get(BenchmarkRow, number)

    def keep(
        self, model_id: str, *, versions: Mapping[str, Any], machine: Mapping[str, Any], results: Mapping[str, Any]
    ) -> int:
        """Keep one; all three are plain JSON values. The answer is its number."""
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
            return row.id or 0

    def delete(self, number: int) -> bool:
        """False when it was not there."""
        if not 0 < number < 1 << 63:
            return False
        with self._store.session() as session:
            row = session.get(BenchmarkRow, number)
            if row is not None:
                session.delete(row)
            return row is not None
