"""Loads a unit, probes its models and opens its engine: its caches, its drafters, its limits, its prefix cache."""

import hashlib
import logging
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
from mlx import nn

from app.core.messages import short_text
from app.core.reason import Reason
from app.core.step import EngineLimits, EnginePort
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine.caches.rollback import UnknownCacheError
from app.engine.drafters.registry import REGISTRY, Drafters, open_drafters
from app.engine.encoder_engine import EncoderEngine
from app.engine.encoders import Encoder
from app.engine.engine import Engine
from app.engine.layers import cheap_tokens_of
from app.engine.loaded_unit import Findings, LoadedUnit
from app.engine.loading.loader import load_unit
from app.engine.memory import gpu_architecture
from app.engine.prefix.cache import PrefixCache, open_prefix_cache
from app.engine.prefix.disk import NO_DISK, Disk
from app.engine.probe import Result, finished, open_runner, probe
from app.engine.runner import AloneRunner, Runner
from app.models.drafters.methods import DRAFT_MODEL
from app.models.footprint import is_fused, prefill_pairs, quantisation_of
from app.models.machine_files import MachineFiles

logger = logging.getLogger("paceline.loading")


def open_model(path: str, **drafters: str) -> Engine:
    """Load the model in the folder `path` and open its engine. `drafters` are the folders of its drafters, by method.

    A drafter that fails is in `limits.unavailable`. This is for programs that load all at once; the server's pool loads
    slice by slice. Raises ModelUnavailable.
    """
    drafts = tuple(DrafterSpecification(Path(folder).name, folder, method) for method, folder in drafters.items())
    return open_engine(finished(load_unit(ModelSpecification(id=Path(path).name, path=path, drafters=drafts))))


def load_and_probe(spec: ModelSpecification, files: MachineFiles) -> Generator[tuple[str, float], None, LoadedUnit]:
    """Load a unit as `load_unit` does, and add the findings about its models, stored on this machine or from a probe.
    Yield (phase, fraction 0–1), also after each forward of a probe. If the probe of a draft model fails, its findings
    have the error."""
    unit = yield from load_unit(spec)
    if isinstance(unit.target, Encoder):
        return unit
    findings = {"": (yield from _find(spec.id, unit.target, unit.config, unit, files))}
    for draft in unit.drafters:
        if draft.method == DRAFT_MODEL.name:
            try:
                findings[draft.method] = yield from _find(draft.id, draft.model, draft.config, unit, files)
            except Exception as error:
                logger.exception("%s cannot be probed", draft.id)
                findings[draft.method] = Findings([], error=f"the probe of {draft.id} failed: {short_text(error)}")
    return replace(unit, findings=findings)


def _find(
    name: str, model: nn.Module, config: Mapping[str, Any], unit: LoadedUnit, files: MachineFiles
) -> Generator[tuple[str, float], None, Findings]:
    digest = hashlib.sha256(msgspec.json.encode(config)).hexdigest()
    key = files.key("probe", type(model).__module__, name, digest)
    known = files.read(key, Findings)
    if known is not None:
        return known
    try:
        runner = Runner(model, chunk_tokens=unit.spec.prefill_chunk_tokens)
    except UnknownCacheError as error:
        findings = Findings(key, error=str(error))
    else:
        findings = msgspec.structs.replace((yield from phased("probing", probe(runner))), key=key)
    files.write(findings)
    return findings


def phased(phase: str, steps: Generator[None, None, Result]) -> Generator[tuple[str, float], None, Result]:
    """Run `steps` as the last part of a load, yielding its `phase` after each one, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("Result", end.value)
        yield phase, 1.0


def open_unit(unit: LoadedUnit, disk: Disk) -> EnginePort:
    """Open the engine of a loaded unit; `disk` stores its prefix cache, if it has one."""
    return EncoderEngine(unit.target, unit) if isinstance(unit.target, Encoder) else open_engine(unit, disk)


def open_engine(unit: LoadedUnit, disk: Disk = NO_DISK) -> Engine:
    """Open the engine of a loaded unit: caches, drafters and limits. `disk` stores its prefix cache."""
    spec, max_rows, prefixes = unit.spec, unit.spec.max_rows, open_prefix_cache(unit.spec, disk)
    runner: Runner
    try:
        runner = open_runner(
            unit.target,
            chunk_tokens=spec.prefill_chunk_tokens,
            findings=unit.findings.get(""),
            on_progress=unit.on_progress,
        )
    except UnknownCacheError as error:
        detail = f"the model's cache cannot be rolled back ({error}): it serves one request at a time, without drafts"
        runner, max_rows, prefixes = AloneRunner(unit.target, unit.on_progress), 1, PrefixCache(0)
        drafters = Drafters({}, dict.fromkeys(REGISTRY, Reason("cannot_draft", {"detail": detail})))
    else:
        runner.quantisation = quantisation_of(spec, unit.config)
        drafters = open_drafters(unit)
        runner.tap(drafters.taps)
    limits = EngineLimits(
        max_context_tokens=unit.max_context_tokens,
        max_rows=max_rows,
        prefill_chunk_tokens=spec.prefill_chunk_tokens,
        prefill_pairs=prefill_pairs(fused=is_fused(unit.config, gpu_architecture())),
        drafters=tuple(drafters.available),
        longest_drafts=drafters.longest,
        cheap_tokens=cheap_tokens_of(unit.target, unit.config, gpu_architecture()),
        vocabulary_size=unit.vocabulary_size,
    )
    return Engine(runner, drafters, limits, prefixes, acceptance=spec.acceptance)
