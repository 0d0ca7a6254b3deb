"""`paceline bench MODEL`: does drafting pay for this model on this machine, and how is it set up best?

Loads the model with its drafters in this process, measures, tells, writes the files that were asked for, and keeps the
measurement, and with `--apply` the recommendation, in the store.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from app.benchmark.measure import Progress
from app.benchmark.model_side import ModelSide
from app.benchmark.ours import OurSide
from app.benchmark.plot import as_svg
from app.benchmark.prompts import Prompts
from app.benchmark.sweep import measure
from app.benchmark.sweep_report import left_out, sweep_document, sweep_table
from app.core.errors import InsufficientMemory
from app.core.messages import ModelSpecification
from app.engine import memory
from app.hub import pairing
from app.hub.catalog import default_catalog
from app.model_settings import ALL_METHODS, ModelSettings
from app.serving.live_settings import LiveSettings
from app.serving.resolver import Resolver
from app.serving.sweep.grid import MAIN, Cell, cells
from app.serving.sweep.report import Report, advice_of, doubt_text, drafting_of, report_of
from app.serving.sweep.tasks import TOKENS
from app.serving.sweep.turns import Budget, Sweep
from app.serving.unkept import Unkept
from app.settings import Settings
from app.store.measurement_rows import KeptMeasurements
from app.store.settings_rows import StoredSettings
from app.store.store import FILE_NAME, Store
from app.text.template import TextModel
from app.worker.client import WorkerClient
from app.worker.supervisor import Supervisor

SOURCE = "paceline bench"
DERIVED = {"machine", "versions", "report"}
"""What is kept beside the results, or follows from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the command line said."""

    model: str
    prompts: tuple[str, ...] = ()
    minutes: float = 3.0
    rounds: int = 3
    json: Path | None = None
    svg: Path | None = None
    apply: bool = False


def bench_model(wishes: Wishes, settings: Settings, *, console: Console, note: str = "") -> Sweep:
    """Measure and tell. Raises a `PacelineError` for a model that cannot be had, or a store that cannot be used."""
    specification = specification_for(settings, wishes.model)
    with console.status(f"Loading {specification.id}…") as status:
        sweep, unavailable = run_sweep(specification, wishes, status.update)
    drafts = {draft.method: draft.id for draft in specification.drafts}
    options = {
        "minutes": wishes.minutes,
        "rounds": wishes.rounds,
        "prompts": list(wishes.prompts) or "built in",
        "device": memory.device_name(),
        "blas": note,
    }
    document = sweep_document(sweep, model=specification.id, drafts=drafts, options=options)
    report = report_of(document)
    title = " + ".join([specification.id, *drafts.values()])
    console.print(sweep_table(report, f"{title} on {memory.device_name()}"))
    for line in (*unavailable, left_out(sweep), *map(doubt_text, report.doubts)):
        if line:
            console.print(Text(line, style="dim"))
    console.print(Text(f"{specification.id}: {report.text}", style="bold"))
    _write(wishes.json, json.dumps(document, indent=2) + "\n")
    _write(wishes.svg, as_svg(report, f"Speed by draft length: {title}"))
    store = Store(settings.home / FILE_NAME)
    measured = {name: value for name, value in document.items() if name not in DERIVED}
    versions, machine = document["versions"], document["machine"]
    KeptMeasurements(store).keep(specification.id, versions=versions, machine=machine, results=measured)
    advise(report, drafts, store, settings, specification.id, console=console, apply=wishes.apply)
    store.close()
    return sweep


def specification_for(settings: Settings, model_id: str) -> ModelSpecification:
    """The model with its best drafter of every method, or with those of the settings; stored choices have no say."""
    catalog = default_catalog(settings.model_folders, kept_in=settings.home)
    any_method = ModelSettings(methods=ALL_METHODS)
    live = LiveSettings(settings, Unkept(model_values={model_id: any_method}))
    found = Resolver(live, catalog, WorkerClient(Supervisor()), pairing).resolve(model_id)
    return msgspec.structs.replace(found, policy="auto", methods=(), num_draft_tokens=None)


def run_sweep(specification: ModelSpecification, wishes: Wishes, progress: Progress) -> tuple[Sweep, list[str]]:
    """Load, measure, close; and a line for each method that cannot run."""
    if memory.estimate(specification) > memory.ceiling_bytes():
        raise InsufficientMemory(f"{specification.id} does not fit into memory here: choose a smaller model")
    text = TextModel.load(Path(specification.path))
    ours = OurSide(specification)
    try:
        side = ModelSide(ours, Prompts(text, wishes.prompts), text.stop_token_ids)
        limits = ours.engine.limits
        rows = limits.max_rows if limits.rows_may_batch else 1
        wanted = cells(max_rows=rows, max_context_tokens=limits.max_context_tokens, tokens=TOKENS)
        sweep = measure(
            side,
            affordable(specification, wanted),
            side.methods,
            budget=Budget(60 * wishes.minutes),
            rounds=wishes.rounds,
            progress=progress,
        )
        return sweep, [f"{method}: {reason}" for method, reason in limits.unavailable.items()]
    finally:
        ours.close()


def affordable(specification: ModelSpecification, wanted: Sequence[Cell]) -> list[Cell]:
    """The cells whose keys and values fit into memory; the main one is always tried."""
    short, long = (
        memory.estimate(msgspec.structs.replace(specification, max_context_tokens=tokens)) for tokens in (1024, 2048)
    )
    free = memory.ceiling_bytes() - short
    return [
        cell for cell in wanted if cell == MAIN or cell.rows * (cell.context + TOKENS) * (long - short) / 1024 <= free
    ]


def _write(file: Path | None, content: str) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")


def advise(
    report: Report,
    drafts: Mapping[str, str],
    store: Store,
    settings: Settings,
    model_id: str,
    *,
    console: Console,
    apply: bool,
) -> None:
    """List what the recommendation changes, and with `apply` change that and nothing else."""
    live = LiveSettings(settings, StoredSettings(store))
    resolver = Resolver(live, default_catalog(settings.model_folders), WorkerClient(Supervisor()), pairing)
    current = drafting_of(live.model(model_id).given(), resolver.planned(resolver.find(model_id)))
    changes = advice_of(report, drafts, current).changes
    if not changes:
        console.print(Text("Nothing to change."))
        return
    for each in changes:
        console.print(Text(f"  {each.name}: {_value(each.old)} → {_value(each.new)}"))
    if apply:
        live.change_model(model_id, {each.name: each.new for each in changes}, SOURCE)
        console.print(Text(f"Stored for {model_id}; a server uses it when it next loads the model."))
    else:
        console.print(Text("--apply stores this."))


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(value) or "none"
    return "automatic" if value is None else str(value)
