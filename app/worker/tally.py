"""Counts what one choice was told, so that usage ends exactly at a stop string, which the scheduler cannot see."""

from app.core.messages import Usage
from app.core.step import Statistics, TokenEvent


class Tally:
    """Counters of one choice; times are seconds of the worker's monotonic clock, from the receipt of the command."""

    def __init__(self, *, prompt_tokens: int, received_at: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._received_at = received_at
        self._queued_at = received_at
        self._last_told_at = received_at
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

    def count(self, told: TokenEvent, tokens_used: int, at: float) -> None:
        """One step of which `tokens_used` tokens were used; what a stop string cut off counts nowhere."""
        if not told.tokens:
            return
        cut = tokens_used < len(told.tokens)
        drafted = min(told.drafted, tokens_used) if cut else told.drafted
        self._last_told_at = at
        self._completion_tokens += tokens_used
        self._steps += 1
        if drafted:
            self._count_cycle(told.method, drafted, min(told.accepted, tokens_used))

    def usage(self, statistics: Statistics) -> Usage:
        """The scheduler's account of an end that it decided itself, with the time before it was queued added."""
        lead_seconds = self._queued_at - self._received_at
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
            first_token_seconds=lead_seconds + statistics.first_token_seconds if statistics.completion_tokens else 0.0,
            methods=statistics.methods,
            reason=statistics.reason,
        )

    def usage_as_told(self, statistics: Statistics, ended_at: float) -> Usage:
        """What was told, when a stop string or the client ended it before the scheduler did at `ended_at`."""
        late_seconds = ended_at - self._last_told_at if self._steps else statistics.decode_seconds
        whole = self.usage(statistics)
        return Usage(
            prompt_tokens=whole.prompt_tokens,
            cached_tokens=whole.cached_tokens,
            completion_tokens=self._completion_tokens,
            drafted=self._drafted,
            accepted=self._accepted,
            cycles=self._cycles,
            steps=self._steps,
            accepted_per_position=tuple(self._accepted_per_position),
            queue_seconds=whole.queue_seconds,
            prefill_seconds=whole.prefill_seconds,
            decode_seconds=max(0.0, whole.decode_seconds - late_seconds),
            first_token_seconds=whole.first_token_seconds,
            methods=tuple(self._methods) or (("off",) if self._steps else ()),
            reason=whole.reason,
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
