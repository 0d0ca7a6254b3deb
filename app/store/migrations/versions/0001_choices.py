"""Choices and measurements, as Paceline kept them before it had a dashboard."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the two tables that `create_all` used to make."""
    op.create_table(
        "model_choice",
        sa.Column("model_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("drafts", sa.JSON()),
        sa.Column("methods", sa.JSON()),
        sa.Column("num_draft_tokens", sa.Integer()),
        sa.Column("policy", sa.String()),
        sa.Column("acceptance", sa.String()),
        sa.Column("prompt_lookup_min", sa.Integer()),
        sa.Column("prompt_lookup_max", sa.Integer()),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
    )
    op.create_table(
        "benchmark",
        sa.Column("id", sa.Integer(), primary_key=True, nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("machine", sa.JSON(), nullable=False),
        sa.Column("results", sa.JSON(), nullable=False),
    )
    op.create_index("ix_benchmark_model_id", "benchmark", ["model_id"])
