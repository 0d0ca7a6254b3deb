"""Which unit is measured: a main model with those drafters that were named, or with the best one of every method."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from app.admin.room import Footprints
from app.core.drafters import DRAFT_METHODS
from app.core.errors import InsufficientMemory, SpeculationUnavailable
from app.core.messages import DraftSpecification, ModelSpecification
from app.hub.catalog import CatalogModel
from app.hub.pairing import Candidate, Speedups, candidates_for, rank
from app.serving.resolver import Resolver


@dataclass(frozen=True, slots=True)
class MeasuredUnit:
    """What is loaded for a measurement, and why some drafters are not with it."""

    specification: ModelSpecification
    chats: bool
    left_out: tuple[str, ...] = ()


class UnitChooser:
    """Chooses units; every call reads the disk."""

    def __init__(self, resolver: Resolver, footprints: Footprints) -> None:
        self._resolver = resolver
        self._footprints = footprints

    def candidates(self, main: CatalogModel, speedups: Speedups) -> list[Candidate]:
        """Every way to draft for `main`, ranked by what was measured and what is usual."""
        widen = self._footprints.room.widen
        specification = self._footprints.specification(main)
        found = candidates_for(main, self._resolver.models(), specification, widen=widen)
        return rank(replace(each, measured=speedups.get((each.method, each.id))) for each in found)

    def choose(self, model_id: str, drafts: Sequence[str] | None, speedups: Speedups) -> MeasuredUnit:
        """The unit with `drafts`, or with the best drafter of each method; any method may run, batches too.

        Raises InsufficientMemory for a model that is too large by itself, and what the resolver and pairing raise.
        """
        main = self._resolver.main(model_id)
        self.check_room(main)
        alone, room = self._footprints.main(main), self._footprints.room
        candidates = [each for each in self.candidates(main, speedups) if each.method in DRAFT_METHODS]
        wanted = _named(main, candidates, drafts) if drafts is not None else _best(candidates)
        chosen, left_out, taken = [], [], alone
        for each in wanted:
            if taken is not None and not room.holds(taken + each.footprint):
                left_out.append(f"{each.id}: no room for it beside the others")
                continue
            taken = None if taken is None else taken + each.footprint
            chosen.append(each)
        specification = msgspec.structs.replace(
            self._resolver.planned(main),
            drafts=tuple(DraftSpecification(each.id, str(self._path(main, each)), each.method) for each in chosen),
            draft_unavailable="",
            policy="auto",
            methods=(),
            num_draft_tokens=None,
        )
        return MeasuredUnit(specification, main.has_chat_template, tuple(left_out))

    def check_room(self, main: CatalogModel, *drafts: Candidate) -> None:
        """Raises InsufficientMemory when the model with these drafters is larger than the ceiling."""
        alone, room = self._footprints.main(main), self._footprints.room
        if alone is None:
            return
        unit = sum((each.footprint for each in drafts), alone)
        if not room.holds(unit):
            names = " + ".join([main.id, *(each.id for each in drafts)])
            needed, ceiling = unit.total_bytes / 1e9, room.ceiling_bytes / 1e9
            advice = "choose a smaller drafter" if drafts else "choose a smaller model"
            raise InsufficientMemory(f"{names} needs {needed:.1f} GB, the ceiling is {ceiling:.1f} GB: {advice}")

    def _path(self, main: CatalogModel, candidate: Candidate) -> Path:
        return main.path if candidate.id == main.id else self._resolver.find(candidate.id).path


def _best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first that fits of each method; one whose name says it is for another model is left to be named."""
    found: dict[str, Candidate] = {}
    for each in candidates:
        if each.fits and (each.is_usual or each.measured is not None):
            found.setdefault(each.method, each)
    return sorted(found.values(), key=lambda each: DRAFT_METHODS.index(each.method))


def refusal_of(main: CatalogModel, name: str, candidate: Candidate | None) -> str:
    """Why a drafter of that name cannot be chosen, and what to do."""
    if candidate is None:
        return f"{name} is not on this computer: download it, or choose another drafter for {main.id}"
    return f"{name} cannot draft for {main.id}: {candidate.refusal}"


def _named(main: CatalogModel, candidates: Sequence[Candidate], drafts: Sequence[str]) -> list[Candidate]:
    found: dict[str, Candidate] = {}
    for name in drafts:
        candidate = next((each for each in candidates if each.id == name), None)
        if candidate is None or candidate.refusal:
            raise SpeculationUnavailable(refusal_of(main, name, candidate), parameter="drafts")
        if candidate.method in found:
            other = found[candidate.method].id
            message = f"{other} and {name} both draft by {candidate.method}: measure one after the other"
            raise SpeculationUnavailable(message, parameter="drafts")
        found[candidate.method] = candidate
    return sorted(found.values(), key=lambda each: DRAFT_METHODS.index(each.method))
