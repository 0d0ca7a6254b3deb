"""Counts what one choice was told, so that usage ends exactly at a stop string, which the scheduler cannot see."""

from app.core.messages import Usage
from app.core.step import Statistics, TokenEvent
from app.worker.mail import Admitted


class Tally:
    """Counters and times of one choice; times are seconds of the worker's monotonic clock."""

    def __init__(self, *, prompt_tokens: int, received_at: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._received_at = received_at
        self._queued_at = received_at
        self._admitted_at: float | None = None
        self._decoding_at: float | None = None
        self._first_token_at: float | None = None
        self._last_told_at = received_at
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._drafted = 0
        self._accepted = 0
        self._cycles = 0
        self._steps = 0
        self._accepted_per_position: list[int] = []
        self._methods: list[str] = []

    def queued(self, at: float) -> None:
        """The scheduler has it; its own clock starts here."""
        self._queued_at = at

    def admitted(self, note: Admitted) -> None:
        """It has a row."""
        self._admitted_at = note.at
        self._cached_tokens = note.cached_tokens

    def count(self, told: TokenEvent, tokens_used: int, at: float, step_seconds: float) -> None:
        """One step of which `tokens_used` tokens were used; what a stop string cut off counts nowhere."""
        if not told.tokens:
            return
        cut = tokens_used < len(told.tokens)
        drafted = min(told.drafted, tokens_used) if cut else told.drafted
        accepted = min(told.accepted, tokens_used)
        if self._decoding_at is None:
            self._decoding_at = max(at - step_seconds, self._admitted_at or self._received_at)
        if self._first_token_at is None:
            self._first_token_at = at
        self._last_told_at = at
        self._completion_tokens += tokens_used
        self._steps += 1
        if drafted:
            self._count_cycle(told.method, drafted, accepted)

    def usage_so_far(self, reason: str) -> Usage:
        """What was told up to now: after a stop string or a cancel."""
        admitted_at = self._last_told_at if self._admitted_at is None else self._admitted_at
        decoding_at = self._last_told_at if self._decoding_at is None else self._decoding_at
        first_token_at = self._received_at if self._first_token_at is None else self._first_token_at
        return Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            drafted=self._drafted,
            accepted=self._accepted,
            cycles=self._cycles,
            steps=self._steps,
            accepted_per_position=tuple(self._accepted_per_position),
            queue_seconds=admitted_at - self._received_at,
            prefill_seconds=max(0.0, decoding_at - admitted_at),
            decode_seconds=max(0.0, self._last_told_at - decoding_at),
            first_token_seconds=first_token_at - self._received_at,
            methods=tuple(self._methods) or (("off",) if self._steps else ()),
            reason=reason,
        )

    def usage_of(self, statistics: Statistics) -> Usage:
        """The scheduler's own account of an end it saw, with the time before it was queued added."""
        lead_seconds = self._queued_at - self._received_at
        first_token_seconds = statistics.first_token_seconds
        return Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=statistics.cached_tokens,
            completion_tokens=statistics.completion_tokens,
            drafted=statistics.drafted,
            accepted=statistics.accepted,
            cycles=statistics.cycles,
            steps=statistics.steps,
            accepted_per_position=statistics.accepted_per_position,
            queue_seconds=lead_seconds + statistics.queue_seconds,
            prefill_seconds=statistics.prefill_seconds,
            decode_seconds=statistics.decode_seconds,
            first_token_seconds=lead_seconds + first_token_seconds if first_token_seconds else 0.0,
            methods=statistics.methods,
            reason=statistics.reason,
        )

    def _count_cycle(self, method: str, drafted: int, accepted: int) -> None:
        self._cycles += 1
        self._drafted += drafted
        self._accepted += accepted
        self._accepted_per_position.extend([0] * (drafted - len(self._accepted_per_position)))
        for position in range(accepted):
            self._accepted_per_position[position] += 1
        if method not in self._methods:
            self._methods.append(method)
