"""Which drafters a loaded unit gets, best first, and why the others cannot run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx import nn

from app.core.request import Request
from app.engine.drafters import Drafter, Outcome
from app.engine.drafters.dflash import DFlash
from app.engine.drafters.draft_model import DraftModel
from app.engine.drafters.eagle3 import Eagle3
from app.engine.drafters.mtp import Mtp
from app.engine.drafters.ngram import LONGEST_MATCH_TOKENS, SHORTEST_MATCH_TOKENS, Ngram
from app.engine.drafters.target import Target
from app.engine.rollback import UnknownCacheError
from app.engine.runner import Runner


@dataclass(frozen=True)
class Offer:
    """A loaded drafter of some method, not yet running: its module and its longest context in tokens."""

    module: nn.Module
    max_context_tokens: int


@dataclass(frozen=True)
class DraftSource:
    """What drafters are built from: what was loaded beside the target, by method, and the target itself."""

    offers: Mapping[str, Offer]
    target: nn.Module
    target_config: Mapping[str, Any]
    target_vocabulary: int
    chunk_tokens: int
    why_no_model: str = ""
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    methods: tuple[str, ...] = ()
    """The methods that were chosen for the model; empty: every one that can run."""


@dataclass(frozen=True)
class Drafters:
    """The drafters that can run, by method, and the reason of each that cannot."""

    available: Mapping[str, Drafter]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers that some drafter reads."""
        return tuple(sorted({tap for drafter in self.available.values() for tap in drafter.taps}))

    @property
    def longest(self) -> dict[str, int]:
        """Method → tokens that one proposal can hold at most, where there is such a bound."""
        return {name: one.longest for name, one in self.available.items() if one.longest is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of cache that they hold."""
        return sum(drafter.nbytes for drafter in self.available.values())

    def admit(self, request: Request) -> None:
        """A request starts; the drafters that it does not want never hear of it."""
        for name, drafter in self.available.items():
            if request.speculation.method in {"auto", name}:
                drafter.admit(request.id)

    def observe(self, outcome: Outcome) -> None:
        for drafter in self.available.values():
            drafter.observe(outcome)

    def release(self, request_id: str) -> None:
        for drafter in self.available.values():
            drafter.release(request_id)


def _draft_model(source: DraftSource) -> Drafter | str:
    offer = source.offers.get(DraftModel.name)
    if offer is None:
        return (
            source.why_no_model or "no draft model is loaded with this model: pass one with `--draft` or `draft_model`"
        )
    try:
        runner = Runner(offer.module, chunk_tokens=source.chunk_tokens)
    except UnknownCacheError as error:
        return f"the draft model's cache cannot be rolled back: {error}"
    return DraftModel(runner, target_vocabulary=source.target_vocabulary, max_context_tokens=offer.max_context_tokens)


def _reads_features(kind: type[DFlash | Eagle3 | Mtp]) -> Callable[[DraftSource], Drafter | str]:
    """Builds a drafter over hidden states of the target."""

    def build(source: DraftSource) -> Drafter | str:
        offer = source.offers.get(kind.name)
        if offer is None:
            return f"no {kind.name} drafter is loaded with this model: pass one with `--draft` or `draft_model`"
        try:
            target = Target(source.target, source.target_config, source.target_vocabulary)
        except ValueError as error:
            return f"the model's hidden states cannot be read: {error}"
        return kind(Runner(offer.module, chunk_tokens=source.chunk_tokens, probe=False), target)

    return build


def _ngram(source: DraftSource) -> Drafter | str:
    shortest, longest = source.prompt_lookup_min, source.prompt_lookup_max
    try:
        return Ngram(
            prompt_lookup_min=shortest or min(SHORTEST_MATCH_TOKENS, longest or SHORTEST_MATCH_TOKENS),
            prompt_lookup_max=longest or max(LONGEST_MATCH_TOKENS, shortest or 0),
        )
    except ValueError as error:
        return str(error)


REGISTRY: Mapping[str, Callable[[DraftSource], Drafter | str]] = {
    DFlash.name: _reads_features(DFlash),
    Mtp.name: _reads_features(Mtp),
    Eagle3.name: _reads_features(Eagle3),
    DraftModel.name: _draft_model,
    Ngram.name: _ngram,
}
"""Best first: that is the order in which `auto` tries them."""


def open_drafters(source: DraftSource) -> Drafters:
    """Build every drafter that fits and may run."""
    chosen = source.methods or tuple(REGISTRY)
    not_chosen = f"only {' and '.join(chosen)} may draft for this model: that was chosen for it"
    built = {name: make(source) if name in chosen else not_chosen for name, make in REGISTRY.items()}
    return Drafters(
        available={name: value for name, value in built.items() if not isinstance(value, str)},
        unavailable={name: value for name, value in built.items() if isinstance(value, str)},
    )
