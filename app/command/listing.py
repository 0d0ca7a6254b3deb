"""`ls` and `ps`: what is on disk, what is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.command.errors import CommandError
from app.command.figures import bytes_text, count_text
from app.command.terminal import unbroken
from app.hub import pairing
from app.hub.catalog import CatalogModel, default_catalog
from app.model_settings import SPECULATION, ModelSettings
from app.serving.choosing import Chooser
from app.serving.drafts import DraftFinder
from app.serving.live_settings import LiveSettings
from app.serving.unkept import Unkept
from app.settings import Settings, read_settings
from app.store.settings_rows import StoredSettings
from app.store.store import FILE_NAME, Store


@dataclass(frozen=True, slots=True)
class Row:
    """One model on disk."""

    id: str
    kind: str
    source: str
    size_bytes: int
    context: int
    draft: str
    problem: str
    path: str
    drafts: tuple[dict[str, str], ...] = ()
    """Id and method of every drafter that it would get."""
    chosen: str = ""
    """What is stored for it; empty when nothing is."""


def models_on_disk(settings: Settings, live: LiveSettings | None = None) -> list[Row]:
    """Every model that the server would offer, with the drafters it would get. Needs no server and loads nothing.

    `live` says what is stored; None: nothing.
    """
    catalog = default_catalog(settings.model_folders)
    live = live or LiveSettings(settings, Unkept())
    chooser = Chooser(live, DraftFinder(catalog, pairing))
    models = catalog.models()
    return [_row(model, models, chooser, live.model(model.id)) for model in models]


def models_as_chosen(settings: Settings) -> list[Row]:
    """The models on disk with what is stored for them. Raises `StoreUnavailable`."""
    store = Store(settings.home / FILE_NAME)
    rows = models_on_disk(settings, LiveSettings(settings, StoredSettings(store)))
    store.close()
    return rows


def stored_choices(settings: Settings, model_ids: Sequence[str]) -> dict[str, str]:
    """What is stored for those models that something is stored for, in words. Raises `StoreUnavailable`."""
    store = Store(settings.home / FILE_NAME)
    models = StoredSettings(store).models()
    store.close()
    return {model_id: choice_text(models[model_id]) for model_id in model_ids if model_id in models}


def choice_text(choice: ModelSettings) -> str:
    """What is set for a model: "methods dflash, ngram; 7 drafts; policy single"."""
    length, shortest, longest = choice.num_draft_tokens, choice.prompt_lookup_min, choice.prompt_lookup_max
    parts = [
        f"drafters {', '.join(choice.drafts) or 'none'}" if choice.drafts is not None else "",
        f"methods {', '.join(choice.methods) or 'none'}" if choice.methods is not None else "",
        f"{length} draft{'s' if length != 1 else ''}" if length is not None else "",
        f"policy {choice.policy}" if choice.policy else "",
        f"acceptance {choice.acceptance}" if choice.acceptance else "",
        f"prompt lookup from {shortest}" if shortest is not None else "",
        f"prompt lookup to {longest}" if longest is not None else "",
    ]
    others = {name: value for name, value in choice.given().items() if name not in SPECULATION}
    parts += [f"{name} {'set' if name == 'system_prompt' else value}" for name, value in others.items()]
    return "; ".join(part for part in parts if part)


def check_named_drafts(drafts: Sequence[str], rows: Sequence[Row]) -> None:
    """Raise CommandError for a drafter typed just now, as main=a+b, that cannot be used."""
    problems = {row.id: row.problem for row in rows if row.kind == "main"}
    for main_id in read_settings(drafts=",".join(drafts)).drafts if drafts else ():
        if main_id not in problems:
            raise CommandError(
                f'--draft names no main model of this computer: "{main_id}"; `paceline ls` shows which are here'
            )
        if problems[main_id]:
            raise CommandError(f"{problems[main_id]} (or leave --draft out)")


def _misfit(drafter: CatalogModel, models: Sequence[CatalogModel]) -> str:
    """Why a drafter fits none of the main models that its name is nearest to; "" when it fits one of them."""
    mains = (model for model in models if model.kind == "main" and not model.problem)
    reasons = [pairing.pair(main, drafter).reason for main in mains if pairing.suits(main, drafter, models)]
    return reasons[0] if reasons and all(reasons) else ""


def _row(model: CatalogModel, models: Sequence[CatalogModel], chooser: Chooser, choice: ModelSettings) -> Row:
    chosen = chooser.choose(model) if model.kind == "main" and not model.problem else None
    drafts = chosen.found.drafts if chosen else ()
    misfit = _misfit(model, models) if model.kind == "drafter" and not model.problem else ""
    return Row(
        id=model.id,
        kind="main" if model.kind == "main" else model.method,
        source=model.source,
        size_bytes=model.size_bytes,
        context=model.context,
        draft=drafts[0].id if drafts else "",
        drafts=tuple({"id": draft.id, "method": draft.method} for draft in drafts),
        problem=model.problem or misfit or (chosen.problem if chosen else ""),
        path=str(model.path),
        chosen=choice_text(choice),
    )


def rows_as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of `ls --json`."""
    return [asdict(row) for row in rows]


def disk_table(rows: Sequence[Row]) -> Table:
    """The table of `ls`; choices and problems get a column when there are any."""
    chosen = ("Chosen",) if any(row.chosen for row in rows) else ()
    problem = ("Problem",) if any(row.problem for row in rows) else ()
    table = _table("Model", "Kind", "Size", "Context", "Draft", *chosen, *problem)
    for row in rows:
        table.add_row(
            Text(row.id, style="bold"),
            row.kind,
            bytes_text(row.size_bytes) if row.size_bytes else "–",
            count_text(row.context),
            Text(" + ".join(draft["id"] for draft in row.drafts) or row.draft or "–"),
            *((Text(row.chosen or "–"),) if chosen else ()),
            *((Text(row.problem, style="red"),) if problem else ()),
        )
    return unbroken(table)


def loaded_table(snapshot: Mapping[str, Any], chosen: Mapping[str, str]) -> RenderableType:
    """The table of `ps`, and below it what is chosen for loaded models and what keeps others from being loaded."""
    models, loading = snapshot.get("models") or (), snapshot.get("loading") or {}
    quarantined = snapshot.get("quarantined") or {}
    notes = [
        Text(f"{name} is quarantined: {reason}, or at once after `paceline release {name}`", style="red")
        for name, reason in quarantined.items()
    ]
    if not (snapshot.get("worker") or {}).get("ready", True):
        notes.append(Text("The worker is starting; requests wait for it.", style="yellow"))
    if not models and not loading:
        notes.append(Text("Nothing is loaded; the first request loads its model, and so does `paceline load MODEL`."))
        return Group(*notes)
    table = _table("Model", "Draft", "State", "Memory", "Methods", "Running", "Waiting", "Idle")
    for model in models:
        _add_loaded(table, model, loading.get(model.get("id")))
    known = {model.get("id") for model in models}
    notes += [Text(f"Chosen for {name}: {text}", style="dim") for name, text in chosen.items() if name in known]
    for name in sorted(set(loading) - known):
        _add_loaded(table, {"id": name, "state": "loading"}, loading[name])
    return Group(unbroken(table), *notes)


def _add_loaded(table: Table, model: Mapping[str, Any], progress: Mapping[str, Any] | None) -> None:
    held = sum(int(model.get(f"{part}_bytes") or 0) for part in ("weights", "cache", "prefix_cache"))
    state = f"{progress['phase']} {100 * progress['fraction']:.0f} %" if progress else str(model.get("state", ""))
    table.add_row(
        Text(str(model.get("id", "")), style="bold"),
        Text(" + ".join(str(draft.get("id")) for draft in model.get("drafts") or ()) or "–"),
        f"{state}{' (pinned)' if model.get('pinned') else ''}",
        bytes_text(held) if held else "–",
        Text(_methods(model)),
        str(model.get("running", 0)),
        str(model.get("waiting", 0)),
        f"{float(model.get('idle_seconds') or 0):.0f} s",
    )


def loaded_text(answer: Mapping[str, Any]) -> Text:
    """What `load` says when the model is ready."""
    draft, why = " + ".join(str(each.get("id")) for each in answer.get("drafts") or ()), answer.get("draft_unavailable")
    seconds = float(answer.get("seconds") or 0)
    text = Text.assemble((str(answer.get("model", "")), "bold"), f" is ready after {seconds:.1f} s")
    text.append(f", drafted by {draft}." if draft else ".")
    return text.append(f" No draft model: {why}.", style="dim") if why and not draft else text


def _methods(model: Mapping[str, Any]) -> str:
    """The methods that run; where no drafter was loaded, also why the others do not (`--json` always tells)."""
    lines = list(model.get("methods") or ("off",))
    if not model.get("drafts"):
        lines += [f"{method}: {reason}" for method, reason in (model.get("unavailable") or {}).items() if reason]
    return "\n".join(lines)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    right = {"Size", "Context", "Memory", "Running", "Waiting", "Idle"}
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table
