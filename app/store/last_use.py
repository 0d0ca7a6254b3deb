"""When something was last used: written at most once a minute, and never in the way of the use itself.

A full disk or a busy file costs the note, not the request.
"""

import logging
from typing import Any

from sqlmodel import SQLModel

from app.core.errors import StoreUnavailable
from app.store.store import Store

logger = logging.getLogger(__name__)

EVERY_SECONDS = 60.0
MAX_REMEMBERED = 1000


class LastUse:
    """Keeps `column` of the rows of `table`, in Unix seconds."""

    def __init__(self, store: Store, table: type[SQLModel], column: str) -> None:
        self._store = store
        self._table = table
        self._column = column
        self._tried_at: dict[Any, float] = {}

    def note(self, row_id: object, used_at: float | None, now: float) -> None:
        """The row was used `now`; `used_at` is what it says."""
        if used_at is not None and now - used_at < EVERY_SECONDS:
            return
        if now - self._tried_at.get(row_id, now - EVERY_SECONDS) < EVERY_SECONDS:
            return
        if len(self._tried_at) >= MAX_REMEMBERED:
            self._tried_at.clear()
        self._tried_at[row_id] = now
        try:
            with self._store.session() as session:
                row = session.get(self._table, row_id)
                if row is not None:
                    setattr(row, self._column, now)
        except StoreUnavailable as error:
            logger.warning("A last use could not be written: %s", error.message)
