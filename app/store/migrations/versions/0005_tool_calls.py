"""Replies keep the tools that they call."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Earlier replies called none."""
    op.add_column("message", sa.Column("calls", sa.JSON(), nullable=True))
