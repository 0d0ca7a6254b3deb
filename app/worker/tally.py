"""Counts what one choice was told, so that usage ends exactly at a stop string, which the scheduler cannot see."""

from dataclasses import replace

from app.core.step import MethodStatistics, Statistics, TokenEvent
from app.scheduler.stats import Counters


class Tally:
    """Counters of one choice; times are seconds of the worker's monotonic clock, from the receipt of the command."""

    def __init__(self, *, prompt_tokens: int, received_at: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._received_at = received_at
        self._queued_at = received_at
        self._last_told_at = received_at
        self._told = Counters()

    def queued(self, at: float) -> None:
        """The scheduler has it; its own clock starts here."""
        self._queued_at = at

    def count(self, told: TokenEvent, tokens_used: int, at: float) -> tuple[int, int]:
        """One step of which `tokens_used` tokens were used; what a stop string cut off counts nowhere.

        The answer is what was counted: (drafted, accepted).
        """
        if not told.tokens:
            return 0, 0
        cut = tokens_used < len(told.tokens)
        drafted = min(told.drafted, tokens_used) if cut else told.drafted
        accepted = min(told.accepted, tokens_used) if drafted else 0
        self._last_told_at = at
        self._told.count_step(kept=tokens_used, drafted=drafted, accepted=accepted, method=told.method)
        return drafted, accepted

    def usage(self, statistics: Statistics) -> Statistics:
        """The scheduler's account of an end that it decided itself, with the time before it was queued added."""
        lead_seconds = self._queued_at - self._received_at
        first_token_seconds = statistics.first_token_seconds
        return replace(
            statistics,
            prompt_tokens=self._prompt_tokens,
            queue_seconds=lead_seconds + statistics.queue_seconds,
            first_token_seconds=lead_seconds + first_token_seconds if statistics.completion_tokens else 0.0,
        )

    def usage_as_told(self, statistics: Statistics, ended_at: float) -> Statistics:
        """What was told, when a stop string or the client ended it before the scheduler did at `ended_at`."""
        told = self._told
        late_seconds = ended_at - self._last_told_at if told.steps else statistics.decode_seconds
        whole = self.usage(statistics)
        return replace(
            whole,
            completion_tokens=told.generated,
            drafted=told.drafted,
            accepted=told.accepted,
            cycles=told.cycles,
            steps=told.steps,
            accepted_per_position=told.accepted_per_position,
            decode_seconds=max(0.0, whole.decode_seconds - late_seconds),
            methods=told.methods,
            by_method=self._methods_as_told(whole.by_method),
        )

    def _methods_as_told(self, whole: tuple[MethodStatistics, ...]) -> tuple[MethodStatistics, ...]:
        """The counts are those that were told; the seconds, theirs by the share of steps."""
        known = {each.method: each for each in whole}
        told = []
        for each in self._told.statistics():
            all_of_it = known.get(each.method, each)
            share = min(1.0, each.steps / max(1, all_of_it.steps))
            told.append(
                replace(
                    each,
                    draft_seconds=share * all_of_it.draft_seconds,
                    verify_seconds=share * all_of_it.verify_seconds,
                    rewind_seconds=share * all_of_it.rewind_seconds,
                )
            )
        return tuple(told)
