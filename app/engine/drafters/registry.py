"""Every drafter by method, and the drafters of a loaded unit: which can run, and why each of the others cannot."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module

from app.core.errors import PacelineError
from app.core.messages import short_text
from app.core.reason import NO_REASON, Reason
from app.core.request import AUTO, Request
from app.core.step import DecodeRow, Offer
from app.engine import memory
from app.engine.drafters.drafter import Drafter, Observation, Proposal
from app.engine.drafters.forced_prefix import merge, prepend_forced
from app.engine.loaded_unit import LoadedUnit, NoDrafter
from app.engine.runner import Runner
from app.engine.sampling.drawing import SampledRow
from app.models.draft_lengths import LONGEST_CHAIN, LONGEST_DRAFT
from app.models.drafters.methods import AT_ONCE_METHODS, METHOD_NAMES

logger = logging.getLogger("paceline.engine")


def _drafter_of(method: str) -> type[Drafter]:
    """Return the drafter class named `method`, from the module of the same name."""
    kinds = vars(import_module(f"app.engine.drafters.{method}")).values()
    return next(kind for kind in kinds if isinstance(kind, type) and getattr(kind, "name", "") == method)


REGISTRY: Mapping[str, type[Drafter]] = {method: _drafter_of(method) for method in METHOD_NAMES}
"""Drafters by method, best first as in `METHODS`."""


@dataclass(frozen=True)
class Drafters:
    """The drafters that can run, by method, and why each of the others cannot."""

    available: dict[str, Drafter]
    unavailable: dict[str, Reason] = field(default_factory=dict)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers that any drafter reads."""
        return tuple(sorted({tap for drafter in self.available.values() for tap in drafter.taps}))

    @property
    def longest(self) -> dict[str, int]:
        """Longest draft worth considering, in tokens, by method."""
        bounds = {name: LONGEST_DRAFT if name in AT_ONCE_METHODS else LONGEST_CHAIN for name in self.available}
        return {name: min(bound, self.available[name].longest or bound) for name, bound in bounds.items()}

    @property
    def runners(self) -> dict[str, Runner]:
        """Runners of the drafters that have tensors of their own, by method."""
        return {name: drafter.runner for name, drafter in self.available.items() if drafter.runner is not None}

    def admit(self, request: Request) -> None:
        """Start a request with the drafters that it may use."""
        for name, drafter in self.allowed_for(request).items():
            with self._isolated(name):
                drafter.admit(request)

    def allowed_for(self, request: Request) -> dict[str, Drafter]:
        """Return the drafters that the request may use."""
        return {name: drafter for name, drafter in self.available.items() if request.speculation.method in {AUTO, name}}

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        """Propose each row's forced tokens, then its drafts; no drafter runs for a row that forced tokens fill."""
        proposals = []
        for method, drafter in tuple(self.available.items()):
            members = [
                index
                for index, row in enumerate(rows)
                if row.method == method
                and len(row.forced) < min(row.num_draft_tokens, drafter.longest or row.num_draft_tokens)
            ]
            if members:
                arguments = [rows[index] for index in members], [sampled[index] for index in members]
                with self._isolated(method):
                    proposals.append((members, drafter.propose(*arguments)))
        proposal = merge(len(rows), proposals)
        reasons = tuple(
            row.refusal or why or self.unavailable.get(row.method, NO_REASON)
            for row, why in zip(rows, proposal.reasons, strict=True)
        )
        return prepend_forced(proposal._replace(reasons=reasons), [row.forced for row in rows])

    def offers(self, sequence_id: str, tokens: Sequence[int], emitted: Sequence[int]) -> dict[str, Offer]:
        """Return what lookup drafters would propose next, after `tokens` and `emitted`."""
        offers = {}
        for name, drafter in tuple(self.available.items()):
            with self._isolated(name):
                offers[name] = drafter.offer(sequence_id, tokens, emitted, LONGEST_DRAFT)
        return {name: offer for name, offer in offers.items() if offer is not None}

    def observe(self, observation: Observation) -> None:
        for name, drafter in tuple(self.available.items()):
            with self._isolated(name):
                drafter.observe(observation)

    def release(self, sequence_id: str) -> None:
        for name, drafter in tuple(self.available.items()):
            with self._isolated(name):
                drafter.release(sequence_id)

    @contextmanager
    def _isolated(self, method: str) -> Iterator[None]:
        """Drop a drafter that fails: its target continues without it. Memory exhaustion is raised instead."""
        try:
            yield
        except Exception as error:
            if memory.is_exhausted(error):
                raise
            logger.exception("the %s drafter failed and is left out", method)
            drafter = self.available.pop(method)
            if drafter.runner is not None:
                drafter.runner.clear()
            self.unavailable[method] = Reason("cannot_draft", {"detail": short_text(error)})


def open_drafters(unit: LoadedUnit) -> Drafters:
    """Open every allowed drafter that can run, and record why the others cannot."""
    allowed = unit.spec.methods or tuple(REGISTRY)
    available: dict[str, Drafter] = {}
    unavailable: dict[str, Reason] = {}
    for name, kind in REGISTRY.items():
        if name not in allowed:
            unavailable[name] = Reason("not_chosen", {"methods": ", ".join(allowed)})
            continue
        try:
            available[name] = kind.open(unit)
        except NoDrafter as error:
            unavailable[name] = Reason("not_loaded", {"drafter": error.drafter})
        except PacelineError as error:
            unavailable[name] = Reason("cannot_draft", {"detail": error.message})
        except Exception as error:
            logger.exception("the %s drafter of %s could not be opened", name, unit.spec.id)
            unavailable[name] = Reason("cannot_draft", {"detail": short_text(error)})
    return Drafters(available, unavailable)
