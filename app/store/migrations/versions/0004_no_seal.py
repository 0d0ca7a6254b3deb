"""Drops the digest of the rows that protect the server: SQLite's own check of the file replaces it."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Drop the table that held it."""
    op.drop_table("seal")
