"""Drafters: two verbs, `propose` and `observe`, between `admit` and `release`. A wrong draft costs time, never
correctness.

To add one: write a file with a subclass of `Drafter` and name it in `REGISTRY` of `registry.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.runner import Forward, Runner
from app.engine.sampling import SampledRow


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one cycle: int32 `tokens` [rows, K] (lazy) of which the first `counts[row]` are real.

    `reasons[row]` says why a row got none; empty when it got some. `logits` float32 [rows, K, vocabulary] are what the
    drafts were drawn from, bias and penalties applied; None when each draft was the drafter's only choice.
    """

    tokens: mx.array | None
    counts: tuple[int, ...]
    reasons: tuple[str, ...]
    logits: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one forward of the target left in its cache, row by row, prefill and plain steps included.

    `kept[row]` of the tokens fed from position `starts[row]` on stayed; of `drafted[row]` drafts the first
    `accepted[row]` were the target's own. `tokens[row]` is a live view of prompt and output. `features[tap]`
    [rows, width, hidden] is what the target's layer `tap` put out (taps that some drafter named).
    """

    sequence_ids: tuple[str, ...]
    tokens: tuple[Sequence[int], ...]
    starts: tuple[int, ...]
    kept: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    features: Mapping[int, mx.array] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        forward: Forward,
        *,
        tokens: Sequence[Sequence[int]],
        kept: Sequence[int],
        drafted: Sequence[int] = (),
        accepted: Sequence[int] = (),
    ) -> "Outcome":
        """The outcome of a committed forward; without drafts unless they are told."""
        none = (0,) * len(forward.sequence_ids)
        return cls(
            sequence_ids=forward.sequence_ids,
            tokens=tuple(tokens),
            starts=forward.starts,
            kept=tuple(kept),
            drafted=tuple(drafted) or none,
            accepted=tuple(accepted) or none,
            features=forward.features,
        )


class Drafter:
    """Proposes tokens ahead of the target. All calls come from the MLX thread; none waits for the device."""

    name: ClassVar[str]
    taps: tuple[int, ...] = ()
    """Target layers whose output it reads (`drafter_config.FINAL`: behind the final norm)."""
    longest: int | None = None
    """Tokens that one proposal can hold at most; None when there is no such bound."""
    runner: Runner | None = None
    """Its own model with its caches, for the prefix cache and the memory account; None when it keeps no tensors."""

    def admit(self, sequence_id: str) -> None:
        """A sequence starts that this drafter may be asked about."""

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        """Up to `row.num_draft_tokens` tokens that continue `row.tokens`, for each row."""
        raise NotImplementedError

    def observe(self, outcome: Outcome) -> None:
        """Learn what the target has read, and which drafts stayed."""

    def release(self, sequence_id: str) -> None:
        """The sequence is over. Unknown ids are fine."""
        if self.runner is not None:
            self.runner.release(sequence_id)

    @property
    def nbytes(self) -> int:
        """Bytes of cache that the drafter holds."""
        return 0 if self.runner is None else self.runner.caches.nbytes


Draft = Callable[[Sequence[DecodeRow], Sequence[SampledRow], int], tuple[mx.array, mx.array | None]]
"""(rows in slot order, their sampling, width) → int32 drafts [rows, width] and the logits they were drawn from."""


def propose_in_slot_order(
    rows: Sequence[DecodeRow],
    sampled: Sequence[SampledRow],
    counts: Sequence[int],
    reasons: Sequence[str],
    runner: Runner,
    draft: Draft,
) -> Proposal:
    """Let `draft` run over the rows that get some, in the order in which they lie in `runner`; answer as asked."""
    if not any(counts):
        return Proposal(None, tuple(counts), tuple(reasons))
    order = {rows[index].sequence_id: index for index, count in enumerate(counts) if count}
    drafting = [order[name] for name in runner.ordered(list(order))]
    tokens, logits = draft([rows[index] for index in drafting], [sampled[index] for index in drafting], max(counts))
    if drafting != list(range(len(rows))):
        place = mx.array([drafting.index(index) if index in drafting else 0 for index in range(len(rows))])
        tokens, logits = tokens[place], None if logits is None else logits[place]
    return Proposal(tokens, tuple(counts), tuple(reasons), logits)
