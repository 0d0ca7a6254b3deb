"""Which drafters a loaded unit gets, best first, and why the others cannot run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.core.request import Request
from app.engine.drafters import Drafter, Outcome
from app.engine.drafters.dflash import DFlash
from app.engine.drafters.draft_model import DraftModel
from app.engine.drafters.eagle3 import Eagle3
from app.engine.drafters.mtp import Mtp
from app.engine.drafters.ngram import Ngram
from app.engine.unit import LoadedUnit

REGISTRY: Mapping[str, type[Drafter]] = {kind.name: kind for kind in (DFlash, Mtp, Eagle3, DraftModel, Ngram)}
"""Best first: that is the order in which `auto` tries them."""


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
                drafter.admit(request)

    def observe(self, outcome: Outcome) -> None:
        for drafter in self.available.values():
            drafter.observe(outcome)

    def release(self, request_id: str) -> None:
        for drafter in self.available.values():
            drafter.release(request_id)


def open_drafters(unit: LoadedUnit) -> Drafters:
    """Build every drafter that fits and may run."""
    chosen = unit.spec.methods or tuple(REGISTRY)
    not_chosen = f"only {' and '.join(chosen)} may draft for this model: that was chosen for it"
    opened = {name: kind.open(unit) if name in chosen else not_chosen for name, kind in REGISTRY.items()}
    return Drafters(
        available={name: value for name, value in opened.items() if not isinstance(value, str)},
        unavailable={name: value for name, value in opened.items() if isinstance(value, str)},
    )
