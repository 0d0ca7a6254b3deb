"""Counters of one sequence: they become `Statistics`.

A stop token counts as generated, as vLLM and mlx-lm count it, although it is never told. Drafts behind the end of a
sequence count nowhere: nobody asked for them.
"""

from dataclasses import dataclass, field

from app.core.reason import NO_REASON, Reason
from app.core.step import MethodStatistics, Parts, StepResult

PLAIN = "off"
NO_PARTS = Parts()


class Splitter:
    """Steps are taken apart now and then; the others are split as the last one of their method was."""

    def __init__(self) -> None:
        self._shares: dict[str, tuple[float, float]] = {}

    def split(self, result: StepResult, method: str, draft_seconds: float) -> Parts:
        """The parts of a step; `draft_seconds` is what its drafting usually takes."""
        if method == PLAIN:
            return Parts(verify_seconds=result.seconds)
        if result.timed:
            rest = result.seconds - result.draft_seconds
            if rest > 0:
                self._shares[method] = result.verify_seconds / rest, result.rewind_seconds / rest
            return Parts(result.draft_seconds, result.verify_seconds, result.rewind_seconds)
        drafting = min(draft_seconds, result.seconds)
        verify, rewind = self._shares.get(method, (1.0, 0.0))
        rest = result.seconds - drafting
        return Parts(drafting, verify * rest, rewind * rest)


@dataclass(slots=True)
class Counters:
    """Steps, drafts and acceptances, added up one decode step of one row at a time."""

    generated: int = 0
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
