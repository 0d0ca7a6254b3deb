"""Which drafters a loaded unit gets, best first, and why the others cannot run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.core.request import Request
from app.engine.drafters import Drafter, Outcome
from app.engine.drafters.draft_model import DraftModel
from app.engine.drafters.ngram import Ngram
from app.engine.rollback import UnknownCacheError
from app.engine.runner import Runner


@dataclass(frozen=True)
class DraftSource:
    """What drafters may be built from: the paired model, if any, and facts about the target."""

    model: object | None
    target_vocabulary: int
    max_context_tokens: int
    chunk_tokens: int
    why_no_model: str = ""


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
    if source.model is None:
        return (
            source.why_no_model or "no draft model is loaded with this model: pass one with `--draft` or `draft_model`"
        )
    try:
        runner = Runner(source.model, chunk_tokens=source.chunk_tokens)
    except UnknownCacheError as error:
        return f"the draft model's cache cannot be rolled back: {error}"
    return DraftModel(runner, target_vocabulary=source.target_vocabulary, max_context_tokens=source.max_context_tokens)


def _ngram(_: DraftSource) -> Drafter | str:
    return Ngram()


REGISTRY = {"draft_model": _draft_model, "ngram": _ngram}


def open_drafters(source: DraftSource) -> Drafters:
    """Build every drafter that fits."""
    built = {name: make(source) for name, make in REGISTRY.items()}
    return Drafters(
        available={name: value for name, value in built.items() if not isinstance(value, str)},
        unavailable={name: value for name, value in built.items() if isinstance(value, str)},
    )
