"""`ls`: the models on disk with the drafters they get; and the greeting of `serve`, which shows the same table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from app import __version__
from app.command.loaded import choice_text, columns_table, count_text, without_wrapping
from app.core.errors import CommandError
from app.core.setting_texts import bytes_text
from app.model_settings import ModelSettings
from app.models.catalog import CatalogModel, FolderCatalog, default_catalog
from app.models.footprint import KV_REFUSALS, kv_refusal
from app.models.pairing import is_best_match, refusal
from app.serving.choosing import Chooser
from app.serving.live_settings import LiveSettings
from app.serving.sweep.report import cell_text, report_of, speedups
from app.settings import Settings
from app.store.snapshot import FILE_NAME, StoreSnapshot, read_snapshot


@dataclass(frozen=True, slots=True)
class ModelRow:
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
    """Id and method of every drafter that the model would get."""
    chosen: str = ""
    """Settings stored for the model, in one line; empty if there are none."""
    looking: bool = False
    """Whether the drafters are not known yet."""
    gain: str = ""
    """Verdict of the latest benchmark on drafting, in one line; empty if there is no benchmark."""
    is_base: bool = False
    """Whether the model has no chat template: it only completes text and cannot chat."""


def peek_live_settings(settings: Settings) -> LiveSettings | None:
    """Return explicit and stored settings, read without opening the store; None if the store is unusable."""
    stored = read_snapshot(settings.home / FILE_NAME)
    return None if stored is None else LiveSettings(settings, stored=stored.settings, models=stored.models)


def models_on_disk(live: LiveSettings) -> list[ModelRow]:
    """List every model that the server would offer, with the drafters it would get. Needs no server, loads nothing."""
    settings = live.current
    return _rows(default_catalog(settings.model_folders, cache_folder=settings.home), live)


def models_for_greeting(catalog: FolderCatalog, live: LiveSettings) -> list[ModelRow]:
    """List the models for the greeting of `serve`, without drafters if finding them would delay the greeting."""
    return _rows(catalog, live, looking=catalog.is_reading_tokenizers())


def _rows(catalog: FolderCatalog, live: LiveSettings, *, looking: bool = False) -> list[ModelRow]:
    stored = read_snapshot(live.current.home / FILE_NAME) or StoreSnapshot()
    chooser = Chooser(live, catalog, lambda model_id: speedups(stored.measurements.get(model_id, ())))
    models = catalog.models()
    rows = [
        _row(model, () if looking else models, None if looking else chooser, live.model(model.id)) for model in models
    ]
    return [replace(row, gain=_gain_text(stored.measurements.get(row.id, ()))) for row in rows]


def _gain_text(documents: Sequence[Mapping[str, Any]]) -> str:
    cell = report_of(documents[0]).main_cell if documents else None
    return cell_text(cell) if cell is not None and cell.verdict != "none" else ""


def check_named_drafts(settings: Settings, main_ids: Iterable[str]) -> None:
    """Raise CommandError if a main model is missing, or if the drafters that `settings` name for it cannot be used."""
    catalog = default_catalog(settings.model_folders, cache_folder=settings.home)
    chooser = Chooser(LiveSettings(settings), catalog)
    mains = {model.id: model for model in catalog.models() if model.kind == "main"}
    for main_id in main_ids:
        if main_id not in mains:
            raise CommandError(f'--draft: no main model "{main_id}" on this computer; `paceline ls` lists the models')
        if problem := mains[main_id].problem or chooser.choose(mains[main_id]).problem:
            raise CommandError(f"{problem} (or omit --draft)")


def _pairing_problem(drafter: CatalogModel, models: Sequence[CatalogModel]) -> str:
    """Return why a drafter fits none of the main models with the most similar name; "" if it fits one."""
    mains = (model for model in models if model.kind == "main" and not model.problem)
    reasons = [refusal(main, drafter) for main in mains if is_best_match(main, drafter, models)]
    return f'"{drafter.id}" cannot draft: {reasons[0]}' if reasons and all(reasons) else ""


def _row(
    model: CatalogModel, models: Sequence[CatalogModel], chooser: Chooser | None, model_settings: ModelSettings
) -> ModelRow:
    is_usable = model.kind == "main" and not model.problem
    chosen = chooser.choose(model) if chooser is not None and is_usable else None
    drafts = chosen.drafters if chosen else ()
    kv_reason = kv_refusal(model.config) if model_settings.kv_bits and is_usable else ""
    pairing_problem = _pairing_problem(model, models) if model.kind == "drafter" and not model.problem else ""
    return ModelRow(
        id=model.id,
        kind=model.method if model.kind == "drafter" else model.kind,
        source=model.source,
        size_bytes=model.size_bytes,
        context=model.context,
        draft=drafts[0].id if drafts else "",
        drafts=tuple({"id": draft.id, "method": draft.method} for draft in drafts),
        problem=model.problem or pairing_problem or (chosen.problem if chosen else ""),
        path=str(model.path),
        chosen=choice_text(model_settings) + (f"; not quantized: {KV_REFUSALS[kv_reason]}" if kv_reason else ""),
        looking=is_usable and chooser is None,
        is_base=is_usable and not model.has_chat_template,
    )


def rows_as_json(rows: Sequence[ModelRow]) -> list[dict[str, Any]]:
    """Return the rows of `ls --json`."""
    return [asdict(row) for row in rows]


def disk_table(rows: Sequence[ModelRow]) -> Table:
    """Build the table of `ls`; benchmarks, choices and problems get a column if there are any."""
    chosen = ("Chosen",) if any(row.chosen for row in rows) else ()
    problem = ("Problem",) if any(row.problem for row in rows) else ()
    gain = ("Benchmark",) if any(row.gain for row in rows) else ()
    table = columns_table("Model", "Kind", "Size", "Context", "Drafter", *gain, *chosen, *problem)
    for row in rows:
        table.add_row(
            Text(row.id, style="bold"),
            "base" if row.is_base else row.kind,
            bytes_text(row.size_bytes) if row.size_bytes else "–",
            count_text(row.context),
            Text(" + ".join(draft["id"] for draft in row.drafts) or row.draft or ("looking…" if row.looking else "–")),
            *((Text(row.gain or "–"),) if gain else ()),
            *((Text(row.chosen or "–"),) if chosen else ()),
            *((Text(row.problem, style="red"),) if problem else ()),
        )
    return without_wrapping(table)


def greeting(settings: Settings, rows: Sequence[ModelRow], address: str, setup: str = "") -> RenderableType:
    """Build the greeting of `serve`; `setup` is the address where the first password is chosen."""
    address = address.rstrip("/")
    usable = [row for row in rows if not row.problem and row.kind == "main"]
    parts: list[RenderableType] = [
        Text.assemble(("Paceline ", "bold"), __version__, "  ", (f"{address}/v1", "bold green"), "  (OpenAI endpoint)"),
        Text.assemble("Dashboard ", (f"{address}/admin/", "bold green")),
        *_first_run(setup),
        Text(""),
    ]
    if not usable:
        parts.append(Text("No model found. Add one to a folder in PACELINE_MODEL_DIRS.", style="yellow"))
        return Group(*parts)
    model = min(usable, key=lambda row: (row.is_base, not row.draft))
    parts += [
        Padding(disk_table(rows), (0, 2)),
        Text("\nTry it:\n", style="bold"),
        _code(curl_line(address, model.id)),
        _code(python_lines(address, model.id, needs_key=settings.api_key is not None)),
        Text("Or chat in another terminal: paceline chat. Ctrl-C stops the server.", style="dim"),
    ]
    return Group(*parts)


def _first_run(setup: str) -> list[Text]:
    if not setup:
        return []
    return [
        Text("\nChoose a password for the dashboard here (valid once, for 30 minutes):", style="bold"),
        Text(setup, style="cyan", no_wrap=True, overflow="ignore"),
    ]


def curl_line(address: str, model: str) -> str:
    """Return an example request as one line for a shell."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Count from 1 to 20."}}]}}'
    return f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def python_lines(address: str, model: str, *, needs_key: bool) -> str:
    """Return the same request as a Python script with OpenAI's client, streamed."""
    key = 'os.environ["PACELINE_API_KEY"]' if needs_key else '"none"'
    lines = ["import os"] if needs_key else []
    lines += [
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{address}/v1", api_key={key})',
        'question = {"role": "user", "content": "Count from 1 to 20."}',
        f'for chunk in client.chat.completions.create(model="{model}", messages=[question], stream=True):',
        '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
    ]
    return "\n".join(lines)


def _code(text: str) -> Text:
    """Style lines for copying: no indent, and no wrapping at the width of the terminal."""
    return Text(text + "\n", style="cyan", no_wrap=True, overflow="ignore")
