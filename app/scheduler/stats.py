"""Counters: of one sequence (they become `Statistics`) and of one loaded model (they become `Totals`).

A stop token counts as generated, as vLLM and mlx-lm count it, although it is never told. Drafts behind the end of a
sequence count nowhere: nobody asked for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.core.step import FinishReason


@dataclass(frozen=True, slots=True)
class Totals:
    """What one loaded model did since it was loaded; every number only grows."""

    finished: Mapping[str, int] = field(default_factory=dict)
    """Finish reason -> requests, the ones cancelled while they waited included."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    """Decode steps, counted once per row."""
    drafts: int = 0
    """Cycles that verified at least one draft, counted once per row."""
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()


@dataclass(slots=True)
class Counters:
    """Steps, drafts and acceptances, added up one decode step of one row at a time."""

    generated: int = 0
    steps: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)

    def count_step(self, *, kept: int, drafted: int, accepted: int, method: str) -> None:
        """Add one decode step that gained `kept` tokens, the first `accepted` of them out of `drafted` drafts."""
        self.generated += kept
        self.steps += 1
        if not drafted:
            return
        self.cycles += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_per_position.extend([0] * (drafted - len(self.accepted_per_position)))
        for position in range(accepted):
            self.accepted_per_position[position] += 1
        if method not in self.methods:
            self.methods.append(method)


@dataclass(slots=True)
class Refusals:
    """Why decode steps of one sequence ran without drafts, by kind of reason; texts may change, the last one is kept.

    A *firm* reason means that drafting was not allowed: it is told even when other steps drafted. The others (no
    n-gram matched, one token was left) belong to drafting and are told only when nothing was ever drafted.
    """

    _counts: dict[str, int] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)
    _firm: set[str] = field(default_factory=set)

    def add(self, kind: str, text: str, *, firm: bool) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._texts[kind] = text
        if firm:
            self._firm.add(kind)

    def told(self, *, cycles: int) -> str:
        """The reason that held for most steps; empty when every step was allowed to draft and some did."""
        kinds = [kind for kind in self._counts if kind in self._firm or not cycles]
        return self._texts[max(kinds, key=self._counts.__getitem__)] if kinds else ""


class ModelCounters:
    """The running sums behind `Totals`."""

    def __init__(self) -> None:
        self.decoding = Counters()
        self._finished: dict[str, int] = {}
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def count_admission(self, *, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def count_end(self, reason: FinishReason) -> None:
        self._finished[reason.value] = self._finished.get(reason.value, 0) + 1

    def totals(self) -> Totals:
        return Totals(
            finished=dict(self._finished),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self.decoding.generated,
            steps=self.decoding.steps,
            drafts=self.decoding.cycles,
            drafted=self.decoding.drafted,
            accepted=self.decoding.accepted,
            accepted_per_position=tuple(self.decoding.accepted_per_position),
        )
