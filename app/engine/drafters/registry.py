"""Which drafters a loaded unit gets, best first, and why the others cannot run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from app.core.drafters import METHOD_NAMES
from app.core.errors import ModelUnavailable
from app.core.reason import Reason
from app.core.request import Request
from app.core.step import DRAFT_LENGTHS, Offer
from app.engine.drafters import Drafter, LoadedUnit, NoDraft, Outcome
from app.engine.runner import Runner


def _drafter_of(method: str) -> type[Drafter]:
    """The drafter of that name in the file of that name."""
    kinds = vars(import_module(f"app.engine.drafters.{method}")).values()
    return next(kind for kind in kinds if isinstance(kind, type) and getattr(kind, "name", "") == method)


REGISTRY: Mapping[str, type[Drafter]] = {method: _drafter_of(method) for method in METHOD_NAMES}
"""Best first, as in `METHODS`."""


@dataclass(frozen=True)
class Drafters:
    """The drafters that can run, by method, and the reason of each that cannot."""

    available: Mapping[str, Drafter]
    unavailable: Mapping[str, Reason] = field(default_factory=dict)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers that some drafter reads."""
        return tuple(sorted({tap for drafter in self.available.values() for tap in drafter.taps}))

    @property
    def longest(self) -> dict[str, int]:
        """Method → tokens that one proposal can hold at most, where there is such a bound."""
        return {name: one.longest for name, one in self.available.items() if one.longest is not None}

    @property
    def runners(self) -> dict[str, Runner]:
        """Those with tensors of their own: method → model and caches."""
        return {name: one.runner for name, one in self.available.items() if one.runner is not None}

    def admit(self, request: Request) -> None:
        """A request starts; the drafters that it does not want never hear of it."""
        for name, drafter in self.available.items():
            if request.speculation.method in {"auto", name}:
                drafter.admit(request)

    def offers(self, sequence_id: str, tokens: Sequence[int], emitted: Sequence[int]) -> dict[str, Offer]:
        """What those that can tell would draft next, once `tokens` go on with `emitted`."""
        limit = DRAFT_LENGTHS[-1]
        told = {name: one.offer(sequence_id, tokens, emitted, limit) for name, one in self.available.items()}
        return {name: offer for name, offer in told.items() if offer is not None}

    def observe(self, outcome: Outcome) -> None:
        for drafter in self.available.values():
            drafter.observe(outcome)

    def release(self, request_id: str) -> None:
        for drafter in self.available.values():
            drafter.release(request_id)


def open_drafters(unit: LoadedUnit) -> Drafters:
    """Build every drafter that fits and may run."""
    chosen = unit.spec.methods or tuple(REGISTRY)
    available: dict[str, Drafter] = {}
    unavailable: dict[str, Reason] = {}
    for name, kind in REGISTRY.items():
        if name not in chosen:
            unavailable[name] = Reason("not_chosen", {"methods": ", ".join(chosen)})
            continue
        try:
            available[name] = kind.open(unit)
        except NoDraft as error:
            unavailable[name] = Reason("not_loaded", {"drafter": error.drafter})
        except ModelUnavailable as error:
            unavailable[name] = Reason("cannot_draft", {"detail": error.message})
    return Drafters(available, unavailable)
