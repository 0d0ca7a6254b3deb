"""Grammar constraints: masks for the logits of rows, made on the host while the device runs the forward."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from app.core.reason import Reason
from app.core.request import Constraint, Request
from app.core.step import DecodeRow
from app.engine.drafters.drafter import Proposal
from app.engine.runner import padded
from app.engine.sampling.drawing import OPENING_SALT, SampledRow, draw

LAUNCHED_AHEAD = 2
"""Number of tokens per row that are drawn before the host has read the first."""


class Constraints:
    """Constraints of one engine's rows."""

    def __init__(self, *, by_rejection: bool = False) -> None:
        self._by_rejection = by_rejection
        """Whether acceptance is by rejection: then no draft may be dropped or replaced because of its value."""
        self._constraints: dict[str, Constraint] = {}

    def admit(self, request: Request) -> None:
        if request.constraint is not None:
            self._constraints[request.id] = request.constraint.begin()

    def release(self, sequence_id: str) -> None:
        self._constraints.pop(sequence_id, None)

    def may_bind(self, rows: Sequence[DecodeRow], slots: int = LAUNCHED_AHEAD) -> bool:
        """Return whether any row's constraint may forbid one of its next `slots` tokens."""
        return bool(self._binding(rows, slots))

    def failure(self, row: DecodeRow, emitted: Sequence[int]) -> str:
        """Return why a row cannot continue, or may not end, after the tokens it emitted; empty while all is well."""
        constraint = self._constraints.get(row.sequence_id)
        return constraint.failure([*row.tokens[row.prompt_length :], *emitted]) if constraint else ""

    def forced(
        self, sequence_id: str, tokens: Sequence[int], prompt_length: int, emitted: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], ...]:
        """Return the known forced tokens that follow a row's `tokens` (prompt and output) and then `emitted`."""
        constraint = self._constraints.get(sequence_id)  # only constrained rows copy their tokens
        return constraint.forced([*tokens[prompt_length:], *emitted]) if constraint else ()

    def with_forced_drafts(self, row: DecodeRow) -> DecodeRow:
        """Return the row with forced tokens as its first drafts, and with fewer drafts if its masks take too long."""
        constraint = self._constraints.get(row.sequence_id)
        if constraint is None:
            return row
        most = constraint.affordable_drafts
        drafts = min(row.num_draft_tokens, most)
        forced = constraint.forced(row.tokens[row.prompt_length :])[:drafts]
        if self._by_rejection:
            forced = tuple(alternatives[:1] for alternatives in forced)
        refusal = Reason("slow_masks") if row.num_draft_tokens and not drafts else row.refusal
        longest = min(row.max_draft_tokens, most)
        return replace(row, forced=forced, refusal=refusal, num_draft_tokens=drafts, max_draft_tokens=longest)

    def append_forced(self, rows: Sequence[DecodeRow], proposal: Proposal) -> Proposal:
        """Cut each row's drafts at the first forbidden one, and append the tokens that its grammar forces there.
        The host waits for the drafts to be computed, but more accepted tokens per step are worth that."""
        binding = self._binding(rows, 1) if proposal.width and not self._by_rejection else {}
        if not any(proposal.counts[index] for index in binding):
            return proposal
        draft_tokens: Any = proposal.tokens.tolist()
        drafts = [tokens[:count] for tokens, count in zip(draft_tokens, proposal.counts, strict=True)]
        appended = [0] * len(rows)
        for index, (constraint, output) in binding.items():
            if row_drafts := drafts[index]:
                allowed, forced = constraint.forced_after(output, row_drafts)
                extra = forced[: max(0, rows[index].max_draft_tokens - allowed)]
                drafts[index], appended[index] = [*row_drafts[:allowed], *extra], len(extra)
        counts = tuple(map(len, drafts))
        # Keep at least one slot: a drafter must observe a verify forward even if all its drafts were cut.
        return proposal._replace(tokens=padded(drafts, 1), counts=counts, appended=tuple(appended))

    def mask(
        self,
        logits: mx.array,
        rows: Sequence[DecodeRow],
        sampled: Sequence[SampledRow],
        drafts: mx.array | None = None,
        counts: Sequence[int] = (),
    ) -> tuple[mx.array, Sequence[int]]:
        """Return `logits` float32 [rows, slots, vocabulary] with -inf for forbidden tokens; also count allowed drafts.

        `drafts` are int32 [rows, slots - 1]; the first `counts[row]` are real. An unmasked draw decides
        whether an answer begins with reasoning: masking first would inflate the probability of the opening marker.
        """
        slots, vocabulary = logits.shape[1:]
        binding = self._binding(rows, slots)
        if not binding:
            return logits, counts
        mx.async_eval(logits)  # the device computes while the host makes masks
        draft_tokens: Any = drafts.tolist() if drafts is not None else [()] * len(rows)
        allowed_counts = list(counts) or [0] * len(rows)
        masks = np.full((len(binding), slots, (vocabulary + 31) // 32), -1, dtype=np.int32)
        for (index, (constraint, output)), mask in zip(binding.items(), masks, strict=True):
            allowed_counts[index] = constraint.allow(output, draft_tokens[index][: allowed_counts[index]], mask)
        bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocabulary, bitorder="little")
        allowed = mx.array(bits.view(np.bool_))
        for mask_row, (index, (constraint, output)) in enumerate(binding.items()):
            if openings := constraint.openings(output):
                drawn = draw(logits[index : index + 1, :1], [sampled[index]._replace(salt=OPENING_SALT)])[0]
                opens = (mx.array(list(openings)) == drawn).any()
                allowed[mask_row, 0] = mx.where(opens, mx.arange(vocabulary) == drawn, allowed[mask_row, 0])
        if len(binding) == len(rows):
            return mx.where(allowed, logits, -mx.inf), allowed_counts
        masked, indices = mx.array(logits), mx.array(list(binding))  # a copy: scores are read from the raw logits
        masked[indices] = mx.where(allowed, logits[indices], -mx.inf)
        return masked, allowed_counts

    def _binding(self, rows: Sequence[DecodeRow], slots: int) -> dict[int, tuple[Constraint, Sequence[int]]]:
        """Return the constraints that may forbid one of the next `slots` tokens, each with its output, by row index."""
        binding = {}
        for index, row in enumerate(rows if self._constraints else ()):
            constraint = self._constraints.get(row.sequence_id)
            if constraint is not None and constraint.binds(output := row.tokens[row.prompt_length :], slots):
                binding[index] = constraint, output
        return binding
