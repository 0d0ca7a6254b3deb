"""A generation request that ended, as plain values: what the server remembers of it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """`figures` has its numbers, by the names of the API; the texts are None unless they are kept."""

    id: str
    endpoint: str
    model_id: str
    key_name: str
    created_at: float
    """Unix seconds."""
    outcome: str
    """`stop`, `length`, `tool_calls`, `cancelled`, or the code of an error."""
    figures: dict[str, Any]
    prompt: str | None = None
    reply: str | None = None
