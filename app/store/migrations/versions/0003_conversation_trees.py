"""Conversations become trees: each message is a turn with an id made by the page, and the id of its parent.

An earlier conversation becomes one line: each message follows the previous one.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Give every message an id and a parent, and every conversation a version."""
    op.add_column("conversation", sa.Column("version", sa.Integer(), nullable=False, server_default="1"))
    for name in ("turn", "parent"):
        op.add_column("message", sa.Column(name, sa.String(), nullable=False, server_default=sa.text("''")))
    op.execute("UPDATE message SET turn = 'm' || id")
    op.execute(
        "UPDATE message SET parent = coalesce((SELECT 'm' || max(earlier.id) FROM message AS earlier"
        " WHERE earlier.conversation_id = message.conversation_id AND earlier.id < message.id), '')"
    )
    op.create_index("ix_message_turn", "message", ["conversation_id", "turn"], unique=True)
    op.drop_index("ix_message_conversation_id", "message")
