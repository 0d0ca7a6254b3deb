"""The tables of the store. JSON columns hold plain values; an absent value is SQL's NULL. Times are Unix seconds."""

from typing import Any

from sqlalchemy import JSON, Column
from sqlmodel import Field, SQLModel


def _json(*, nullable: bool = False) -> Any:
    return Field(default=None, sa_column=Column(JSON(none_as_null=True), nullable=nullable))


class ModelChoiceRow(SQLModel, table=True):
    """What was chosen for one model; NULL is unset."""

    __tablename__ = "model_choice"

    model_id: str = Field(primary_key=True)
    drafts: list[str] | None = _json(nullable=True)
    methods: list[str] | None = _json(nullable=True)
    num_draft_tokens: int | None = None
    policy: str | None = None
    acceptance: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    source: str = ""
    """Who chose: a person, or `paceline bench`."""
    updated_at: float = 0.0


class BenchmarkRow(SQLModel, table=True):
    """What one run of `paceline bench MODEL` measured, with the machine and the versions."""

    __tablename__ = "benchmark"

    id: int | None = Field(default=None, primary_key=True)
    model_id: str = Field(index=True)
    created_at: float = 0.0
    versions: dict[str, Any] = _json()
    machine: dict[str, Any] = _json()
    results: dict[str, Any] = _json()
