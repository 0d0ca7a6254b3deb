"""The requests that ended, as rows: added in batches, read by pages, pruned to a limit, cleared for good.

Metadata and figures; prompts and replies only where that is switched on. Calls take milliseconds: make them in a
thread. Reading never makes the file.
"""

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import ColumnElement, delete, func, tuple_
from sqlmodel import Session, col, select

from app.core.past import Past
from app.store.store import Store
from app.store.tables import RequestRow

FINE = ("stop", "length", "tool_calls")
OUTCOMES = ("fine", "cancelled", "failed")
"""What a list may be narrowed to."""


class RequestHistory:
    """The table `request`. Raises `StoreUnavailable`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def keep(self, requests: Sequence[Past], limit: int) -> None:
        """Add these in one transaction, and forget the oldest beyond `limit`."""
        if not requests and not self._store.exists:
            return
        with self._store.session() as session:
            for request in requests:
                session.merge(RequestRow(**asdict(request)))
            session.flush()
            _prune(session, limit)

    def latest(self, count: int) -> list[Past]:
        """The last ones, the latest first."""
        return self.page(count=count)

    def page(self, *, count: int, before: str = "", model_id: str = "", outcome: str = "") -> list[Past]:
        """The latest first, older than the request `before`; an `outcome` is one of `OUTCOMES`, or exact. No texts."""
        if not self._store.exists:
            return []
        wanted = select(RequestRow).order_by(col(RequestRow.created_at).desc(), col(RequestRow.id).desc()).limit(count)
        if model_id:
            wanted = wanted.where(RequestRow.model_id == model_id)
        if outcome:
            wanted = wanted.where(_has_outcome(outcome))
        with self._store.reading() as session:
            if before:
                last = session.get(RequestRow, before)
                if last is None:
                    return []
                key = tuple_(col(RequestRow.created_at), col(RequestRow.id))
                wanted = wanted.where(key < (last.created_at, last.id))
            return [_past(row, texts=False) for row in session.exec(wanted)]

    def find(self, request_id: str) -> Past | None:
        """One of them, with its texts where they are kept."""
        if not self._store.exists:
            return None
        with self._store.reading() as session:
            row = session.get(RequestRow, request_id)
            return None if row is None else _past(row, texts=True)

    def models(self) -> list[str]:
        """Every model that a request was for."""
        if not self._store.exists:
            return []
        with self._store.reading() as session:
            return list(session.exec(select(RequestRow.model_id).distinct().order_by(RequestRow.model_id)))

    def count(self) -> int:
        """How many there are."""
        if not self._store.exists:
            return 0
        with self._store.reading() as session:
            return int(session.exec(select(func.count()).select_from(RequestRow)).one())

    def clear(self) -> None:
        """Forget all of them; what they said is overwritten in the file, too."""
        if not self._store.exists:
            return
        with self._store.session(vital=True) as session:
            session.exec(delete(RequestRow))


def _has_outcome(outcome: str) -> ColumnElement[bool]:
    column = col(RequestRow.outcome)
    if outcome == "fine":
        return column.in_(FINE)
    if outcome == "failed":
        return column.not_in([*FINE, "cancelled"])
    return column == outcome


def _prune(session: Session, limit: int) -> None:
    surplus = int(session.exec(select(func.count()).select_from(RequestRow)).one()) - limit
    if surplus > 0:
        oldest = select(RequestRow.id).order_by(col(RequestRow.created_at), col(RequestRow.id)).limit(surplus)
        session.exec(delete(RequestRow).where(col(RequestRow.id).in_(oldest)))


def _past(row: RequestRow, *, texts: bool) -> Past:
    values = row.model_dump()
    if not texts:
        values |= {"prompt": None, "reply": None}
    return Past(**values)
