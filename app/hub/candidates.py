"""Every drafter that a main model could have on this computer: which fit, why not, and what each would take.

Reads headers, configs and tokenizer files, never a weight; call it in a thread. What was measured, what is loaded and
what could be downloaded is joined elsewhere: `rank` only puts everything in order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from app.core.drafter_config import FULL, SLIDING, DFlashConfig
from app.core.drafter_folder import FEATURE_METHODS, read_drafter
from app.core.errors import ModelUnavailable
from app.core.footprint import Footprint, cache_families, drafter_footprint
from app.core.messages import DraftSpecification, ModelSpecification
from app.hub.catalog import CatalogModel
from app.hub.pairing import DEFAULT_SIZE_SHARE, pair, suits

NGRAM = "ngram"
METHODS = (*FEATURE_METHODS, "draft_model", NGRAM)
"""Every way to draft, the best first where nothing was measured."""
PAYS = 1.05
"""Measured below this, a drafter is not worth having."""

Origin = Literal["disk", "checkpoint", "text", "hub"]
Tokens = Literal["same", "other", "borrowed", "unneeded", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to draft for one main model."""

    method: str
    id: str = ""
    """Of the drafter; a head inside the checkpoint has that of the main model, n-grams have none."""
    origin: Origin = "disk"
    size_bytes: int = 0
    tokens: Tokens = "unknown"
    """Whether its tokens are those of the main model; feature drafters borrow them, n-grams need none."""
    token_difference: str = ""
    refusal: str = ""
    """Why it cannot draft; empty when it can."""
    is_usual: bool = True
    """Its name and size say that it is for this model: it would be chosen without being asked for."""
    footprint: Footprint = field(default_factory=Footprint)
    """What it adds to the main model in memory."""
    rollback: tuple[str, ...] = ()
    """How its own caches forget rejected drafts: `trim`, `slice` or `snapshot`; n-grams have none."""
    measured: float | None = None
    """How many times plain decoding it was measured to be here."""

    @property
    def fits(self) -> bool:
        """Whether it can draft for the model at all, memory aside."""
        return not self.refusal


def candidates_for(
    main: CatalogModel, models: Sequence[CatalogModel], specification: ModelSpecification, *, widen: bool
) -> list[Candidate]:
    """The head inside the checkpoint, everything on disk that is not the model itself, and n-grams. Never raises.

    `specification` says for how many rows, and how long a context, memory is counted.
    """
    heads = () if main.head is None else (main.head,)
    drafts = (*heads, *(model for model in models if model.id != main.id))
    found = [_candidate(main, draft, models, specification, widen=widen) for draft in drafts]
    return [*found, Candidate(method=NGRAM, origin="text", tokens="unneeded")]


def rank(candidates: Iterable[Candidate]) -> list[Candidate]:
    """What was measured to pay first, then what is usual by method and size, then what did not pay or does not fit."""
    return sorted(candidates, key=_place)


def with_measured(candidate: Candidate, speedups: Mapping[tuple[str, str], float]) -> Candidate:
    """The candidate with what was measured of it, by method and id."""
    return replace(candidate, measured=speedups.get((candidate.method, candidate.id)))


def _place(candidate: Candidate) -> tuple[int, float, int, int, str]:
    method = METHODS.index(candidate.method) if candidate.method in METHODS else len(METHODS)
    measured = candidate.measured
    if not candidate.fits:
        group = 4
    elif measured is not None:
        group = 0 if measured >= PAYS else 3
    else:
        group = 1 if candidate.is_usual else 2
    return group, -(measured or 0.0), method, candidate.size_bytes, candidate.id


def _candidate(
    main: CatalogModel,
    draft: CatalogModel,
    models: Sequence[CatalogModel],
    specification: ModelSpecification,
    *,
    widen: bool,
) -> Candidate:
    fit = pair(main, draft)
    tokens, difference = _tokens(main, draft, fits=fit.fits)
    return Candidate(
        method=draft.method,
        id=draft.id,
        origin="checkpoint" if draft.id == main.id else "disk",
        size_bytes=draft.size_bytes,
        tokens=tokens,
        token_difference=difference,
        refusal=fit.reason.removeprefix(f'"{draft.id}" cannot draft: '),
        is_usual=_is_usual(main, draft, models),
        footprint=_footprint(draft, specification, widen=widen),
        rollback=_rollback(main, draft),
    )


def _is_usual(main: CatalogModel, draft: CatalogModel, models: Sequence[CatalogModel]) -> bool:
    if draft.kind == "drafter":
        return suits(main, draft, models)
    return draft.size_bytes <= main.size_bytes * DEFAULT_SIZE_SHARE


def _tokens(main: CatalogModel, draft: CatalogModel, *, fits: bool) -> tuple[Tokens, str]:
    if draft.kind == "drafter":
        return ("borrowed", "") if fits else ("unknown", "")
    if fits:
        return "same", ""
    if draft.problem or draft.size_bytes > main.size_bytes:
        return "unknown", ""  # refused before anybody compares
    try:
        difference = main.tokenizer.difference(draft.tokenizer)
    except (ModelUnavailable, OSError):
        return "unknown", ""
    return ("other", difference) if difference else ("same", "")


def _footprint(draft: CatalogModel, specification: ModelSpecification, *, widen: bool) -> Footprint:
    try:
        return drafter_footprint(
            DraftSpecification(draft.id, str(draft.path), draft.method), specification, widen=widen
        )
    except (ModelUnavailable, OSError):
        return Footprint()


def _rollback(main: CatalogModel, draft: CatalogModel) -> tuple[str, ...]:
    """Feature drafters are attention layers of their own, whatever the layers of their target are."""
    if draft.kind != "drafter":
        return cache_families(draft.config)
    try:
        found = read_drafter(draft.method, draft.config, main.config)
    except ModelUnavailable:
        return ()
    kinds = found.layer_types if isinstance(found, DFlashConfig) else (FULL,)
    return tuple(name for kind, name in ((FULL, "trim"), (SLIDING, "slice")) if kind in kinds)
