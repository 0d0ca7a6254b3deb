"""Decides whether a drafter fits a main model, and explains why if it does not.

A draft model fits when its tokens are the main model's tokens, id by id, and it is not larger. A feature drafter
(DFlash, EAGLE-3, MTP) fits when its config and tensors are made for the main model. A drafter that fits may still guess
badly. That costs time, never correctness, and the governor turns such a drafter off. `candidates_for` lists all
candidates with their memory. Only headers, configs, tokenizer files and EAGLE-3's token table are read, never weights.
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from app.core.errors import ModelUnavailable
from app.core.setting_texts import bytes_text
from app.core.unit import ModelSpecification
from app.models.catalog import CatalogModel
from app.models.config_values import VOCABULARY_KEYS, text_number
from app.models.drafters.config import FULL, SLIDING
from app.models.drafters.methods import DRAFT_METHODS, METHOD_NAMES, TEXT_METHODS, check_drafter, read_drafter
from app.models.footprint import Footprint, cache_families, drafter_footprint

DEFAULT_COST_SHARE = 1 / 3
"""Maximum step cost of a draft model that is chosen by default, as a share of the main model's step cost."""
IS_MAC = sys.platform == "darwin"
"""Whether this is a Mac. Steps cost by the bytes of the weights on its GPU, by their number on a CPU."""
MIN_SPEEDUP = 1.05
"""Minimum measured speedup over plain decoding at which a drafter is worth using."""

Speedups = Mapping[tuple[str, str], float]
"""Speedups over plain decoding, measured on this computer, by method and drafter id."""
NOT_MEASURED: Speedups = {}


def refusal(main: CatalogModel, draft: CatalogModel) -> str:
    """Return why `draft` cannot draft for `main`, with the next action, in one line; "" when it can.

    May read tokenizer files that are not cached, but no weights. Never raises.
    """
    if main.problem:
        return main.problem
    if draft.reason:
        return draft.reason
    if "encoder" in {main.kind, draft.kind}:
        return "an encoder makes embeddings, no tokens; choose another model"
    if main.kind != "main":
        return f'"{main.id}" is a drafter itself; choose a main model'
    if draft.kind == "main" and draft.size_bytes > main.size_bytes:
        sizes = f"{bytes_text(draft.size_bytes)} against {bytes_text(main.size_bytes)}"
        return f"it is larger than the main model ({sizes}); choose a smaller one"
    try:
        if draft.kind == "main":
            return main.tokenizer.mismatch(draft.tokenizer, text_number(draft.config, *VOCABULARY_KEYS))
        return _feature_drafter_mismatch(main, draft)
    except ModelUnavailable as error:
        return error.message
    except OSError:
        return "its files cannot be read; check that the folder exists and is readable"


def default_draft(
    main: CatalogModel,
    models: Sequence[CatalogModel],
    methods: Collection[str] = DRAFT_METHODS,
    measured: Speedups = NOT_MEASURED,
) -> CatalogModel | None:
    """Return the default drafter among those with one of `methods`: the first by `rank` that fits, or None.

    Candidates are drafters with a measured speedup of at least `MIN_SPEEDUP`, and drafters from the main model's source
    that are usual for it: the best match by name, or a draft model whose step costs at most a third.
    """
    if main.kind != "main" or main.problem:
        return None
    drafters = (model for model in (main.head, *models) if model is not None and model.method in methods)
    with_speedups = ((draft, measured.get((draft.method, draft.id))) for draft in drafters)
    usable = [
        Candidate(method=draft.method, draft=draft, measured=speedup)
        for draft, speedup in with_speedups
        if (speedup or 0.0) >= MIN_SPEEDUP or (draft.source == main.source and _is_usual(main, draft, models))
    ]
    ranked = (candidate.draft for candidate in rank(main, usable) if candidate.draft is not None)
    return next((draft for draft in ranked if _shares_tokens(main, draft) and not refusal(main, draft)), None)


def is_best_match(main: CatalogModel, draft: CatalogModel, models: Iterable[CatalogModel]) -> bool:
    """Return whether no other main model shares more leading words of its name with the drafter than `main` does.

    `Qwen3-4B-DFlash-b16` is for `Qwen3-4B-4bit`, although its shapes fit any model of that width, depth and vocabulary.
    """
    shared_word_count = _count_shared_words(main.id, draft.id)
    other_mains = (
        model for model in models if model.kind == "main" and not model.problem and model.id not in {main.id, draft.id}
    )
    return draft.id == main.id or all(
        _count_shared_words(other_main.id, draft.id) <= shared_word_count for other_main in other_mains
    )


def _shares_tokens(main: CatalogModel, draft: CatalogModel) -> bool:
    """Return whether the token digests match (True for feature drafters); describing a difference would be too slow."""
    try:
        return draft.kind == "drafter" or main.tokenizer.shares_tokens(draft.tokenizer)
    except (ModelUnavailable, OSError):
        return False


def _feature_drafter_mismatch(main: CatalogModel, draft: CatalogModel) -> str:
    """Return why a feature drafter was not made for `main`, with the next action; "" when it was."""
    try:
        check_drafter(
            draft.method, draft.path, draft.config, draft.tensors, target=main.tokenizer, target_config=main.config
        )
        # a feature drafter needs no tokenizer, but one in its folder shows which model it was made for
        difference = "" if draft.path == main.path else main.tokenizer.text_difference(draft.tokenizer)
        reason = difference and f"it was made for another tokenizer: {difference}"
    except ModelUnavailable as error:
        reason = error.message
    return f"{reason}; choose a drafter that was made for {main.id}" if reason and "; " not in reason else reason


def _count_shared_words(main_id: str, draft_id: str) -> int:
    """Count the leading words that two names share, ignoring their organisations."""
    main, draft = (re.findall(r"[a-z0-9.]+", name.rpartition("/")[2].lower()) for name in (main_id, draft_id))
    return sum(1 for _ in takewhile(lambda words: words[0] == words[1], zip(main, draft, strict=False)))


def _family(name: str) -> str:
    """Return the first letters of a name without its organisation: `qwen` for `mlx-community/Qwen3-8B-4bit`."""
    match = re.match(r"[a-z]+", name.rpartition("/")[2].lower())
    return match.group() if match else ""


Origin = Literal["disk", "checkpoint", "text"]
Tokens = Literal["same", "other", "borrowed", "unneeded", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to draft for one main model."""

    method: str
    draft: CatalogModel | None = None
    """The drafter; None for n-grams."""
    origin: Origin = "disk"
    tokens: Tokens = "unknown"
    """Relation of its tokens to the main model's: feature drafters borrow the main model's, n-grams need none."""
    token_difference: str = ""
    refusal: str = ""
    """Reason why it cannot draft; empty when it can."""
    is_usual: bool = True
    """Whether it may be chosen by default: a feature drafter by its name, a draft model by its step cost."""
    footprint: Footprint = field(default_factory=Footprint)
    """Memory that the drafter adds to the main model's."""
    rollback: tuple[str, ...] = ()
    """Families of its caches (`trim`, `slice`, `snapshot`), which decide how it rolls back drafts; none for n-grams."""
    measured: float | None = None
    """Speedup over plain decoding, measured on this computer; None if it was not measured."""

    @property
    def id(self) -> str:
        """Id of the drafter: the main model's for a head inside its checkpoint, empty for n-grams."""
        return self.draft.id if self.draft is not None else ""

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights."""
        return self.draft.size_bytes if self.draft is not None else 0

    @property
    def fits(self) -> bool:
        """Whether it can draft for the model at all, memory aside."""
        return not self.refusal


def candidates_for(
    main: CatalogModel,
    models: Sequence[CatalogModel],
    specification: ModelSpecification,
    measured: Speedups = NOT_MEASURED,
    *,
    widen: bool,
) -> list[Candidate]:
    """Return the head inside the checkpoint, all other models on disk, and n-grams, ordered by `rank`.

    Memory is computed for the number of rows and the context of `specification`. Never raises.
    """

    def candidate(draft: CatalogModel) -> Candidate:
        reason = refusal(main, draft)
        tokens, difference = _token_relation(main, draft, fits=not reason)
        return Candidate(
            method=draft.method,
            draft=draft,
            origin="checkpoint" if draft.id == main.id else "disk",
            tokens=tokens,
            token_difference=difference,
            refusal=reason,
            is_usual=_is_usual(main, draft, models),
            footprint=_footprint(draft, specification, widen=widen),
            rollback=_rollback(main, draft),
            measured=measured.get((draft.method, draft.id)),
        )

    heads = () if main.head is None else (main.head,)
    drafters = [candidate(draft) for draft in (*heads, *(model for model in models if model.id != main.id))]
    text_candidates = [
        Candidate(method=name, origin="text", tokens="unneeded", measured=measured.get((name, "")))
        for name in TEXT_METHODS
    ]
    return rank(main, [*drafters, *text_candidates])


def rank(main: CatalogModel, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates for choice and display: those with a worthwhile measured speedup; unmeasured usual ones;
    unmeasured unusual ones; those with a lower measured speedup; those that do not fit.

    Within a group, sort by measured speedup; by method, best first; a head inside the checkpoint before other drafters;
    names of the main model's family first (`demo-draft` for `demo-assistant`); by size, smallest first.
    """

    def sort_key(candidate: Candidate) -> tuple[Any, ...]:
        if not candidate.fits:
            group = 4
        elif candidate.measured is not None:
            group = 0 if candidate.measured >= MIN_SPEEDUP else 3
        else:
            group = 1 if candidate.is_usual else 2
        method = METHOD_NAMES.index(candidate.method) if candidate.method in METHOD_NAMES else len(METHOD_NAMES)
        tie_breakers = (
            candidate.id != main.id,
            _family(candidate.id) != _family(main.id),
            candidate.size_bytes,
            candidate.id,
        )
        return group, -(candidate.measured or 0.0), method, *tie_breakers

    return sorted(candidates, key=sort_key)


def _is_usual(main: CatalogModel, draft: CatalogModel, models: Sequence[CatalogModel]) -> bool:
    if draft.kind == "drafter":
        return is_best_match(main, draft, models)
    main_cost, draft_cost = (model.size_bytes if IS_MAC else model.parameter_count for model in (main, draft))
    return draft_cost <= main_cost * DEFAULT_COST_SHARE


def _token_relation(main: CatalogModel, draft: CatalogModel, *, fits: bool) -> tuple[Tokens, str]:
    if draft.kind == "drafter":
        return ("borrowed", "") if fits else ("unknown", "")
    if fits:
        return "same", ""
    if draft.problem or draft.size_bytes > main.size_bytes:
        return "unknown", ""  # refused before tokens are compared
    try:
        difference = main.tokenizer.difference(draft.tokenizer)
    except (ModelUnavailable, OSError):
        return "unknown", ""
    return ("other", difference) if difference else ("same", "")


def _footprint(draft: CatalogModel, specification: ModelSpecification, *, widen: bool) -> Footprint:
    try:
        return drafter_footprint(draft.as_draft, specification, widen=widen)
    except (ModelUnavailable, OSError):
        return Footprint()


def _rollback(main: CatalogModel, draft: CatalogModel) -> tuple[str, ...]:
    """Return `draft`'s cache families; feature drafters have only attention layers, even if the target has others."""
    if draft.kind != "drafter":
        return cache_families(draft.config)
    try:
        drafter_config = read_drafter(draft.method, draft.config, main.config)
    except ModelUnavailable:
        return ()
    return tuple(name for kind, name in ((FULL, "trim"), (SLIDING, "slice")) if kind in drafter_config.layer_types)
