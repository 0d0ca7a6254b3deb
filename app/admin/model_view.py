"""Models as the pages show them: the memory that they need, the memory available, and drafters for them.

No weights are loaded: headers and configs are read, once for each state of a folder. Call it in a thread.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from app.core.download import MARKER
from app.core.errors import InsufficientMemory, ModelUnavailable, SpeculationUnavailable
from app.core.setting_texts import bytes_text
from app.core.unit import ModelSpecification
from app.models.catalog import CatalogModel
from app.models.footprint import Footprint, cache_families, kv_refusal, main_footprint
from app.models.pairing import NOT_MEASURED, Candidate, Speedups, candidates_for
from app.models.safe_files import folder_problem
from app.serving.context import Context
from app.serving.resolver import ModelEntry

CPU_DEVICE_SUFFIX = "(cpu)"
"""Suffix of the device name of a CPU, on which weights are widened to float32."""


class ModelView:
    """Describes the models of one server."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._footprint = lru_cache(maxsize=1024)(_footprint)

    # --- listing ------------------------------------------------------------------------------------------------

    def listing(self) -> dict[str, Any]:
        """List everything on disk, broken folders with their problem."""
        models = self._context.resolver.models()
        looking = self._context.resolver.is_reading_tokenizers()
        return {
            "models": [self.describe(model, looking=looking) for model in models],
            "ceiling_bytes": self._context.memory_ceiling_bytes,
            "folders": self.folders(),
        }

    def folders(self) -> list[dict[str, str]]:
        """List the folders that are searched for models, each with its problem."""
        folders = self._context.settings.model_dirs
        return [{"folder": str(folder), "problem": folder_problem(folder)} for folder in folders]

    def describe(self, model: CatalogModel, *, looking: bool = False) -> dict[str, Any]:
        """Describe one model as JSON. Field names carry the units; values that are not known (yet) are 0 or empty."""
        entry, live = self._context.resolver.entry(model, looking=looking), self._context.settings
        ceiling = self._context.memory_ceiling_bytes
        settings, loaded, footprint = entry.settings, entry.loaded, self.footprint(model)
        fits = footprint is None or self.fits_alone(footprint)
        return entry.as_object() | {
            "method": model.method,
            "parameter_count": model.parameter_count,
            "bits": model.bits,
            "context": entry.context_tokens,
            "model_type": model.model_type,
            "chats": model.has_chat_template,
            "families": list(families_of(entry)),
            "kv_refusal": kv_refusal(model.config) if model.config else "",
            "state": entry.state if fits or entry.state != "available" else "too_large",
            "fraction": entry.progress.fraction if entry.progress is not None else 0.0,
            "problem": entry.problem,
            "is_downloaded": (model.path / MARKER).is_file(),
            "is_quarantined": bool(entry.quarantine),
            "footprint": footprint and {**sizes(footprint), "fits": fits, "ceiling_bytes": ceiling},
            "alias": settings.alias or "",
            "pinned": loaded.stay.pinned if loaded is not None else bool(settings.pinned),
            "idle_seconds": settings.idle_seconds,
            "is_default": bool(live.default_model) and live.default_model in {model.id, settings.alias},
            "settings": settings.given(),
        }

    # --- memory -------------------------------------------------------------------------------------------------

    def fits_alone(self, footprint: Footprint) -> bool:
        """Return whether a footprint fits if nothing else is loaded; always True for an unknown ceiling."""
        return not self._context.memory_ceiling_bytes or footprint.total_bytes <= self._context.memory_ceiling_bytes

    def footprint(self, main: CatalogModel) -> Footprint | None:
        """Return the footprint of a model without drafters; None for a broken folder, and for a drafter."""
        if main.kind == "drafter" or main.problem:
            return None
        return self._footprint(self._specification(main), main.size_bytes, self._widens_weights)

    def has_room(self, main: CatalogModel, extra: Footprint) -> bool:
        """Return whether the model fits together with `extra`."""
        alone = self.footprint(main)
        return alone is None or self.fits_alone(alone + extra)

    def check_room(self, main: CatalogModel, drafts: Sequence[Candidate] = ()) -> None:
        """Raise InsufficientMemory if the model with these drafters is larger than the ceiling."""
        alone = self.footprint(main)
        if alone is None:
            return
        unit = sum((draft.footprint for draft in drafts), alone)
        if not self.fits_alone(unit):
            names = " + ".join([main.id, *(draft.id for draft in drafts)])
            needed, ceiling = map(bytes_text, (unit.total_bytes, self._context.memory_ceiling_bytes))
            advice = "choose a smaller drafter" if drafts else "choose a smaller model"
            raise InsufficientMemory(f"{names} needs {needed}, the ceiling is {ceiling}: {advice}")

    # --- drafters -----------------------------------------------------------------------------------------------

    def candidates(self, main: CatalogModel, speedups: Speedups = NOT_MEASURED) -> list[Candidate]:
        """Return every way to draft for `main`, in the order of `app.models.pairing.rank`; none for a drafter or a
        broken model."""
        if main.kind != "main" or main.problem:
            return []
        models, specification = self._context.resolver.models(), self._specification(main)
        return candidates_for(main, models, specification, speedups, widen=self._widens_weights)

    def candidates_named(
        self, main: CatalogModel, candidates: Sequence[Candidate], names: Sequence[str], *, parameter: str = "drafts"
    ) -> list[Candidate]:
        """Return the candidates of these names. Raises SpeculationUnavailable if one is missing or cannot draft."""
        by_name = {candidate.id: candidate for candidate in candidates if candidate.id}
        for name in names:
            if name not in by_name:
                message = f"{name} is not on this computer: download it, or choose another drafter for {main.id}"
                raise SpeculationUnavailable(message, parameter=parameter)
            if by_name[name].refusal:
                message = f"{name} cannot draft for {main.id}: {by_name[name].refusal}"
                raise SpeculationUnavailable(message, parameter=parameter)
        return [by_name[name] for name in names]

    @property
    def _widens_weights(self) -> bool:
        info = self._context.worker.ready_info
        return info is not None and info.device.endswith(CPU_DEVICE_SUFFIX)

    def _specification(self, main: CatalogModel) -> ModelSpecification:
        """Build the unit whose memory is counted: the model alone, with rows and quantisation from the settings."""
        rows, quantisation = self._context.settings.max_rows, self._context.live.model(main.id).quantisation
        return ModelSpecification(id=main.id, path=str(main.path), max_rows=rows, quantisation=quantisation)


def sizes(footprint: Footprint) -> dict[str, int]:
    """Convert a footprint to JSON."""
    parts: dict[str, int] = msgspec.to_builtins(footprint)
    return {**parts, "total_bytes": footprint.total_bytes}


def families_of(entry: ModelEntry) -> tuple[str, ...]:
    """Return how a model's caches roll back, as the worker reports, else by its config; `alone`: they cannot."""
    if entry.model.kind == "encoder":
        return ()
    if entry.loaded is not None and entry.loaded.state == "ready":
        return entry.loaded.cache_families or ("alone",)
    return cache_families(entry.model.config) if entry.model.config and entry.model.kind == "main" else ()


def _footprint(specification: ModelSpecification, size_bytes: int, widen: bool) -> Footprint | None:  # noqa: ARG001, FBT001
    """Return the footprint; None if the folder cannot be read. `size_bytes` only distinguishes cached results."""
    try:
        return main_footprint(specification, widen=widen)
    except (ModelUnavailable, OSError):
        return None
