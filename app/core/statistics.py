"""Statistics of a request, from the step to the API: counters, seconds by phase, and reasons for its drafting."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from app.core.reason import NO_REASON, Reason
from app.core.request import OFF


@dataclass(frozen=True, slots=True)
class Decision:
    """Reason why a step drafts as it does, or not at all. `kind` groups decisions that differ only in their numbers.

    `method` and `num_draft_tokens` name the option that was weighed, even if it did not run. A step with it costs
    `cost_ratio` plain steps; `acceptance` is the expected probability that its first draft token is accepted.
    """

    kind: str = "draft"
    method: str = OFF
    num_draft_tokens: int = 0
    cost_ratio: float = 1.0
    acceptance: float = 0.0


class PhaseSeconds(NamedTuple):
    """Seconds of one step by phase."""

    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rewind_seconds: float = 0.0


NO_PHASE_SECONDS = PhaseSeconds()


@dataclass(frozen=True, slots=True)
class MethodStatistics:
    """Counters of one method over the steps that it ran; the method `off` stands for the steps without drafts.

    Seconds are wall time of the whole batch, not divided by its rows; `verify_seconds` includes plain forwards.
    """

    method: str
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rewind_seconds: float = 0.0

    def after(self, drafted: int, accepted: int, phases: PhaseSeconds) -> "MethodStatistics":
        """Return the counters after one more step."""
        return MethodStatistics(
            self.method,
            self.steps + 1,
            self.drafted + drafted,
            self.accepted + accepted,
            added_positions([self.accepted_per_position, (1,) * accepted + (0,) * (drafted - accepted)]),
            self.draft_seconds + phases.draft_seconds,
            self.verify_seconds + phases.verify_seconds,
            self.rewind_seconds + phases.rewind_seconds,
        )

    @classmethod
    def combined(cls, choices: Sequence["MethodStatistics"]) -> "MethodStatistics":
        """Combine one method's counters of parallel choices: counts add up, seconds are the maximum of any choice."""
        return cls(
            choices[0].method,
            steps=sum(choice.steps for choice in choices),
            drafted=sum(choice.drafted for choice in choices),
            accepted=sum(choice.accepted for choice in choices),
            accepted_per_position=added_positions(choice.accepted_per_position for choice in choices),
            draft_seconds=max(choice.draft_seconds for choice in choices),
            verify_seconds=max(choice.verify_seconds for choice in choices),
            rewind_seconds=max(choice.rewind_seconds for choice in choices),
        )


def added_positions(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Add up counts by position."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


@dataclass(slots=True)
class Counters:
    """Totals of steps, drafts and acceptances, added up one decode step of one row at a time.

    A stop token counts as generated, as in vLLM and mlx-lm, although the client never gets it. Drafts past the end of a
    sequence are not counted.
    """

    generated: int = 0
    close_calls: int = 0
    replayed_tokens: int = 0
    _by_method: dict[str, MethodStatistics] = field(default_factory=dict)

    def count_step(
        self, *, emitted: int, drafted: int, accepted: int, method: str, phases: PhaseSeconds = NO_PHASE_SECONDS
    ) -> None:
        """Add one decode step that gained `emitted` tokens, the first `accepted` of them out of `drafted` drafts."""
        self.generated += emitted
        name = method if drafted else OFF
        previous = self._by_method.get(name) or MethodStatistics(name)
        self._by_method[name] = previous.after(drafted, accepted, phases)

    @property
    def by_method(self) -> tuple[MethodStatistics, ...]:
        """Statistics by method, in order of first use; `off` counts the steps without drafts."""
        return tuple(self._by_method.values())

    @property
    def has_drafted(self) -> bool:
        """Whether a step verified at least one draft."""
        return bool(self._by_method.keys() - {OFF})


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of one sequence, or of a reply up to the last token sent, from the step to the API.

    Sums and rates are derived, never stored.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Completion tokens that were sent to the client as reasoning."""
    queue_seconds: float = 0.0
    """Seconds from `submit` to admission."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    """Seconds from `submit` to the first tokens sent; 0 when there were none."""
    preemptions: int = 0
    """Number of times that the sequence lost its row for lack of memory and had to prefill its tokens again."""
    close_calls: int = 0
    """Number of tokens that were in doubt under `strict` and therefore drawn again by plain decoding."""
    replayed_tokens: int = 0
    """Number of tokens that were fed again for these draws."""
    by_method: tuple[MethodStatistics, ...] = ()
    """Counters by method, in order of first use; `off` counts the steps without drafts."""
    reason: Reason = NO_REASON
    """Reason why speculation did not run, or not in every step."""
    decision: Decision | None = None
    """Last decision of the governor for the sequence; None if the governor made none."""

    @property
    def drafted(self) -> int:
        return sum(counters.drafted for counters in self.by_method)

    @property
    def accepted(self) -> int:
        return sum(counters.accepted for counters in self.by_method)

    @property
    def steps(self) -> int:
        return sum(counters.steps for counters in self.by_method)

    @property
    def cycles(self) -> int:
        """Steps that verified at least one draft."""
        return sum(counters.steps for counters in self.by_method if counters.method != OFF)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        return added_positions(counters.accepted_per_position for counters in self.by_method)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that ran, in order of first use; `off` only when nothing ever drafted."""
        names = tuple(counters.method for counters in self.by_method)
        return tuple(name for name in names if name != OFF) or names

    @classmethod
    def combined(cls, usages: Sequence["Statistics"], *, choices_per_prompt: int = 1) -> "Statistics":
        """Return the usage of a whole request; `choices_per_prompt` consecutive choices count their prompt once.

        Choices run in parallel: each time is the longest of any choice, except that of the first token, the shortest.
        """
        first_of_prompts = usages[::choices_per_prompt]
        methods = [counters for usage in usages for counters in usage.by_method]
        return cls(
            prompt_tokens=sum(usage.prompt_tokens for usage in first_of_prompts),
            cached_tokens=sum(usage.cached_tokens for usage in first_of_prompts),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
            queue_seconds=max((usage.queue_seconds for usage in usages), default=0.0),
            prefill_seconds=max((usage.prefill_seconds for usage in usages), default=0.0),
            decode_seconds=max((usage.decode_seconds for usage in usages), default=0.0),
            first_token_seconds=min(filter(None, (usage.first_token_seconds for usage in usages)), default=0.0),
            preemptions=sum(usage.preemptions for usage in usages),
            close_calls=sum(usage.close_calls for usage in usages),
            replayed_tokens=sum(usage.replayed_tokens for usage in usages),
            by_method=tuple(
                MethodStatistics.combined([counters for counters in methods if counters.method == name])
                for name in dict.fromkeys(counters.method for counters in methods)
            ),
            reason=next((usage.reason for usage in usages if usage.reason), NO_REASON),
            decision=next((usage.decision for usage in usages if usage.decision), None),
        )
