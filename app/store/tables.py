"""The tables of the store. JSON columns contain plain values; an absent value is SQL's NULL. Times are Unix seconds.

A file with a value that does not match its column is damaged: `app/store/database.py` checks every value.
A change here needs a migration in `migrations/versions/`; a test compares the two.
"""

from typing import Any, Literal

from sqlalchemy import JSON, Column, Index, String, text
from sqlmodel import Field, SQLModel

Scope = Literal["inference", "admin"]
Role = Literal["user", "assistant", "tool"]


def _json(kind: Any, *, nullable: bool = False) -> Any:
    return Field(default=None, sa_column=Column(JSON(none_as_null=True), nullable=nullable, info={"kind": kind}))


class SettingRow(SQLModel, table=True):
    """One stored setting of the server, from the page, the API or `paceline config`."""

    __tablename__ = "setting"

    name: str = Field(primary_key=True)
    value: Any = _json(Any, nullable=True)
    source: str = ""
    updated_at: float = 0.0


class ModelSettingsRow(SQLModel, table=True):
    """The settings of one model: the fields of `ModelSettings` that were given, by name."""

    __tablename__ = "model_settings"

    model_id: str = Field(primary_key=True)
    values: dict[str, Any] = _json(dict)
    source: str = ""
    """Author of the last choice: a person, or `paceline bench`."""
    updated_at: float = 0.0


class BenchmarkRow(SQLModel, table=True):
    """The results of one measurement of a model, with the machine and the versions."""

    __tablename__ = "benchmark"

    id: int = Field(default=None, primary_key=True)
    model_id: str = Field(index=True)
    created_at: float = 0.0
    versions: dict[str, Any] = _json(dict)
    machine: dict[str, Any] = _json(dict)
    results: dict[str, Any] = _json(dict)


class AccountRow(SQLModel, table=True):
    """The one person who may open the dashboard: `id` is always 1."""

    __tablename__ = "account"

    id: int = Field(default=1, primary_key=True)
    password_hash: str = ""
    """Hash by argon2id, with its parameters and salt; from an earlier Paceline, `scrypt$n$r$p$salt$hash`."""
    created_at: float = 0.0
    changed_at: float = 0.0


class SessionRow(SQLModel, table=True):
    """A browser that signed in. `id` is the SHA-256 of its cookie."""

    __tablename__ = "session"

    id: str = Field(primary_key=True)
    created_at: float = 0.0
    seen_at: float = 0.0
    browser: str = ""


class KeyRow(SQLModel, table=True):
    """An API key. The key itself is shown once and never stored: `digest` is its SHA-256."""

    __tablename__ = "api_key"

    id: int = Field(default=None, primary_key=True)
    name: str = ""
    digest: str = Field(index=True, unique=True)
    hint: str = ""
    """The first characters, to tell keys apart."""
    scope: Scope = Field(default="inference", sa_type=String)
    """`inference`: the endpoints of OpenAI's clients; `admin`: everything."""
    created_at: float = 0.0
    used_at: float | None = None
    revoked_at: float | None = None


class DownloadRow(SQLModel, table=True):
    """One download of a repository at one commit; `state` is queued, running, paused, done, failed or cancelled."""

    __tablename__ = "download"

    id: int = Field(default=None, primary_key=True)
    repository: str = Field(index=True)
    revision: str = ""
    """Commit id; empty until the hub has reported it."""
    state: str = "queued"
    position: int = 0
    total_bytes: int = 0
    done_bytes: int = 0
    folder: str = ""
    problem: str = ""
    drafts_for: str = ""
    """Repository of the main model that it will draft for, once downloaded."""
    created_at: float = 0.0
    changed_at: float = 0.0


class RequestRow(SQLModel, table=True):
    """One finished request: its metadata, and its texts only if storing texts was switched on."""

    __tablename__ = "request"

    id: str = Field(primary_key=True)
    endpoint: str = ""
    model_id: str = Field(default="", index=True)
    key_name: str = ""
    created_at: float = Field(default=0.0, index=True)
    outcome: str = ""
    """`stop`, `length`, `tool_calls`, `cancelled`, or the code of an error."""
    figures: dict[str, Any] = _json(dict)
    """Counts and seconds by phase and by method, as `speculation` and `timings` in the API."""
    prompt: str | None = None
    reply: str | None = None


class ConversationRow(SQLModel, table=True):
    """One conversation of the chat page. `version` increases with each change."""

    __tablename__ = "conversation"

    id: int = Field(default=None, primary_key=True)
    title: str = ""
    model_id: str = ""
    options: dict[str, Any] = _json(dict)
    created_at: float = 0.0
    changed_at: float = Field(default=0.0, index=True)
    version: int = Field(default=1, sa_column_kwargs={"server_default": "1"})


class MessageRow(SQLModel, table=True):
    """One turn of a conversation: `turn` is its id, made by the page, and `parent` the id of the turn before it."""

    __tablename__ = "message"
    __table_args__ = (Index("ix_message_turn", "conversation_id", "turn", unique=True),)

    id: int = Field(default=None, primary_key=True)
    conversation_id: int = Field(foreign_key="conversation.id", ondelete="CASCADE")
    turn: str = Field(default="", sa_column_kwargs={"server_default": text("''")})
    parent: str = Field(default="", sa_column_kwargs={"server_default": text("''")})
    """Id of the turn before this one; empty if this turn begins the conversation."""
    role: Role = Field(default="user", sa_type=String)
    content: str = ""
    reasoning: str = ""
    spans: list[Any] | None = _json(list, nullable=True)
    """Character ranges of a reply that a drafter wrote, each as [start, end, method]."""
    calls: list[Any] | None = _json(list, nullable=True)
    """Tool calls of a reply, as {id, name, arguments}; turns of role `tool` give the results in this order."""
    figures: dict[str, Any] | None = _json(dict, nullable=True)
    created_at: float = 0.0


TABLES = frozenset(SQLModel.metadata.tables)
"""Names of all tables."""
