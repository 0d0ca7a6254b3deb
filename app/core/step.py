"""One step of the loop: the scheduler's plan, the engine's result, the client's events; and the engine as a port, so
that its callers can be tested with a fake.

There are no phases, only counters: `computed` counts the tokens of a sequence that are in the cache. Chunked
prefill, a prefix hit, rejected drafts and carried-over tokens are all `computed` lagging behind `len(tokens)`.
"""

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
    """One forward over chunks of prompts, padded to the longest; logits are read only of prompts that are scored."""

    rows: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Feed `tokens[computed:]` (one token, or more after a carry-over) and up to `num_draft_tokens` drafts.

    `tokens` is a read-only view of prompt and output. `remaining` is how many tokens may still be emitted (>= 1).
    Drafts and the tokens that a grammar forces after them are at most `max_draft_tokens`. The engine fills in
    `forced`: the first drafts, where a grammar allows nothing else, in the form of `Constraint.forced`; and `refusal`:
    why it drafts nothing after all.
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
    """Drafts that a drafter which only looks up would propose: `tokens`, after a match of the last `matched_tokens`."""

    tokens: tuple[int, ...] = ()
    matched_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """Result of one row: `emitted` = accepted drafts and then one recovered or bonus token of the target.

    `computed` is the new length of the cache. `drafted` counts only drafts that were verified. `confidences` are the
    probabilities of the emitted tokens by the target's raw logits.
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
    """Why the grammar of the row allows no next token; only this row fails."""
    embedding: tuple[float, ...] = ()
    """Embedding of the whole prompt, if requested."""
    appended: int = 0
    """Number of verified drafts, the last ones, that a grammar forced after those of the drafter."""
    replayed: int = 0
    """Tokens read again one by one under `strict`, because the last one emitted was in doubt."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcomes of one step. A planned row may be missing: it made no progress and is planned again."""

    outcomes: tuple[RowOutcome, ...] = ()
    prefilled: tuple[tuple[str, int], ...] = ()
    """(sequence id, new computed) of the rows that a prefill step fed."""
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By sequence id, if requested: log probabilities of the prompt's tokens after those that a prefill step fed."""
    offers: Mapping[str, Mapping[str, Offer]] = field(default_factory=dict)
    """By sequence id and method, of methods whose lookup costs nothing; without tokens where they find nothing."""
    forced: Mapping[str, int] = field(default_factory=dict)
    """By sequence id: number of next tokens that a grammar forces, whatever the method. Offers come after them."""
    seconds: float = 0.0
    width: int = 1
    phase_seconds: PhaseSeconds | None = None
    """Known only for a `timed` step that drafted."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of one decode step with `drafts` drafts a row on this machine.

    `seconds` is everything but the drafting, `draft_seconds` the drafting; 0: not measured. `context_tokens` is the
    lower end of a range that doubles, 0: short contexts. `is_learnt`: from requests, not from a warm-up.
    """

    method: str
    rows: int
    drafts: int
    seconds: float = 0.0
    draft_seconds: float = 0.0
    context_tokens: int = 0
    is_learnt: bool = False


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words where they exist."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    DEAD_END = "dead_end"
    """The grammar allows no next token, or finding one costs more than a step may."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens of one step for one client; exactly one event per request carries a `finish_reason`.

    `accepted` counts those of `tokens`, from the first, that came from the drafter.
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
    """Log probabilities of the next prompt tokens, from the second on, if requested: sent before any output token."""
    finish_reason: FinishReason | None = None
    statistics: Statistics = field(default_factory=Statistics)
    error: str | PacelineError = ""
    """Why it failed: an unexpected exception in words, or the error that refuses this request."""
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Capabilities and limits of a loaded engine, fixed for its lifetime but for drafters that fail."""

    max_context_tokens: int
    max_rows: int
    prefill_chunk_tokens: int = 512
    """Most tokens of one prefill step."""
    prefill_pairs: int = 1 << 27  # see `prefill_pairs` in `app/models/footprint.py`
    drafters: tuple[str, ...] = ()
    """Methods that could run here when it was opened, best first."""
    longest_drafts: Mapping[str, int] = field(default_factory=dict)
    """Method -> most drafts that it ever proposes; methods without a limit are absent."""
    unavailable: Mapping[str, Reason] = field(default_factory=dict)
    """Method -> reason why it cannot run here; grows where a drafter fails later."""
    cheap_tokens: tuple[int, ...] = ()
    """Token counts just before a forward gets dearer on this chip; empty where they are unknown."""
    stops_at_checkpoints: bool = False
    """Whether prefill stops at the checkpoints of a request, where caches that cannot be trimmed are copied."""

    @property
    def available(self) -> tuple[str, ...]:
        """Methods that can run here now, best first."""
        return tuple(name for name in self.drafters if name not in self.unavailable)


class EnginePort(Protocol):
    """One loaded model with its drafters. All calls come from the MLX thread; none blocks on anything else."""

    @property
    def limits(self) -> EngineLimits: ...

    def fetch(self, request: Request) -> bool:
        """Start reading from disk what `admit` would restore; return whether it is in memory. Never waits for long."""

    def admit(self, request: Request) -> int:
        """Claim a row; return how many prompt tokens were restored from the prefix cache (< prompt length)."""

    def step(self, plan: StepPlan) -> StepResult:
        """Run one forward. All caches commit or none: on an exception every row of the engine is gone."""

    def release(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """Free the row, and what was fetched for it. `tokens` (prompt and sent output) may enter the prefix cache;
        unknown ids are fine."""

    # --- for the pool: its bytes, and how to free them --------------------------------------------------------

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
