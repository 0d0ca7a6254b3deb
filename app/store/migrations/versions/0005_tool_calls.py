"""Replies keep their tool calls."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the column; earlier replies have no calls."""
    op.add_column("message", sa.Column("calls", sa.JSON(), nullable=True))
