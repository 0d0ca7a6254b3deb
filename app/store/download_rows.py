"""The downloads in the store, as the queue of `app.hub.downloads` keeps them."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import cast, get_args

from sqlmodel import select

from app.core.download import Download, State
from app.store.store import Store
from app.store.tables import DownloadRow

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
