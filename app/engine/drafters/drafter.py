"""The interface of drafters: `propose` and `observe`, between `admit` and `release` of a request.

A wrong draft costs time, never correctness. A lookup drafter also has `offer`, so that its drafts can be assessed
without being verified. `registry.py` decides which drafters a loaded unit gets, and states why the others are missing.

To add a drafter: write a file here with a subclass of `Drafter`, and add a line to `METHODS` of `app/models/drafters/`.
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

    `reasons[row]` is the reason why a row got none. The drafts were drawn from `logits` float32 [rows, K, vocabulary],
    after bias and penalties; None if each draft was the drafter's only choice. A grammar forced the last
    `appended[row]` of the drafts, after those of the drafter; empty if it forced none in any row.
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
        """K, the number of drafts of the widest row."""
        return self.tokens.shape[1]

    @property
    def appended_counts(self) -> tuple[int, ...]:
        """Number of appended drafts of each row."""
        return self.appended or (0,) * len(self.counts)


class Observation(NamedTuple):
    """One `forward` of the target, row by row, as drafters observe it, also in prefill and plain steps.

    The first `committed[row]` of the fed tokens are in the cache. `tokens[row]` is a live view of prompt and output.
    `drafted[row]` drafts were verified; `accepted[row]` counts those accepted, except drafts that a grammar appended
    to the drafter's. Both are empty if nothing was drafted.
    """

    forward: Forward
    tokens: Sequence[Sequence[int]]
    committed: Sequence[int]
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()


class Drafter:
    """Proposes tokens ahead of the target. All calls come from the MLX thread; none blocks for longer than a slice."""

    name: ClassVar[str]
    taps: tuple[int, ...] = ()
    """Target layers whose output the drafter reads (`FINAL`: after the final norm)."""
    longest: int | None = None
    """Maximum number of tokens in one proposal; None if unbounded."""
    runner: Runner | None = None
    """Runner of the drafter's model, for the prefix cache and memory accounting; None if the drafter has no tensors."""

    @classmethod
    def load(cls, folder: ModelFolder, target_config: Mapping[str, Any]) -> nn.Module:
        """Build the module from a published folder, with lazy weights. Raises ModelUnavailable."""
        raise NotImplementedError

    @classmethod
    def open(cls, unit: LoadedUnit) -> "Drafter":  # noqa: ARG003
        """Open the drafter of a loaded unit. Raises ModelUnavailable if it cannot run."""
        return cls()

    def admit(self, request: Request) -> None:
        """Start a sequence that this drafter may draft for, under the id of `request`."""

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        """Propose up to `row.num_draft_tokens` tokens that continue each row, `row.forced` first.
        Where a token is forced, propose an alternative that the grammar allows; anything else is overwritten."""
        raise NotImplementedError

    def offer(self, sequence_id: str, tokens: Sequence[int], emitted: Sequence[int], limit: int) -> Offer | None:  # noqa: ARG002
        """Return up to `limit` tokens that it would propose after `tokens` and `emitted`, if nearly free; else None."""
        return None

    def observe(self, observation: Observation) -> None:
        """Observe a forward of the target: its hidden states, and which drafts were accepted."""

    def commit(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """Catch up on the sequence's first `tokens` if necessary, as far as a slice allows: they are about to enter the
        prefix cache, now or a few steps later."""

    def pending_features(self, sequence_id: str, length: int) -> mx.array | None:  # noqa: ARG002
        """Return the target's features at position `length` - 1 if the drafter has not read them yet; else None."""
        return None

    def resume(self, sequence_id: str, length: int, features: mx.array | None) -> None:
        """Resume after a prefix hit restored the target's row to `length`, and what was cached of the drafter's row."""

    def release(self, sequence_id: str) -> None:
        """End the sequence. Unknown ids are fine."""
        if self.runner is not None:
            self.runner.release(sequence_id)
