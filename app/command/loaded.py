"""`ps`, `load` and `cache`: the models that the server reports in memory, and the prefix cache on disk; also the tables
and number formats that the other commands use."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.command.server import running_server
from app.core.errors import CommandError
from app.core.setting_texts import bytes_text
from app.machine.prefix_files import CachedPrompts, cached_prompts, clear_cached_prompts
from app.model_settings import SPECULATION, ModelSettings
from app.settings import Settings


def loaded_table(snapshot: Mapping[str, Any], chosen: Mapping[str, ModelSettings]) -> RenderableType:
    """Build the table of `ps`, with notes below it: quarantines, worker start, memory pressure, settings of models."""
    models, loading = snapshot.get("models") or (), snapshot.get("loading") or {}
    quarantined = snapshot.get("quarantined") or {}
    notes = [
        Text(f"{name} is quarantined: {reason}; `paceline release {name}` releases it now", style="red")
        for name, reason in quarantined.items()
    ]
    if not (snapshot.get("worker") or {}).get("ready", True):
        notes.append(Text("The worker is starting; requests wait.", style="yellow"))
    if (pressure := snapshot.get("memory_pressure", "normal")) != "normal":
        notes.append(Text(f"The computer is short of memory ({pressure}): `paceline doctor`.", style="yellow"))
    if not models and not loading:
        notes.append(Text("No model is loaded. The first request loads one, or run `paceline load MODEL`."))
        return Group(*notes)
    table = columns_table("Model", "Drafter", "State", "Memory", "Methods", "Running", "Waiting", "Idle")
    for model in models:
        _add_loaded(table, model, loading.get(model.get("id")))
    loaded_ids = {model.get("id") for model in models}
    notes += [
        Text(f"Settings of {name}: {choice_text(settings)}", style="dim")
        for name, settings in chosen.items()
        if name in loaded_ids
    ]
    for name in sorted(set(loading) - loaded_ids):
        _add_loaded(table, {"id": name, "state": "loading"}, loading[name])
    return Group(without_wrapping(table), *notes)


def _add_loaded(table: Table, model: Mapping[str, Any], progress: Mapping[str, Any] | None) -> None:
    used_bytes = sum(int(model.get(f"{part}_bytes") or 0) for part in ("weights", "cache", "prefix_cache"))
    state = f"{progress['phase']} {progress['fraction']:.0%}" if progress else str(model.get("state", ""))
    table.add_row(
        Text(str(model.get("id", "")), style="bold"),
        Text(" + ".join(str(draft.get("id")) for draft in model.get("drafts") or ()) or "–"),
        f"{state}{' (pinned)' if model.get('pinned') else ''}",
        bytes_text(used_bytes) if used_bytes else "–",
        Text(_methods(model)),
        str(model.get("running", 0)),
        str(model.get("waiting", 0)),
        f"{float(model.get('idle_seconds') or 0):.0f} s",
    )


def loaded_text(answer: Mapping[str, Any]) -> Text:
    """Return the text that `load` prints once the model is ready."""
    draft, why = (
        " + ".join(str(drafter.get("id")) for drafter in answer.get("drafts") or ()),
        answer.get("draft_unavailable"),
    )
    seconds = float(answer.get("seconds") or 0)
    text = Text.assemble((str(answer.get("model", "")), "bold"), f" is ready after {seconds:.1f} s")
    text.append(f" with {draft}." if draft else ".")
    return text.append(f" No drafter: {why}.", style="dim") if why and not draft else text


def _methods(model: Mapping[str, Any]) -> str:
    """Return the active methods; without a drafter, also why each other one is unavailable (always in `--json`)."""
    lines = list(model.get("methods") or ("off",))
    if not model.get("drafts"):
        lines += [f"{method}: {reason}" for method, reason in (model.get("unavailable") or {}).items() if reason]
    if "apart" in (model.get("cache_families") or ()):
        lines.append("row by row: in one batch, rows would change each other's results")
    return "\n".join(lines)


def choice_text(choice: ModelSettings) -> str:
    """Format the settings of one model: "methods dflash, ngram; 7 drafts; policy single"."""
    length, shortest, longest = choice.num_draft_tokens, choice.prompt_lookup_min, choice.prompt_lookup_max
    parts = [
        f"drafters {', '.join(choice.drafts) or 'none'}" if choice.drafts is not None else "",
        f"methods {', '.join(choice.methods) or 'none'}" if choice.methods is not None else "",
        f"{length} draft{'s' if length != 1 else ''}" if length is not None else "",
        f"policy {choice.policy}" if choice.policy else "",
        f"acceptance {choice.acceptance}" if choice.acceptance else "",
        f"shortest n-gram {shortest}" if shortest is not None else "",
        f"longest n-gram {longest}" if longest is not None else "",
    ]
    others = {name: value for name, value in choice.given().items() if name not in SPECULATION}
    parts += [f"{name} {'set' if name == 'system_prompt' else value}" for name, value in others.items()]
    return "; ".join(part for part in parts if part)


def cache_table(cached: Sequence[CachedPrompts]) -> RenderableType:
    """Build a table with a row for each model."""
    if not cached:
        return Text("No earlier prompt is kept on disk.")
    table = columns_table("Model", "Size", "Blocks", "Last used")
    for prompts in cached:
        used = datetime.fromtimestamp(prompts.used_at).strftime("%Y-%m-%d %H:%M")  # noqa: DTZ006 - the user's own time
        table.add_row(Text(prompts.model, style="bold"), bytes_text(prompts.size_bytes), str(prompts.files), used)
    return without_wrapping(table)


def cache_object(cached: Sequence[CachedPrompts]) -> dict[str, Any]:
    """Return the object of `cache --json`."""
    return {
        "size_bytes": sum(prompts.size_bytes for prompts in cached),
        "models": [
            {
                "model": prompts.model,
                "size_bytes": prompts.size_bytes,
                "files": prompts.files,
                "used_at": prompts.used_at,
            }
            for prompts in cached
        ],
    }


def read_cache(settings: Settings) -> list[CachedPrompts]:
    """Return the prompts kept on disk, by model. Raises CommandError."""
    try:
        return cached_prompts(settings.prefixes_path)
    except OSError as error:
        raise CommandError(f"{settings.prefixes_path} cannot be read: {error.strerror}") from None


def clear_cache(settings: Settings) -> str:
    """Clear the prefix cache, on disk and in a running server; return a line for the user. Raises CommandError."""
    server = running_server(settings)
    try:
        size = clear_cached_prompts(settings.prefixes_path) if server is None else 0
    except OSError as error:
        raise CommandError(f"{settings.prefixes_path} cannot be cleared: {error.strerror}") from None
    if server is not None:
        size = int(server.call("POST", "/api/cache/clear", {})["freed_bytes"])
    return f"The prefix cache is cleared: {bytes_text(size)} freed on disk."


def columns_table(*columns: str) -> Table:
    """Build an empty table; columns of figures are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    right = {"Size", "Context", "Memory", "Running", "Waiting", "Idle"}
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def without_wrapping(table: Table) -> Table:
    """Prevent wrapping within words in a narrow terminal, so that ids can be copied."""
    for column in table.columns:
        words = (word for cell in (column.header, *column.cells) for word in str(cell).split())
        column.min_width = max(map(cell_len, words), default=0)
    return table


def count_text(count: int) -> str:
    """Format a count: 131072 -> "128k"; only multiples of 1024 are shortened."""
    if count >= 1024 and count % 1024 == 0:
        return f"{count // 1024}k"
    return f"{count:,}" if count else "–"


def share_text(part: float, whole: float) -> str:
    """Format a share: 3 of 4 -> "75%"."""
    return f"{part / whole:.0%}" if whole else "–"
