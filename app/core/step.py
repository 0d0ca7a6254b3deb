"""One step of the loop: the scheduler's plan, the engine's result, the client's events; and the engine as a port, so
that its callers can be tested with a fake.

There are no phases, only counters: `computed` counts the tokens of a sequence that are in the cache. Chunked
prefill, a prefix hit, rejected drafts and carried-over tokens are all states with `computed` below `len(tokens)`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from app.core.errors import PacelineError
from app.core.reason import NO_REASON, Reason
from app.core.request import OFF, Request
from app.core.statistics import PhaseSeconds, Statistics
from app.core.unit import PrefixState


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Feed `tokens[start:end]` of one sequence."""

    sequence_id: str
    tokens: Sequence[int]
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether only the last token remains, which a decode step feeds."""
        return self.end == len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One forward over chunks of prompts, padded to the longest; logits are read only for prompts that are scored."""

    rows: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Feed `tokens[computed:]` (one token, or more after a carry-over) and up to `num_draft_tokens` drafts.

    `tokens` is a read-only view of prompt and output. `remaining` is how many tokens may still be emitted (>= 1).
    `max_draft_tokens` limits drafts plus the forced tokens that are appended to them. The engine fills in
    `forced`, the first drafts where a grammar allows nothing else (in the form of `Constraint.forced`), and `refusal`,
    the reason why the row drafts nothing after all.
    """

    sequence_id: str
    tokens: Sequence[int]
    prompt_length: int
    computed: int
    remaining: int
    method: str = OFF
    num_draft_tokens: int = 0
    max_draft_tokens: int = 0
    forced: tuple[tuple[int, ...], ...] = ()
    refusal: Reason = NO_REASON


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One forward for all rows, padded to the widest.

    `timed` makes the engine wait between drafting, verifying and rewinding, so that each can be measured.
    """

    rows: tuple[DecodeRow, ...]
    timed: bool = False


StepPlan = PrefillStep | DecodeStep


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability (nat) of one emitted token and of the likeliest ones, from the target's raw logits."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """Drafts that a lookup drafter would propose: `tokens`, which followed a match of the last `matched_tokens`."""

    tokens: tuple[int, ...] = ()
    matched_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """Result of one row: `emitted` = accepted drafts and then one recovered or bonus token of the target.

    `computed` is the new length of the cache. `drafted` counts only drafts that were verified. `confidences` are the
    probabilities that the target's raw logits give to the emitted tokens.
    """

    sequence_id: str
    emitted: tuple[int, ...]
    computed: int
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    method: str = OFF
    why_not_drafted: Reason = NO_REASON
    confidences: tuple[float, ...] = ()
    dead_end: str = ""
    """Reason why the row's grammar allows no next token; only this row fails."""
    embedding: tuple[float, ...] = ()
    """Embedding of the whole prompt, if requested."""
    appended: int = 0
    """Number of verified drafts, the last ones, that a grammar forced after the drafter's."""
    replayed: int = 0
    """Number of tokens fed again one by one under `strict`, because the last emitted token was in doubt."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcomes of one step. A planned row may be missing: it made no progress and is planned again."""

    outcomes: tuple[RowOutcome, ...] = ()
    prefilled: tuple[tuple[str, int], ...] = ()
    """Pair (sequence id, new `computed`) for each row that a prefill step fed."""
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Log probabilities by sequence id, if requested: of the prompt token after each token that a prefill step fed."""
    offers: Mapping[str, Mapping[str, Offer]] = field(default_factory=dict)
    """Offers by sequence id and method, for methods whose lookup is free. An offer without tokens means no match."""
    forced: Mapping[str, int] = field(default_factory=dict)
    """Number of next tokens that a grammar forces, by sequence id, whatever the method. Offers follow these tokens."""
    seconds: float = 0.0
    width: int = 1
    phase_seconds: PhaseSeconds | None = None
    """Seconds by phase, known only for a `timed` step that drafted."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of one decode step with `drafts` drafts per row on this machine.

    `seconds` excludes drafting, `draft_seconds` is drafting alone; 0: not measured. The cost is that of contexts from
    `context_tokens` to twice as many; 0: short contexts. `is_learnt`: measured in requests, not in a warm-up.
    """

    method: str
    rows: int
    drafts: int
    seconds: float = 0.0
    draft_seconds: float = 0.0
    context_tokens: int = 0
    is_learnt: bool = False


class FinishReason(StrEnum):
    """Reason why a sequence ended, in OpenAI's terms where they exist."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    DEAD_END = "dead_end"
    """The grammar allows no next token, or computing its mask exceeds the work limit."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens of one step for one client; exactly one event per request carries a `finish_reason`.

    The first `accepted` of `tokens` came from the drafter.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0
    method: str = OFF
    why_not_drafted: Reason = NO_REASON
    """Why this step drafted nothing."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of the prompt's next tokens, if requested, sent before any output; its first token has none."""
    finish_reason: FinishReason | None = None
    statistics: Statistics = field(default_factory=Statistics)
    error: str | PacelineError = ""
    """Failure of the request: the text of an unexpected exception, or the error that refuses the request."""
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Capabilities and limits of a loaded engine, fixed for its lifetime except for drafters that fail."""

    max_context_tokens: int
    max_rows: int
    prefill_chunk_tokens: int = 512
    """Maximum number of tokens in a prefill step."""
    prefill_pairs: int = 1 << 27  # see `prefill_pairs` in `app/models/footprint.py`
    drafters: tuple[str, ...] = ()
    """Methods that could run here when the engine was opened, best first."""
    longest_drafts: Mapping[str, int] = field(default_factory=dict)
    """Method -> longest draft worth considering, in tokens; every method that could run is present."""
    unavailable: Mapping[str, Reason] = field(default_factory=dict)
    """Method -> reason why it cannot run here; grows when a drafter fails later."""
    cheap_tokens: tuple[int, ...] = ()
    """Token counts just before a forward gets more expensive on this chip; empty if they are unknown."""
    stops_at_checkpoints: bool = False
    """Whether prefill stops at the checkpoints of a request, where caches that cannot be trimmed are copied."""
    vocabulary_size: int = sys.maxsize
    """Number of rows of the embedding; looking up another token would read foreign memory."""

    @property
    def available(self) -> tuple[str, ...]:
        """Methods that can run here now, best first."""
        return tuple(name for name in self.drafters if name not in self.unavailable)


class EnginePort(Protocol):
    """One loaded model with its drafters. All calls come from the MLX thread; none waits long for another thread."""

    @property
    def limits(self) -> EngineLimits: ...

    def fetch(self, request: Request) -> bool:
        """Do a slice of what precedes the admission: read from disk the prefix to restore, and measure what `strict`
        needs to know. Return whether all is done."""

    def admit(self, request: Request) -> int:
        """Claim a row; return how many prompt tokens were restored from the prefix cache (< prompt length)."""

    def step(self, plan: StepPlan) -> StepResult:
        """Run one step. Either all caches commit or none does: after an exception, every row of the engine is gone."""

    def release(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """Free the row, and what was fetched for it. `tokens` (prompt and sent output) may enter the prefix cache;
        unknown ids are ignored."""

    # --- for the pool: memory in use, and how to free it ------------------------------------------------------

    @property
    def cache_bytes(self) -> int: ...
    @property
    def prefix_cache_bytes(self) -> int: ...
    @property
    def cache_families(self) -> tuple[str, ...]: ...
    @property
    def prefix_state(self) -> PrefixState: ...
    def drop_prefix_cache(self, retained_share: float = 0.0) -> None: ...
    def bound_prefix_cache(self, limit_bytes: int) -> None: ...
    def close(self) -> None: ...
