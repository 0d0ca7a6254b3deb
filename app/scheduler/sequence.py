"""One running request: its tokens and how many of them are in the cache. Everything else follows from these two."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.core.reason import NO_REASON, Reason
from app.core.request import OFF, Request
from app.core.statistics import Counters, Decision, PhaseSeconds, Statistics
from app.core.step import FinishReason, Offer, RowOutcome, TokenEvent, TokenLogprobs
from app.models.footprint import RowSize
from app.scheduler.costs import Average
from app.scheduler.estimates import DraftingRow, DraftObservation, Kind


@dataclass(slots=True)
class Refusals:
    """Reasons why decode steps of one sequence ran without drafts, by code, each with its latest values.

    A *firm* reason is a decision against drafting (not allowed, or would not pay): it is reported even if other steps
    drafted. Other reasons (no n-gram matched, one token was left) are reported only if nothing was ever drafted.
    """

    _counts: dict[str, int] = field(default_factory=dict)
    _last: dict[str, Reason] = field(default_factory=dict)
    _firm: set[str] = field(default_factory=set)

    def add(self, reason: Reason, *, firm: bool) -> None:
        self._counts[reason.code] = self._counts.get(reason.code, 0) + 1
        self._last[reason.code] = reason
        if firm:
            self._firm.add(reason.code)

    def main(self, *, has_drafted: bool) -> Reason:
        """Return the most frequent reason; `NO_REASON` if every step was allowed to draft and some did."""
        codes = [code for code in self._counts if code in self._firm or not has_drafted]
        return self._last[max(codes, key=self._counts.__getitem__)] if codes else NO_REASON


class _TrackedOffer(NamedTuple):
    """A tracked offer, whose first `hits` tokens were emitted."""

    kind: Kind
    tokens: tuple[int, ...]
    hits: int = 0


class OfferTracker:
    """Tracks a request's offers until their first mismatch or their end; offers after forced tokens are skipped."""

    def __init__(self) -> None:
        self.offered: Mapping[str, Offer] = {}
        """The latest offers by method."""
        self._tracked: list[_TrackedOffer] = []

    def update(
        self, emitted: tuple[int, ...], offers: Mapping[str, Offer], row: DraftingRow, *, forced: int = 0
    ) -> list[DraftObservation]:
        """Return what emitted tokens show about earlier offers; track new ones unless `forced` tokens precede them."""
        observations, tracked = [], []
        for kind, tokens, hits in self._tracked:
            pairs = list(zip(tokens[hits:], emitted, strict=False))
            matched = next((index for index, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
            compared = min(matched + 1, len(pairs))
            if compared:
                observations.append(DraftObservation(kind.method, compared, compared, matched, row, kind.match, hits))
            if matched == compared and hits + matched < len(tokens):
                tracked.append(_TrackedOffer(kind, tokens, hits + matched))
        self.offered = offers
        new = (_TrackedOffer(Kind.of(method, offer), offer.tokens) for method, offer in offers.items())
        if not forced and (emitted or not tracked):  # each chunk of a prompt repeats the same offers
            tracked += [offer for offer in new if offer.tokens]
        self._tracked = tracked
        return observations


CARRY_LIMIT_TOKENS = 17
"""Maximum number of uncached tokens that a decode step may feed; more are fed by a prefill step."""
TYPICAL_ANSWER_TOKENS = 1024
"""Expected length of an answer, in tokens, within the request's limit; once reached, as many more are expected."""
CONFIDENCE_TOKENS = 5
"""Maximum weight of all earlier tokens together in the confidence, in tokens."""


def expected_size(request: Request, generated: int, typical_answer_tokens: int, max_context_tokens: int) -> RowSize:
    """Return the expected final length: prompt and typical answer, plus another answer each time that is reached."""
    expected = typical_answer_tokens * (1 + generated // typical_answer_tokens)
    length = len(request.prompt_tokens)
    return RowSize(min(length + min(request.max_tokens, expected), max_context_tokens), length)


@dataclass(slots=True)
class LiveSequence:
    """Mutable state of one request between `submit` and its terminal event. Times are seconds of the injected clock."""

    request: Request
    submitted_at: float
    typical_answer_tokens: int = TYPICAL_ANSWER_TOKENS
    tokens: list[int] = field(init=False)
    computed: int = 0
    """Number of leading `tokens` in the cache."""
    cached_tokens: int = 0
    """Number of `tokens` that came from the prefix cache at admission."""
    preemptions: int = 0
    """Number of times that the sequence lost its row to others and had to prefill its tokens again."""
    out_of_memory_at: int = -1
    """Number of cached tokens when the sequence, running alone, ran out of device memory; -1 if it never did."""
    scores_sent: int = 0
    """Number of prompt tokens sent with their log probabilities."""
    counters: Counters = field(default_factory=Counters)
    refusals: Refusals = field(default_factory=Refusals)
    decision: Decision | None = None
    """Latest decision of the governor for this sequence."""
    forced: int = 0
    """Number of next tokens that a grammar makes certain."""
    offer_tracker: OfferTracker = field(default_factory=OfferTracker)
    confidence: Average = field(default_factory=lambda: Average(0.0))
    """Probability that the target gave this sequence's last tokens, earlier ones fading."""
    admitted_at: float | None = None
    decode_started_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_tokens)
        if self.request.constraint is not None:
            self.forced = len(self.request.constraint.begin().forced(()))

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def uncached_tokens(self) -> int:
        """Number of tokens not in the cache yet: at least the last one."""
        return len(self.tokens) - self.computed

    @property
    def needs_prefill(self) -> bool:
        """Whether prompt (or, after a deep rewind, output) tokens must be cached before the next token can be drawn."""
        return self.uncached_tokens > CARRY_LIMIT_TOKENS or (
            self.uncached_tokens > 1 and len(self.tokens) == self.prompt_length
        )

    @property
    def may_skip_prefill(self) -> bool:
        """Whether the first decode step may feed the short rest of the prompt.
        A prompt begun in chunks is finished in chunks (its end is a checkpoint), unless it reached its last one."""
        has_begun = self.computed not in {self.cached_tokens, *self.request.checkpoints[-1:]}
        return not has_begun and self.uncached_tokens <= CARRY_LIMIT_TOKENS and not self.request.scores_prompt

    def expected(self, max_context_tokens: int) -> RowSize:
        """Return its expected final length."""
        return expected_size(self.request, self.counters.generated, self.typical_answer_tokens, max_context_tokens)

    @property
    def can_be_preempted(self) -> bool:
        """Whether it can resume later from its tokens alone; prompt scores and embeddings would be computed again."""
        return not (self.request.scores_prompt or self.request.embeds)

    def admit(self, cached_tokens: int, now: float) -> None:
        """Record the admission to a row with `cached_tokens` cached tokens; statistics use the first admission."""
        self.computed = cached_tokens
        if self.admitted_at is None:
            self.admitted_at, self.cached_tokens = now, cached_tokens

    def preempt(self) -> None:
        """Record the loss of its row: all tokens must be prefilled again."""
        self.computed = 0
        self.preemptions += 1

    def unsent_scores(self, scores: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
        """Return those `scores` of the latest prefill step that were not sent yet: after a preemption, some were."""
        end = min(self.computed, self.prompt_length - 1)
        sent, self.scores_sent = self.scores_sent, max(self.scores_sent, end)
        return scores[max(0, sent - (end - len(scores))) :]

    def chunk_end(self, limit: int) -> int:
        """Return where a prefill chunk of at most `limit` tokens ends: before the last token, and at a checkpoint."""
        end = min(self.computed + limit, len(self.tokens) - 1)
        return min([end, *(checkpoint for checkpoint in self.request.checkpoints if self.computed < checkpoint)])

    def remaining(self, max_context_tokens: int) -> int:
        """Return how many tokens may still be emitted; an embedding's placeholder needs no room in the context."""
        room = max_context_tokens + bool(self.request.embeds) - len(self.tokens)
        return min(self.request.max_tokens - self.counters.generated, room)

    def append(
        self, outcome: RowOutcome, max_context_tokens: int, phases: PhaseSeconds, refusal: Reason = NO_REASON
    ) -> TokenEvent:
        """Append the emitted tokens; if one of them ends the sequence, drop the rest.

        Returns the client's event, without statistics; `refusal` is the reason if nothing was drafted.
        """
        remaining = self.remaining(max_context_tokens)
        emitted, finish_reason = 0, None
        for token in outcome.emitted:
            self.tokens.append(token)
            emitted += 1
            if token in self.request.stop_token_ids:
                finish_reason = FinishReason.STOP
            elif emitted == remaining:
                finish_reason = FinishReason.LENGTH
            if finish_reason:
                break
        self.computed = min(outcome.computed, len(self.tokens))
        for confidence in outcome.confidences[:emitted]:
            self.confidence.learn(confidence, CONFIDENCE_TOKENS)
        drafted = min(outcome.drafted, emitted) if finish_reason else outcome.drafted
        accepted = min(outcome.accepted, emitted)
        self.counters.count_step(
            emitted=emitted, drafted=drafted, accepted=accepted, method=outcome.method, phases=phases
        )
        self.counters.close_calls += outcome.replayed > 0
        self.counters.replayed_tokens += outcome.replayed
        sent = emitted - (finish_reason is FinishReason.STOP)
        return TokenEvent(
            request_id=self.request.id,
            tokens=outcome.emitted[:sent],
            drafted=drafted,
            accepted=min(accepted, sent),
            method=outcome.method if drafted else OFF,
            why_not_drafted=NO_REASON if drafted else refusal,
            logprobs=outcome.logprobs[:sent],
            finish_reason=finish_reason,
            embedding=outcome.embedding,
        )

    def cached_prefix(self) -> tuple[int, ...]:
        """Return the tokens whose keys and values are cached, a stop token included; nothing past the end."""
        return tuple(self.tokens[: self.computed])

    def statistics(self, now: float) -> Statistics:
        """Return the statistics. Prefill lasts from admission to the first decode step, decode from then to `now`."""
        admitted = now if self.admitted_at is None else self.admitted_at
        decoding = now if self.decode_started_at is None else self.decode_started_at
        first_token = self.submitted_at if self.first_token_at is None else self.first_token_at
        return Statistics(
            prompt_tokens=self.prompt_length,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.counters.generated,
            queue_seconds=admitted - self.submitted_at,
            prefill_seconds=decoding - admitted,
            decode_seconds=now - decoding,
            first_token_seconds=first_token - self.submitted_at,
            preemptions=self.preemptions,
            close_calls=self.counters.close_calls,
            replayed_tokens=self.counters.replayed_tokens,
            by_method=self.counters.by_method,
            reason=self.refusals.main(has_drafted=self.counters.has_drafted),
            decision=self.decision,
        )


def cache_length_error(computed: int, length: int) -> str:
    """Return the client's error message for a sequence whose engine claims an impossible cache length."""
    return f"the engine says that {computed} tokens are cached, but the sequence had {length} before this step"
