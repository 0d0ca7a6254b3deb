"""The conversations of the chat page: a person's own texts, kept until they are deleted.

A conversation is a tree of turns whose ids the page makes. Turns are added and never removed: an edited question or a
regenerated reply is a sibling of the earlier one. Adding a turn again changes nothing, so a page that got no answer can
retry; only an interrupted reply is completed by a longer one with the same beginning. To add turns, a page must know
the conversation's version. Calls take milliseconds: make them in a thread.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, or_
from sqlmodel import Session, col, select

from app.core.errors import InvalidRequest, StaleVersion
from app.store.store import Store
from app.store.tables import ConversationRow, MessageRow

ESCAPE = "\\"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on stored conversations; `turns` and `characters` apply to each of them."""

    conversations: int = 1000
    turns: int = 2000
    characters: int = 4_000_000


@dataclass(frozen=True, slots=True)
class ConversationHeader:
    """The fields of a new conversation other than its turns; `options` are the parameters of its requests."""

    title: str
    model_id: str
    options: Mapping[str, Any]


class Conversations:
    """All conversations. `clock` returns Unix seconds; methods return None or False for an unknown id."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time, limits: Limits | None = None) -> None:
        self._store = store
        self._clock = clock
        self._limits = limits or Limits()
        self.revision = int(clock() * 1000)
        """Number that changes with each change of any conversation, and that no earlier server has used."""

    def list(self, search: str = "") -> Sequence[ConversationRow]:
        """Return the conversations, last changed first, that contain `search` in title or messages."""
        query = select(ConversationRow).order_by(col(ConversationRow.changed_at).desc(), col(ConversationRow.id).desc())
        if search:
            query = query.where(_contains(search))
        with self._store.read_session() as session:
            return session.exec(query).all()

    def add(
        self, conversation_id: int, version: int, turns: Sequence[MessageRow], header: ConversationHeader | None = None
    ) -> ConversationRow | None:
        """Add copies of `turns` to a conversation that has this version; version 0 with `header` creates one.

        Raises `StaleVersion` when it has another version, and `InvalidRequest` when a turn's parent does not exist or a
        limit is exceeded; then nothing is added.
        """
        with self._transaction() as session:
            row = session.get(ConversationRow, conversation_id)
            if row is None:
                if version or header is None:
                    return None
                row = self._new_row(session, conversation_id, header)
            elif row.version != version:
                message = "This conversation was changed in another window: read it again."
                raise StaleVersion(message, parameter="version")
            self._add_turns(session, row, turns)
            return row

    def find(self, conversation_id: int) -> tuple[ConversationRow, Sequence[MessageRow]] | None:
        """Return a conversation with its turns, each after its parent."""
        with self._store.read_session() as session:
            row = session.get(ConversationRow, conversation_id)
            return None if row is None else (row, _rows(session, conversation_id))

    def change(
        self,
        conversation_id: int,
        *,
        title: str | None = None,
        model_id: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ConversationRow | None:
        """Set the given fields, whatever the version; the order of the list does not change."""
        with self._transaction() as session:
            row = session.get(ConversationRow, conversation_id)
            if row is None:
                return None
            row.title = row.title if title is None else title
            row.model_id = row.model_id if model_id is None else model_id
            row.options = row.options if options is None else dict(options)
            row.version += 1
            session.add(row)
            return row

    def delete(self, conversation_id: int) -> bool:
        """Delete a conversation with its turns."""
        with self._transaction() as session:
            row = session.get(ConversationRow, conversation_id)
            if row is not None:
                session.delete(row)
            return row is not None

    def delete_all(self) -> int:
        """Delete every conversation; return their number."""
        with self._transaction() as session:
            rows = session.exec(select(ConversationRow)).all()
            for row in rows:
                session.delete(row)
            return len(rows)

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        with self._store.session() as session:
            yield session
        self.revision += 1  # after the commit, so that a page that reads in response sees the change

    def _new_row(self, session: Session, conversation_id: int, header: ConversationHeader) -> ConversationRow:
        if session.exec(select(func.count()).select_from(ConversationRow)).one() >= self._limits.conversations:
            message = f"{self._limits.conversations} conversations are kept already: delete some first."
            raise InvalidRequest(message, code="too_many_conversations")
        return ConversationRow(
            id=conversation_id,
            title=header.title,
            model_id=header.model_id,
            options=dict(header.options),
            created_at=self._clock(),
            version=0,
        )

    def _add_turns(self, session: Session, conversation: ConversationRow, turns: Sequence[MessageRow]) -> None:
        """Add the turns that are new, and complete interrupted ones."""
        conversation.changed_at = now = self._clock()
        conversation.version += 1
        session.add(conversation)
        session.flush()
        rows = {row.turn: row for row in _rows(session, conversation.id)}
        for turn in turns:
            if turn.parent and turn.parent not in rows:
                raise InvalidRequest("A turn's parent does not exist.", code="unknown_parent", parameter="turns")
            row = rows.get(turn.turn)
            if row is None:
                row = rows[turn.turn] = MessageRow(conversation_id=conversation.id, turn=turn.turn, created_at=now)
                _copy_fields(row, turn)
            elif _completes(turn, row):
                _copy_fields(row, turn)
            session.add(row)
        self._check_size(rows.values())
        session.flush()

    def _check_size(self, rows: Collection[MessageRow]) -> None:
        sizes = [len(text) for row in rows for text in _texts(row)]
        if len(rows) > self._limits.turns or sum(sizes) > self._limits.characters:
            message = "This conversation has become too long to store: continue in a new one."
            raise InvalidRequest(message, code="conversation_too_long", parameter="turns")


def _completes(turn: MessageRow, row: MessageRow) -> bool:
    """Return whether a turn completes an interrupted row: same beginning, and more text or other figures."""
    texts, earlier = _texts(turn), _texts(row)
    is_longer = sum(map(len, texts)) > sum(map(len, earlier))
    begins_alike = len(texts) >= len(earlier) and all(map(str.startswith, texts, earlier))
    return bool((row.figures or {}).get("stopped")) and begins_alike and (is_longer or turn.figures != row.figures)


def _texts(row: MessageRow) -> list[str]:
    """Return the content, reasoning and call arguments of a row, in an order that growth does not change."""
    calls = [call for call in row.calls or () if isinstance(call, dict)]
    return [row.content, row.reasoning, *(str(call.get("arguments", "")) for call in calls)]


def _contains(search: str) -> Any:
    escaped = search
    for special in (ESCAPE, "%", "_"):
        escaped = escaped.replace(special, ESCAPE + special)
    pattern = f"%{escaped}%"
    matching_ids = select(MessageRow.conversation_id).where(col(MessageRow.content).like(pattern, escape=ESCAPE))
    return or_(col(ConversationRow.title).like(pattern, escape=ESCAPE), col(ConversationRow.id).in_(matching_ids))


def _rows(session: Session, conversation_id: int) -> list[MessageRow]:
    query = select(MessageRow).where(MessageRow.conversation_id == conversation_id)
    return list(session.exec(query.order_by(col(MessageRow.id))))


def _copy_fields(row: MessageRow, turn: MessageRow) -> None:
    for name in ("parent", "role", "content", "reasoning", "spans", "calls", "figures"):
        setattr(row, name, getattr(turn, name))
    row.created_at = turn.created_at or row.created_at
