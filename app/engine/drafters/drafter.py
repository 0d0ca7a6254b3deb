"""A drafter: two verbs, `propose` and `observe`, between `admit` and `release`.

A wrong draft costs time, never correctness. A lookup drafter has a third verb, `offer`, so that its worth is known
without trying it. `registry.py` decides which of them a loaded unit gets, and why not the others.

To add one: write a file here with a subclass of `Drafter`, and add a line to `METHODS` of `app/models/drafters/`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
from mlx import nn

from app.core.reason import Reason
from app.core.request import Request
from app.core.step import DecodeRow, Offer
from app.engine.loaded_unit import LoadedUnit
from app.engine.runner import Forward, Runner
from app.engine.sampling.drawing import SampledRow
from app.models.folder import ModelFolder


class Proposal(NamedTuple):
    """Drafts of one cycle: int32 `tokens` [rows, K] (lazy) of which the first `counts[row]` are real; K is 0 where no
    drafter ran.

    `reasons[row]` says why a row got none. `logits` float32 [rows, K, vocabulary] are what the drafts were drawn from,
    bias and penalties applied; None when each draft was the drafter's only choice. The last `appended[row]` drafts are
    forced by a grammar, not drafted; empty means none anywhere.
    """

    tokens: mx.array
    counts: tuple[int, ...]
    reasons: tuple[Reason, ...]
    logits: mx.array | None = None
    appended: tuple[int, ...] = ()

    @classmethod
    def none(cls, reasons: tuple[Reason, ...]) -> "Proposal":
        """Return a proposal without drafts."""
        return cls(mx.zeros((len(reasons), 0), mx.int32), (0,) * len(reasons), reasons)

    @property
    def width(self) -> int:
        """K, the drafts of the widest row."""
        return self.tokens.shape[1]

    @property
    def appended_counts(self) -> tuple[int, ...]:
        """Number of appended drafts of each row."""
        return self.appended or (0,) * len(self.counts)


class Observation(NamedTuple):
    """One `forward` of the target as drafters observe it, row by row, prefill and plain steps included.

    `committed[row]` of the tokens fed are in the cache. `tokens[row]` is a live view of prompt and output. Of
    `drafted[row]` drafts the first `accepted[row]` were accepted, without those that a grammar appended to the
    drafter's; both are empty where nothing was drafted.
    """

    forward: Forward
    tokens: Sequence[Sequence[int]]
    committed: Sequence[int]
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()


class Drafter:
    """Proposes tokens ahead of the target. All calls come from the MLX thread; none waits for the device."""

    name: ClassVar[str]
    taps: tuple[int, ...] = ()
    """Target layers whose output it reads (`FINAL`: after the final norm)."""
    longest: int | None = None
    """Most tokens in one proposal; None if unbounded."""
    runner: Runner | None = None
    """Runner of its own model, for the prefix cache and memory accounting; None if it keeps no tensors."""

    @classmethod
    def load(cls, folder: ModelFolder, target_config: Mapping[str, Any]) -> nn.Module:
        """Build the module of a published folder, with lazy weights. Raises ModelUnavailable."""
        raise NotImplementedError

    @classmethod
    def open(cls, unit: LoadedUnit) -> "Drafter":  # noqa: ARG003
        """Open the drafter of a loaded unit. Raises ModelUnavailable if it cannot run."""
        return cls()

    def admit(self, request: Request) -> None:
        """Start a sequence that this drafter may draft for, under the id of `request`."""

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        """Propose up to `row.num_draft_tokens` tokens that continue each row, `row.forced` first.
        Drafts in the places of forced tokens are discarded, so it should continue from them."""
        raise NotImplementedError

    def offer(self, sequence_id: str, tokens: Sequence[int], emitted: Sequence[int], limit: int) -> Offer | None:  # noqa: ARG002
        """Return up to `limit` tokens it would propose after `tokens` and `emitted`, if nearly free; else None."""
        return None

    def observe(self, observation: Observation) -> None:
        """Observe a forward of the target: its hidden states, and which drafts were accepted."""

    def commit(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """Catch up on the sequence's first `tokens` where necessary: they are about to enter the prefix cache."""

    def pending_features(self, sequence_id: str, length: int) -> mx.array | None:  # noqa: ARG002
        """Return the target's features of position `length` - 1 that it has yet to read; None if there are none."""
        return None

    def resume(self, sequence_id: str, length: int, features: mx.array | None) -> None:
        """Resume after the target's row was restored to `length`, and the drafter's own row to what was cached."""

    def release(self, sequence_id: str) -> None:
        """End the sequence. Unknown ids are fine."""
        if self.runner is not None:
            self.runner.release(sequence_id)
