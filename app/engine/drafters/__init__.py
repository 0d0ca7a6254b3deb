"""Drafters: two verbs, `propose` and `observe`, between `admit` and `release`. A wrong draft costs time, never
correctness. One that only looks up has a third, `offer`, so that nobody has to try what it is worth. Which of them a
loaded unit gets, and why not the others, says `open_drafters`.

To add one: write a file here with a subclass of `Drafter`, and add a line to `METHODS` of `app/core/drafters/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
from mlx import nn

from app.core.draft_lengths import DRAFT_LENGTHS
from app.core.drafters import DRAFT_MODEL, METHOD_NAMES
from app.core.errors import ModelUnavailable
from app.core.messages import ModelSpecification
from app.core.model_folder import ModelFolder
from app.core.reason import NO_REASON, Reason
from app.core.request import Request
from app.core.step import DecodeRow, Offer
from app.engine.runner import Forward, Runner
from app.engine.sampling import SampledRow


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
    """No drafter of a method came with the model: no `drafter`, in words."""

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

    def draft(self, method: str) -> LoadedDraft:
        """The drafter of that method. Raises NoDraft, or ModelUnavailable that says why there is none."""
        for draft in self.drafts:
            if draft.method == method:
                return draft
        if self.spec.draft_unavailable:
            raise ModelUnavailable(self.spec.draft_unavailable)
        raise NoDraft("draft model" if method == DRAFT_MODEL.name else f"{method} drafter")


class Proposal(NamedTuple):
    """Drafts of one cycle: int32 `tokens` [rows, K] (lazy) of which the first `counts[row]` are real.

    `reasons[row]` says why a row got none. `logits` float32 [rows, K, vocabulary] are what the
    drafts were drawn from, bias and penalties applied; None when each draft was the drafter's only choice.
    `appended[row]` of the drafts, the last ones, are no drafter's: a grammar forces them; empty: none.
    """

    tokens: mx.array | None
    counts: tuple[int, ...]
    reasons: tuple[Reason, ...]
    logits: mx.array | None = None
    appended: tuple[int, ...] = ()


def merged(rows: int, proposals: Sequence[tuple[Sequence[int], Proposal]]) -> Proposal:
    """One proposal for all rows from those of some rows each; the usual one, by one drafter for all rows, as it is.

    A row without logits beside rows with some, whose drafts were the only choice, gets certainty of them.
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
    """float32 [rows, slots, vocabulary]: logits of which nothing but `tokens` [rows, slots] can be drawn."""
    return mx.where(tokens[..., None] == mx.arange(vocabulary), 0.0, -mx.inf)


Forced = Sequence[tuple[tuple[int, ...], ...]]
"""By row and place: the usual token of what a grammar forces, and the others that may stand there."""


class Lead:
    """Of rows that draft place by place: what a grammar forces comes first, spelled as the drafter likes. Where that is
    not the usual way, what is forced ends for the row: the drafter goes on from its own."""

    def __init__(self, forced: Forced) -> None:
        self._forced = forced
        self._follows = mx.ones((len(forced), 1), mx.bool_)
        self.width = max(map(len, forced))

    def choose(self, place: int, own: mx.array) -> mx.array:
        """int32 [rows, 1]: the drafts of a `place`; `own` are the drafter's, below 0 where there is none. Places are
        asked for one after the other."""
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
    """The proposal with each row's `forced` tokens in its first places, but where it spells them otherwise."""
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
    """What one `forward` of the target left in its cache, row by row, prefill and plain steps included.

    `kept[row]` of the tokens that it was fed stayed. `tokens[row]` is a live view of prompt and output. Of
    `drafted[row]` drafts the first `accepted[row]` were the target's own; both are empty where nothing was drafted.
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
    """Target layers whose output it reads (`FINAL`: behind the final norm)."""
    longest: int | None = None
    """Tokens that one proposal can hold at most; None when there is no such bound."""
    runner: Runner | None = None
    """Its own model with its caches, for the prefix cache and the memory account; None when it keeps no tensors."""

    @classmethod
    def load(cls, folder: ModelFolder, target_config: Mapping[str, Any]) -> nn.Module:
        """The module in a published folder, with lazy weights. Raises ModelUnavailable."""
        raise NotImplementedError

    @classmethod
    def open(cls, unit: LoadedUnit) -> "Drafter":  # noqa: ARG003
        """The drafter of a loaded model. Raises ModelUnavailable where it cannot run."""
        return cls()

    def admit(self, request: Request) -> None:
        """A sequence starts that this drafter may be asked about, under the id of `request`."""

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        """Up to `row.num_draft_tokens` tokens that continue `row.tokens`, for each row. Those of `row.forced` come
        first: what it would say in their places is not heard, so that it had better go on from them."""
        raise NotImplementedError

    def offer(self, sequence_id: str, tokens: Sequence[int], emitted: Sequence[int], limit: int) -> Offer | None:  # noqa: ARG002
        """Up to `limit` tokens that it would propose once `tokens` go on with `emitted`, at hardly any cost; None: it
        has to be asked."""
        return None

    def observe(self, outcome: Outcome) -> None:
        """Learn what the target has read, and which drafts stayed."""

    def settle(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """These first `tokens` of the sequence are kept for later ones: read what it needs of them now."""

    def pending(self, sequence_id: str, length: int) -> mx.array | None:  # noqa: ARG002
        """What it needs of the last of `length` positions of the target and has not taken in; None: nothing."""
        return None

    def resume(self, sequence_id: str, length: int, pending: mx.array | None) -> None:
        """The target's row was put back up to `length`, and its own as far as it was kept."""

    def release(self, sequence_id: str) -> None:
        """The sequence is over. Unknown ids are fine."""
        if self.runner is not None:
            self.runner.release(sequence_id)


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
        for drafter in self.wanted(request).values():
            drafter.admit(request)

    def wanted(self, request: Request) -> dict[str, Drafter]:
        """The drafters that the request may ask."""
        return {name: one for name, one in self.available.items() if request.speculation.method in {"auto", name}}

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        """What a grammar forces, and what each row's drafter says behind that; it is not asked where enough is."""
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
        """What those that can tell would draft next, once `tokens` go on with `emitted`."""
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
        except ModelUnavailable as error:
            unavailable[name] = Reason("cannot_draft", {"detail": error.message})
    return Drafters(available, unavailable)


def _drafter_of(method: str) -> type[Drafter]:
    """The drafter of that name in the file of that name."""
    kinds = vars(import_module(f"app.engine.drafters.{method}")).values()
    return next(kind for kind in kinds if isinstance(kind, type) and getattr(kind, "name", "") == method)


# Last: the files of the drafters take what stands above.
REGISTRY: Mapping[str, type[Drafter]] = {method: _drafter_of(method) for method in METHOD_NAMES}
"""Best first, as in `METHODS`."""
