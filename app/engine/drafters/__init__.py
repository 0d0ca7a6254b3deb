"""Drafters: two verbs, `propose` and `observe`, between `admit` and `release`.

A wrong draft costs time, never correctness. A lookup drafter has a third verb, `offer`, so that its worth is known
without trying it. `open_drafters` decides which of them a loaded unit gets, and why not the others.

To add one: write a file here with a subclass of `Drafter`, and add a line to `METHODS` of `app/models/drafters/`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
from mlx import nn

from app.core.errors import ModelUnavailable, PacelineError
from app.core.messages import short_text
from app.core.reason import NO_REASON, Reason
from app.core.request import Request
from app.core.step import DecodeRow, Offer
from app.core.unit import ModelSpecification
from app.engine.runner import Forward, Runner
from app.engine.sampling import SampledRow
from app.models.draft_lengths import DRAFT_LENGTHS
from app.models.drafters import DRAFT_MODEL, METHOD_NAMES
from app.models.folder import ModelFolder

_logger = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A drafter in memory. `vocabulary_size` counts the tokens that it chooses from, padding included."""

    method: str
    id: str
    model: nn.Module
    config: Mapping[str, Any]
    max_context_tokens: int
    vocabulary_size: int


class NoDraft(ModelUnavailable):
    """No drafter of a method is loaded with the model; `drafter` is its name for people."""

    def __init__(self, drafter: str) -> None:
        super().__init__(f"no {drafter} is loaded with this model")
        self.drafter = drafter


@dataclass(frozen=True, slots=True)
class LoadedUnit:
    """A target and its drafters, in memory. `vocabulary_size` counts embedding rows, padding included."""

    spec: ModelSpecification
    target: nn.Module
    config: Mapping[str, Any]
    weights_bytes: int
    max_context_tokens: int
    vocabulary_size: int
    drafts: tuple[LoadedDraft, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Method -> why its drafter could not be loaded."""
    on_progress: Callable[[], None] = lambda: None
    """Callback between the parts of a long step."""

    def draft(self, method: str) -> LoadedDraft:
        """Return the drafter of that method. Raises NoDraft, or ModelUnavailable with the reason why there is none."""
        for draft in self.drafts:
            if draft.method == method:
                return draft
        if method in self.left_out:
            raise ModelUnavailable(self.left_out[method])
        if self.spec.draft_unavailable:
            raise ModelUnavailable(self.spec.draft_unavailable)
        raise NoDraft("draft model" if method == DRAFT_MODEL.name else f"{method} drafter")


class Proposal(NamedTuple):
    """Drafts of one cycle: int32 `tokens` [rows, K] (lazy) of which the first `counts[row]` are real.

    `reasons[row]` says why a row got none. `logits` float32 [rows, K, vocabulary] are what the drafts were drawn from,
    bias and penalties applied; None when each draft was the drafter's only choice. The last `appended[row]` drafts are
    forced by a grammar, not drafted; empty means none.
    """

    tokens: mx.array | None
    counts: tuple[int, ...]
    reasons: tuple[Reason, ...]
    logits: mx.array | None = None
    appended: tuple[int, ...] = ()


def merged(rows: int, proposals: Sequence[tuple[Sequence[int], Proposal]]) -> Proposal:
    """Merge proposals for some rows each into one for all rows; a single one for all rows is returned as is.

    If only some rows have logits, the drafts of the others, the only choice there, get logits that make them certain.
    """
    if len(proposals) == 1 and len(proposals[0][0]) == rows:
        return proposals[0][1]
    counts, reasons = [0] * rows, [NO_REASON] * rows
    for members, proposal in proposals:
        for index, count, reason in zip(members, proposal.counts, proposal.reasons, strict=True):
            counts[index], reasons[index] = count, reason
    if not any(counts):
        return Proposal(None, tuple(counts), tuple(reasons))
    tokens = mx.zeros((rows, max(counts)), dtype=mx.int32)
    for members, proposal in proposals:
        if proposal.tokens is not None:
            tokens[mx.array(list(members)), : proposal.tokens.shape[1]] = proposal.tokens
    drawn = [(members, proposal.logits) for members, proposal in proposals if proposal.logits is not None]
    if not drawn:
        return Proposal(tokens, tuple(counts), tuple(reasons))
    chances = _certain(tokens, drawn[0][1].shape[-1])
    for members, logits in drawn:
        chances[mx.array(list(members)), : logits.shape[1]] = logits
    return Proposal(tokens, tuple(counts), tuple(reasons), chances)


def _certain(tokens: mx.array, vocabulary: int) -> mx.array:
    """Return logits float32 [rows, slots, vocabulary] from which only `tokens` [rows, slots] can be drawn."""
    return mx.where(tokens[..., None] == mx.arange(vocabulary), 0.0, -mx.inf)


Forced = Sequence[tuple[tuple[int, ...], ...]]
"""Forced tokens by row and place: the usual token, then the others that a grammar allows there."""


class Lead:
    """Forced tokens of rows that draft place by place, spelled as the drafter prefers.
    After an unusual spelling a row is no longer forced: the drafter continues from its own."""

    def __init__(self, forced: Forced) -> None:
        self._forced = forced
        self._follows = mx.ones((len(forced), 1), mx.bool_)
        self.width = max(map(len, forced))

    def choose(self, place: int, own: mx.array) -> mx.array:
        """Return int32 [rows, 1], the drafts at `place`; `own` are the drafter's, negative for none. Call in order."""
        if place >= self.width:
            return own
        ways = [row[place] if place < len(row) else (-1,) for row in self._forced]
        widest = max(map(len, ways))
        known = mx.array([[*each, *each[:1] * (widest - len(each))] for each in ways])
        usual = known[:, :1]
        free = mx.any(own == known, axis=1, keepdims=True) | ~self._follows
        drafts = mx.where((usual < 0) | ((own >= 0) & free), own, usual)
        self._follows = self._follows & (drafts == usual)
        return drafts


def led(proposal: Proposal, forced: Forced) -> Proposal:
    """Put each row's `forced` tokens first in the proposal, except where its drafts spell them differently."""
    lead = Lead(forced)
    if not (width := lead.width):
        return proposal
    counts = tuple(max(count, len(known)) for count, known in zip(proposal.counts, forced, strict=True))
    reasons = tuple(NO_REASON if known else why for why, known in zip(proposal.reasons, forced, strict=True))
    tokens = mx.zeros((len(forced), width), mx.int32) if proposal.tokens is None else proposal.tokens
    missing = [(0, 0), (0, max(0, width - tokens.shape[1]))]
    tokens, slots = mx.pad(tokens, missing), mx.arange(max(width, tokens.shape[1]))
    own = mx.where(slots < mx.array(proposal.counts)[:, None], tokens, -1)
    leads = slots < mx.array([len(known) for known in forced])[:, None]
    columns = [lead.choose(place, own[:, place : place + 1]) for place in range(width)]
    tokens = mx.maximum(mx.concatenate([*columns, tokens[:, width:]], axis=1), 0)
    logits = proposal.logits
    if logits is not None:
        logits = mx.where(leads[..., None], _certain(tokens, logits.shape[-1]), mx.pad(logits, [*missing, (0, 0)]))
    return Proposal(tokens, counts, reasons, logits)


class Outcome(NamedTuple):
    """Result of one `forward` of the target, row by row, prefill and plain steps included.

    `kept[row]` of the tokens fed are in the cache. `tokens[row]` is a live view of prompt and output. Of `drafted[row]`
    drafts the first `accepted[row]` were accepted; both are empty where nothing was drafted.
    """

    forward: Forward
    tokens: Sequence[Sequence[int]]
    kept: Sequence[int]
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()


class Drafter:
    """Proposes tokens ahead of the target. All calls come from the MLX thread; none waits for the device."""

    name: ClassVar[str]
    taps: tuple[int, ...] = ()
    """Target layers whose output it reads (`FINAL`: after the final norm)."""
    longest: int | None = None
    """Most tokens in one proposal; None if unbounded."""
    runner: Runner | None = None
    """Its own model with its caches, for the prefix cache and memory accounting; None if it keeps no tensors."""

    @classmethod
    def load(cls, folder: ModelFolder, target_config: Mapping[str, Any]) -> nn.Module:
        """Build the module of a published folder, with lazy weights. Raises ModelUnavailable."""
        raise NotImplementedError

    @classmethod
    def open(cls, unit: LoadedUnit) -> "Drafter":  # noqa: ARG003
        """Open the drafter of a loaded unit. Raises ModelUnavailable if it cannot run."""
        return cls()

    def admit(self, request: Request) -> None:
        """Start a sequence that this drafter may draft for, under the id of `request`."""

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        """Propose up to `row.num_draft_tokens` tokens that continue each row, `row.forced` first.
        Drafts in the places of forced tokens are discarded, so it should continue from them."""
        raise NotImplementedError

    def offer(self, sequence_id: str, tokens: Sequence[int], emitted: Sequence[int], limit: int) -> Offer | None:  # noqa: ARG002
        """Return up to `limit` tokens it would propose after `tokens` and `emitted`, if nearly free; else None."""
        return None

    def observe(self, outcome: Outcome) -> None:
        """Learn what the target has read, and which drafts were accepted."""

    def settle(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """Read what is needed of these first `tokens` of the sequence, which are about to be cached for later ones."""

    def pending(self, sequence_id: str, length: int) -> mx.array | None:  # noqa: ARG002
        """Return what it needs of the target's last of `length` positions and has not read; None if nothing."""
        return None

    def resume(self, sequence_id: str, length: int, pending: mx.array | None) -> None:
        """Continue after the target's row was restored to `length`, and its own as far as it was cached."""

    def release(self, sequence_id: str) -> None:
        """End the sequence. Unknown ids are fine."""
        if self.runner is not None:
            self.runner.release(sequence_id)


@dataclass(frozen=True)
class Drafters:
    """The drafters that can run, by method, and why each of the others cannot."""

    available: Mapping[str, Drafter]
    unavailable: Mapping[str, Reason] = field(default_factory=dict)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers that any drafter reads."""
        return tuple(sorted({tap for drafter in self.available.values() for tap in drafter.taps}))

    @property
    def longest(self) -> dict[str, int]:
        """Most tokens in one proposal, by method, where bounded."""
        return {name: one.longest for name, one in self.available.items() if one.longest is not None}

    @property
    def runners(self) -> dict[str, Runner]:
        """Runners of the drafters that have tensors of their own, by method."""
        return {name: one.runner for name, one in self.available.items() if one.runner is not None}

    def admit(self, request: Request) -> None:
        """Start a request with the drafters that it wants."""
        for drafter in self.wanted(request).values():
            drafter.admit(request)

    def wanted(self, request: Request) -> dict[str, Drafter]:
        """Return the drafters that the request may use."""
        return {name: one for name, one in self.available.items() if request.speculation.method in {"auto", name}}

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        """Propose forced tokens followed by each row's drafts; a drafter is skipped where forced tokens suffice."""
        proposals = []
        for method, drafter in self.available.items():
            members = [
                index
                for index, row in enumerate(rows)
                if row.method == method
                and len(row.forced) < min(row.num_draft_tokens, drafter.longest or row.num_draft_tokens)
            ]
            if members:
                asked = [rows[index] for index in members], [sampled[index] for index in members]
                proposals.append((members, drafter.propose(*asked)))
        return led(merged(len(rows), proposals), [row.forced for row in rows])

    def offers(self, sequence_id: str, tokens: Sequence[int], emitted: Sequence[int]) -> dict[str, Offer]:
        """Return what lookup drafters would propose next, after `tokens` and `emitted`."""
        limit = DRAFT_LENGTHS[-1]
        offers = {name: one.offer(sequence_id, tokens, emitted, limit) for name, one in self.available.items()}
        return {name: offer for name, offer in offers.items() if offer is not None}

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
        except PacelineError as error:
            unavailable[name] = Reason("cannot_draft", {"detail": error.message})
        except Exception as error:
            _logger.exception("the %s drafter of %s could not be opened", name, unit.spec.id)
            unavailable[name] = Reason("cannot_draft", {"detail": short_text(error)})
    return Drafters(available, unavailable)


def _drafter_of(method: str) -> type[Drafter]:
    """Return the drafter of that name in the module of that name."""
    kinds = vars(import_module(f"app.engine.drafters.{method}")).values()
    return next(kind for kind in kinds if isinstance(kind, type) and getattr(kind, "name", "") == method)


# Last, because the drafters' modules import what is defined above.
REGISTRY: Mapping[str, type[Drafter]] = {method: _drafter_of(method) for method in METHOD_NAMES}
"""Drafters by method, best first as in `METHODS`."""
