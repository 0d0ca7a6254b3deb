"""Drafters: two verbs, `propose` and `observe`, plus `release`. A wrong draft costs time, never correctness.

To add one: write a file with a class that has these verbs and name it in `REGISTRY` of `registry.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.sampling import SampledRow


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one cycle: int32 `tokens` [rows, K] (lazy) of which the first `counts[row]` are real.

    `reasons[row]` says why a row got none; empty when it got some.
    """

    tokens: mx.array | None
    counts: tuple[int, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a proposal: `accepted` of `drafted` tokens of one row were the target's own."""

    sequence_id: str
    drafted: int
    accepted: int


class Drafter(Protocol):
    """Proposes tokens ahead of the target. All calls come from the MLX thread; `propose` never waits for the device."""

    name: str

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        """Up to `row.num_draft_tokens` tokens that continue `row.tokens`, for each row."""
        ...

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Learn which drafts stayed, and forget the others."""
        ...

    def release(self, sequence_id: str) -> None:
        """The sequence is over. Unknown ids are fine."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of cache that the drafter holds."""
        ...
