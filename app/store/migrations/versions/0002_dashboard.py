"""Tables of the dashboard: settings, accounts, downloads, requests and conversations.

The choices for models move from columns into one JSON object, in which an absent name is unset.
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

CHOICES = ("drafts", "methods", "num_draft_tokens", "policy", "acceptance", "prompt_lookup_min", "prompt_lookup_max")
LISTS = frozenset({"drafts", "methods"})


def upgrade() -> None:
    """Make the new tables and move the choices."""
    _make_settings()
    _make_people()
    _make_downloads_and_requests()
    _make_conversations()
    _move_choices()


def _make_settings() -> None:
    _table("setting", _text("name", key=True), _json("value", nullable=True), _text("source"), _time("updated_at"))
    _table("model_settings", _text("model_id", key=True), _json("values"), _text("source"), _time("updated_at"))
    _table("seal", _number("id", key=True), _text("digest"))


def _make_people() -> None:
    _table("account", _number("id", key=True), _text("password_hash"), _time("created_at"), _time("changed_at"))
    _table("session", _text("id", key=True), _time("created_at"), _time("seen_at"), _text("browser"))
    _table(
        "api_key",
        _number("id", key=True),
        *(_text(name) for name in ("name", "digest", "hint", "scope")),
        _time("created_at"),
        _time("used_at", nullable=True),
        _time("revoked_at", nullable=True),
    )
    op.create_index("ix_api_key_digest", "api_key", ["digest"], unique=True)


def _make_downloads_and_requests() -> None:
    _table(
        "download",
        _number("id", key=True),
        *(_text(name) for name in ("repository", "revision", "state")),
        *(_number(name) for name in ("position", "total_bytes", "done_bytes")),
        *(_text(name) for name in ("folder", "problem", "drafts_for")),
        *(_time(name) for name in ("created_at", "changed_at")),
    )
    op.create_index("ix_download_repository", "download", ["repository"])
    _table(
        "request",
        _text("id", key=True),
        *(_text(name) for name in ("endpoint", "model_id", "key_name")),
        _time("created_at"),
        _text("outcome"),
        _json("figures"),
        _text("prompt", nullable=True),
        _text("reply", nullable=True),
    )
    op.create_index("ix_request_created_at", "request", ["created_at"])
    op.create_index("ix_request_model_id", "request", ["model_id"])


def _make_conversations() -> None:
    _table(
        "conversation",
        _number("id", key=True),
        _text("title"),
        _text("model_id"),
        _json("options"),
        _time("created_at"),
        _time("changed_at"),
    )
    op.create_index("ix_conversation_changed_at", "conversation", ["changed_at"])
    _table(
        "message",
        _number("id", key=True),
        sa.Column(
            "conversation_id", sa.Integer(), sa.ForeignKey("conversation.id", ondelete="CASCADE"), nullable=False
        ),
        *(_text(name) for name in ("role", "content", "reasoning")),
        _json("spans", nullable=True),
        _json("figures", nullable=True),
        _time("created_at"),
    )
    op.create_index("ix_message_conversation_id", "message", ["conversation_id"])


def _move_choices() -> None:
    connection = op.get_bind()
    rows = connection.exec_driver_sql(f"SELECT model_id, source, updated_at, {', '.join(CHOICES)} FROM model_choice")  # noqa: S608
    for model_id, source, updated_at, *chosen in rows.fetchall():
        given = {name: value for name, value in zip(CHOICES, chosen, strict=True) if value is not None}
        values = {name: json.loads(str(value)) if name in LISTS else value for name, value in given.items()}
        connection.exec_driver_sql(
            'INSERT INTO model_settings (model_id, "values", source, updated_at) VALUES (?, ?, ?, ?)',
            (model_id, json.dumps(values), source, updated_at),
        )
    op.drop_table("model_choice")


def _table(name: str, *columns: sa.Column[Any]) -> None:
    op.create_table(name, *columns)


def _text(name: str, *, key: bool = False, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.String(), primary_key=key, nullable=nullable)


def _number(name: str, *, key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Integer(), primary_key=key, nullable=False)


def _time(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Float(), nullable=nullable)


def _json(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.JSON(), nullable=nullable)
