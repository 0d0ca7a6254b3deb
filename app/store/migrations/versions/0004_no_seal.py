"""The digest of the rows that protect the server goes: SQLite's own check of the file is what counts."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Drop the table that held it."""
    op.drop_table("seal")
