"""The conversations of the chat page: texts of a person's own, kept until they are deleted.

Messages are in the order of their ids. `put` drops what follows a message and adds others behind it: that is how a
reply is kept, an edited question sent again and a reply made anew. Calls take milliseconds: make them in a thread.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import func, or_
from sqlmodel import Session, col, select

from app.core.errors import InvalidRequest
from app.store.store import Store
from app.store.tables import ConversationRow, MessageRow

ESCAPE = "\\"
ID_BITS = 48
"""Ids are drawn: a window that still shows a deleted conversation must not write into a new one."""

Role = Literal["user", "assistant"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept; messages and characters are those of one conversation."""

    conversations: int = 1000
    messages: int = 1000
    characters: int = 4_000_000


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `spans`: which characters of a reply a drafter wrote, as (start, end, method)."""

    role: Role
    content: str
    reasoning: str = ""
    spans: tuple[tuple[int, int, str], ...] = ()
    figures: Mapping[str, Any] | None = None
    id: int = 0
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Heading:
    """One line of the list. Times are Unix seconds."""

    id: int
    title: str
    model_id: str
    created_at: float
    changed_at: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole one: `options` is what its requests ask for besides the messages."""

    heading: Heading
    options: Mapping[str, Any]
    messages: tuple[Message, ...]


class Conversations:
    """All of them. `clock` tells Unix seconds; None or False is the answer for one that is not there."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time, limits: Limits | None = None) -> None:
        self._store = store
        self._clock = clock
        self._limits = limits or Limits()

    def list(self, search: str = "") -> list[Heading]:
        """The one that changed last comes first; `search` is looked for in titles and messages."""
        if not self._store.exists:
            return []
        found = select(ConversationRow).order_by(col(ConversationRow.changed_at).desc(), col(ConversationRow.id).desc())
        if search:
            found = found.where(_contains(search))
        with self._store.reading() as session:
            return [_heading(row) for row in session.exec(found)]

    def create(self, title: str, model_id: str, options: Mapping[str, Any]) -> Heading:
        """A new one without messages. Raises `InvalidRequest` when there are too many."""
        now = self._clock()
        row = ConversationRow(
            id=1 + secrets.randbits(ID_BITS),
            title=title,
            model_id=model_id,
            options=dict(options),
            created_at=now,
            changed_at=now,
        )
        with self._store.session() as session:
            if session.exec(select(func.count()).select_from(ConversationRow)).one() >= self._limits.conversations:
                message = f"{self._limits.conversations} conversations are kept already: delete some first."
                raise InvalidRequest(message, code="too_many_conversations")
            session.add(row)
            session.flush()
            return _heading(row)

    def find(self, conversation_id: int) -> Conversation | None:
        """One with its messages."""
        if not self._store.exists:
            return None
        with self._store.reading() as session:
            row = session.get(ConversationRow, conversation_id)
            if row is None:
                return None
            messages = tuple(_message(each) for each in _rows(session, conversation_id))
            return Conversation(_heading(row), row.options or {}, messages)

    def change(
        self,
        conversation_id: int,
        *,
        title: str | None = None,
        model_id: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Heading | None:
        """Set what is given; its place in the list stays."""
        with self._store.session() as session:
            row = session.get(ConversationRow, conversation_id)
            if row is None:
                return None
            row.title = row.title if title is None else title
            row.model_id = row.model_id if model_id is None else model_id
            row.options = row.options if options is None else dict(options)
            session.add(row)
            return _heading(row)

    def delete(self, conversation_id: int) -> bool:
        """Forget one with its messages."""
        with self._store.session() as session:
            row = session.get(ConversationRow, conversation_id)
            if row is not None:
                session.delete(row)
            return row is not None

    def delete_all(self) -> int:
        """Forget every one; the answer is how many there were."""
        with self._store.session() as session:
            rows = session.exec(select(ConversationRow)).all()
            for row in rows:
                session.delete(row)
            return len(rows)

    def put(self, conversation_id: int, after: int, messages: Sequence[Message]) -> tuple[Message, ...] | None:
        """Drop what follows the message with the id `after` (0: all), then add; the answer is what was added.

        Raises `InvalidRequest` when that message is gone, or the conversation would become too long.
        """
        with self._store.session() as session:
            conversation = session.get(ConversationRow, conversation_id)
            if conversation is None:
                return None
            rows = _rows(session, conversation_id)
            if after and after not in {row.id for row in rows}:
                message = "This conversation was changed in another window: open it again."
                raise InvalidRequest(message, code="conversation_changed", parameter="after")
            kept = [row for row in rows if (row.id or 0) <= after]
            self._check_size([*map(_message, kept), *messages])
            for row in rows[len(kept) :]:
                session.delete(row)
            conversation.changed_at = now = self._clock()
            added = [_row(each, conversation_id, now) for each in messages]
            session.add_all([conversation, *added])
            session.flush()
            return tuple(_message(row) for row in added)

    def _check_size(self, messages: Sequence[Message]) -> None:
        characters = sum(len(each.content) + len(each.reasoning) for each in messages)
        if len(messages) > self._limits.messages or characters > self._limits.characters:
            message = "This conversation has become too long to be kept: go on in a new one."
            raise InvalidRequest(message, code="conversation_too_long", parameter="messages")


def _contains(search: str) -> Any:
    escaped = search
    for special in (ESCAPE, "%", "_"):
        escaped = escaped.replace(special, ESCAPE + special)
    pattern = f"%{escaped}%"
    holding = select(MessageRow.conversation_id).where(col(MessageRow.content).like(pattern, escape=ESCAPE))
    return or_(col(ConversationRow.title).like(pattern, escape=ESCAPE), col(ConversationRow.id).in_(holding))


def _rows(session: Session, conversation_id: int) -> list[MessageRow]:
    wanted = select(MessageRow).where(MessageRow.conversation_id == conversation_id)
    return list(session.exec(wanted.order_by(col(MessageRow.id))))


def _row(message: Message, conversation_id: int, now: float) -> MessageRow:
    return MessageRow(
        conversation_id=conversation_id,
        role=message.role,
        content=message.content,
        reasoning=message.reasoning,
        spans=[list(span) for span in message.spans],
        figures=None if message.figures is None else dict(message.figures),
        created_at=now,
    )


def _message(row: MessageRow) -> Message:
    return Message(
        role="assistant" if row.role == "assistant" else "user",
        content=row.content,
        reasoning=row.reasoning,
        spans=tuple((start, end, method) for start, end, method in row.spans or ()),
        figures=row.figures,
        id=row.id or 0,
        created_at=row.created_at,
    )


def _heading(row: ConversationRow) -> Heading:
    return Heading(row.id or 0, row.title, row.model_id, row.created_at, row.changed_at)
