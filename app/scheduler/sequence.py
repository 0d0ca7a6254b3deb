"""One running request: its tokens and how many of them are in the cache. Everything else follows from these two."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.core.footprint import RowSize
from app.core.reason import NO_REASON, Reason
from app.core.request import Request
from app.core.statistics import Decision, MethodStatistics, Parts, Statistics
from app.core.step import FinishReason, Offer, RowOutcome, TokenEvent, TokenLogprobs
from app.scheduler.costs import PLAIN, Average
from app.scheduler.estimates import Drafting, DraftObservation, Kind

NO_PARTS = Parts()


@dataclass(slots=True)
class Counters:
    """Steps, drafts and acceptances, added up one decode step of one row at a time.

    A stop token counts as generated, as vLLM and mlx-lm count it, although it is never told. Drafts behind the end of
    a sequence count nowhere: nobody asked for them.
    """

    generated: int = 0
    close_calls: int = 0
    replayed_tokens: int = 0
    _by_method: dict[str, MethodStatistics] = field(default_factory=dict)

    def count_step(self, *, kept: int, drafted: int, accepted: int, method: str, parts: Parts = NO_PARTS) -> None:
        """Add one decode step that gained `kept` tokens, the first `accepted` of them out of `drafted` drafts."""
        self.generated += kept
        name = method if drafted else PLAIN
        known = self._by_method.get(name) or MethodStatistics(name)
        self._by_method[name] = known.after(drafted, accepted, parts)

    @property
    def by_method(self) -> tuple[MethodStatistics, ...]:
        """In order of first use; `off` counts the steps without drafts."""
        return tuple(self._by_method.values())

    @property
    def has_drafted(self) -> bool:
        """Whether a step verified at least one draft."""
        return bool(self._by_method.keys() - {PLAIN})


@dataclass(slots=True)
class Refusals:
    """Why decode steps of one sequence ran without drafts, by code; values may change, the last ones are kept.

    A *firm* reason means that drafting was not allowed: it is told even when other steps drafted. The others (no
    n-gram matched, one token was left) belong to drafting and are told only when nothing was ever drafted.
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
        """The reason that held for most steps; none when every step was allowed to draft and some did."""
        codes = [code for code in self._counts if code in self._firm or not has_drafted]
        return self._last[max(codes, key=self._counts.__getitem__)] if codes else NO_REASON


class _Followed(NamedTuple):
    """An offer of which the first `right` tokens came true."""

    kind: Kind
    tokens: tuple[int, ...]
    right: int = 0


class Hindsight:
    """Of one request: every offer is followed to its first wrong token or its end, but those behind forced tokens."""

    def __init__(self) -> None:
        self.offered: Mapping[str, Offer] = {}
        """The newest ones."""
        self._followed: list[_Followed] = []

    def look_back(
        self, emitted: tuple[int, ...], offers: Mapping[str, Offer], row: Drafting, *, forced: int = 0
    ) -> list[DraftObservation]:
        """What the emitted tokens tell about earlier offers; the new ones, behind so many `forced` tokens, are followed
        from now on."""
        observations, followed = [], []
        for kind, tokens, right in self._followed:
            pairs = list(zip(tokens[right:], emitted, strict=False))
            hits = next((place for place, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
            tried = min(hits + 1, len(pairs))
            if tried:
                observations.append(DraftObservation(kind.method, tried, tried, hits, row, kind.match, right))
            if hits == tried and right + hits < len(tokens):
                followed.append(_Followed(kind, tokens, right + hits))
        self.offered = offers
        fresh = (_Followed(Kind.of(method, offer), offer.tokens) for method, offer in offers.items())
        if not forced and (emitted or not followed):  # each piece of a prompt brings the same one again
            followed += [each for each in fresh if each.tokens]
        self._followed = followed
        return observations


CARRY_LIMIT_TOKENS = 17
"""More uncached tokens than this are fed by a prefill step, fewer may ride along with a decode step."""
USUAL_ANSWER_TOKENS = 1024
"""An answer that may be longer is expected to end here, and one that did not, after as many more."""
CONFIDENCE_TOKENS = 5
"""What all former tokens together count for at most in the confidence."""


@dataclass(slots=True)
class Sequence:
    """Mutable life of one request between `submit` and its terminal event. Times are seconds of the injected clock."""

    request: Request
    submitted_at: float
    usual_answer_tokens: int = USUAL_ANSWER_TOKENS
    tokens: list[int] = field(init=False)
    computed: int = 0
    """How many of `tokens`, from the first, are in the cache."""
    cached_tokens: int = 0
    """How many of them came from the prefix cache at admission."""
    preemptions: int = 0
    """How often it lost its row to others and read its tokens again later."""
    short_at: int = -1
    """How many were in the cache when the device had no memory for it alone; -1: it always had."""
    scores_told: int = 0
    """How many of the prompt's tokens were told with their log probabilities."""
    counters: Counters = field(default_factory=Counters)
    refusals: Refusals = field(default_factory=Refusals)
    decision: Decision | None = None
    """What the governor decided for it last."""
    forced: int = 0
    """How many of its next tokens a grammar makes certain."""
    hindsight: Hindsight = field(default_factory=Hindsight)
    confidence: Average = field(default_factory=lambda: Average(0.0))
    """How likely the target thought its last tokens, earlier ones fading."""
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
    def behind(self) -> int:
        """How many tokens are not in the cache yet: at least the last one."""
        return len(self.tokens) - self.computed

    @property
    def needs_prefill(self) -> bool:
        """Whether prompt (or, after a deep rewind, output) must be cached before the next token can be drawn."""
        return self.behind > CARRY_LIMIT_TOKENS or (self.behind > 1 and len(self.tokens) == self.prompt_length)

    @property
    def may_skip_prefill(self) -> bool:
        """Whether so little of the prompt is uncached that the first decode step may feed it. A prompt that was begun
        in chunks is finished so, unless its last checkpoint lies behind: its end is one of the prefix cache."""
        begun = self.computed not in {self.cached_tokens, *self.request.checkpoints[-1:]}
        return not begun and self.behind <= CARRY_LIMIT_TOKENS and not self.request.scores_prompt

    def expected(self, max_context_tokens: int) -> RowSize:
        """How long it will probably be in the end: its prompt and a usual answer, or one that is longer by another."""
        usual = self.usual_answer_tokens * (1 + self.counters.generated // self.usual_answer_tokens)
        answer = min(self.request.max_tokens, usual)
        return RowSize(min(self.prompt_length + answer, max_context_tokens), self.prompt_length)

    @property
    def can_wait(self) -> bool:
        """Whether it may go on later from its tokens alone. What else was told of a prompt would be told again."""
        return not (self.request.scores_prompt or self.request.embeds)

    def admit(self, cached_tokens: int, now: float) -> None:
        """It has a row whose cache holds so many of its tokens; for statistics the first one counts."""
        self.computed = cached_tokens
        if self.admitted_at is None:
            self.admitted_at, self.cached_tokens = now, cached_tokens

    def preempt(self) -> None:
        """It lost its row: everything is to be read again."""
        self.computed = 0
        self.preemptions += 1

    def unscored(self, scores: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
        """Of those of a prefill step that has just been counted, what was not told yet: it may be the second time."""
        end = min(self.computed, self.prompt_length - 1)
        told, self.scores_told = self.scores_told, max(self.scores_told, end)
        return scores[max(0, told - (end - len(scores))) :]

    def next_stop(self, limit: int) -> int:
        """Where a piece of at most `limit` tokens of the prompt ends: before the last token, and at a checkpoint."""
        end = min(self.computed + limit, len(self.tokens) - 1)
        return min([end, *(place for place in self.request.checkpoints if self.computed < place)])

    def remaining(self, max_context_tokens: int) -> int:
        """How many tokens may still be emitted; the one that stands for an embedding needs no place in the context."""
        room = max_context_tokens + bool(self.request.embeds) - len(self.tokens)
        return min(self.request.max_tokens - self.counters.generated, room)

    def take(
        self, outcome: RowOutcome, max_context_tokens: int, parts: Parts, refusal: Reason = NO_REASON
    ) -> TokenEvent:
        """Append the emitted tokens one by one up to the end, if it is among them; what lies behind it never was.

        The answer is what the client is told of it, but for statistics; `refusal`: why nothing was drafted.
        """
        remaining = self.remaining(max_context_tokens)
        kept, finish_reason = 0, None
        for token in outcome.emitted:
            self.tokens.append(token)
            kept += 1
            if token in self.request.stop_token_ids:
                finish_reason = FinishReason.STOP
            elif kept == remaining:
                finish_reason = FinishReason.LENGTH
            if finish_reason:
                break
        self.computed = min(outcome.computed, len(self.tokens))
        for each in outcome.confidences[:kept]:
            self.confidence.learn(each, CONFIDENCE_TOKENS)
        drafted = min(outcome.drafted, kept) if finish_reason else outcome.drafted
        accepted = min(outcome.accepted, kept)
        self.counters.count_step(kept=kept, drafted=drafted, accepted=accepted, method=outcome.method, parts=parts)
        self.counters.close_calls += outcome.replayed > 0
        self.counters.replayed_tokens += outcome.replayed
        shown = kept - (finish_reason is FinishReason.STOP)
        return TokenEvent(
            request_id=self.request.id,
            tokens=outcome.emitted[:shown],
            drafted=drafted,
            accepted=min(accepted, shown),
            method=outcome.method if drafted else PLAIN,
            why_not_drafted=NO_REASON if drafted else refusal,
            logprobs=outcome.logprobs[:shown],
            finish_reason=finish_reason,
            embedding=outcome.embedding,
        )

    def cached_prefix(self) -> tuple[int, ...]:
        """The tokens whose keys and values the cache holds, a stop token included; nothing behind the end."""
        return tuple(self.tokens[: self.computed])

    def statistics(self, now: float) -> Statistics:
        """The counters so far. Prefill lasts from admission to the first decode step, decode from there to `now`."""
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


def impossible(computed: int, length: int) -> str:
    """What to tell the client of a sequence whose engine claims an impossible cache length."""
    return f"the engine says that {computed} tokens are cached, but the sequence had {length} before this step"
