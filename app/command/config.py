"""`paceline config`, `password` and `keys`: stored settings, account and keys, with or without a server.

A running server stores a changed setting and applies it; without a server, the command writes to the store. Each answer
states when the change takes effect. The command always writes the account and keys to the store, which needs only write
access to the file; a running server reads them from the store at the next request.
"""

import getpass
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from app.admin.setting_rows import model_setting_rows, setting_rows
from app.command.server import running_server
from app.core.errors import CommandError, ModelNotFound
from app.core.setting_texts import absolute_path, size_text
from app.model_settings import split_profile
from app.models.catalog import default_catalog
from app.serving.live_settings import LiveSettings
from app.settings import Settings
from app.store.accounts import Accounts, Keys
from app.store.rows import FirstRun, StoredSettings
from app.store.store import FILE_NAME, Store
from app.store.tables import KeyRow

SOURCE = "paceline config"
FOLDERS = "model_dirs"
"""Name of the setting that is a list of folders."""
EFFECT_TEXTS = {
    "now": "takes effect now, in a running server within a second",
    "reload": "applies on next load (`paceline unload MODEL`)",
    "restart": "applies after a restart of `paceline serve`",
}
EFFECTS = {"now": "now", "reload": "on next load", "restart": "after a restart"}
SHOWN_CHARACTERS = 60


@contextmanager
def open_settings(settings: Settings) -> Iterator[LiveSettings]:
    """Open the stored settings without a server; `settings` take precedence over them. Raises `StoreUnavailable`."""
    with closing(Store(settings.home / FILE_NAME)) as store:
        yield LiveSettings(settings, StoredSettings(store))


@contextmanager
def open_accounts(settings: Settings) -> Iterator[Accounts]:
    """Open the account and its keys. Raises `StoreUnavailable`."""
    with closing(Store(settings.home / FILE_NAME)) as store:
        yield Accounts(store)


def set_password(settings: Settings, password: str) -> None:
    """Create the account and mark the first-run steps as remaining, or change the password. Raises `InvalidRequest`."""
    with closing(Store(settings.home / FILE_NAME)) as store:
        accounts = Accounts(store)
        is_first = not accounts.has_account
        accounts.set_password(password)
        if is_first:
            FirstRun(store).begin()


def rows(settings: Settings, model: str = "") -> list[dict[str, Any]]:
    """Return every setting of the server, or of a model. Raises `ModelNotFound`."""
    with open_settings(settings) as live:
        return model_setting_rows(live, *_resolve_model(live, model)) if model else setting_rows(live)


def row(settings: Settings, name: str, model: str = "") -> dict[str, Any]:
    """Return one setting. Raises `CommandError` for an unknown name."""
    setting_name = name.lower().replace("-", "_").removeprefix("paceline_")
    setting = next((entry for entry in rows(settings, model) if entry["name"] == setting_name), None)
    if setting is None:
        where = f"models have no setting {name}" if model else f"unknown setting {name}"
        raise CommandError(f"{where}: `paceline config list{' --model MODEL' if model else ''}` lists them")
    return setting


def change(settings: Settings, name: str, value: str | None, model: str = "") -> str:
    """Store a value, or unset it with None; return when it takes effect. Raises `CommandError` and `InvalidSetting`."""
    current = row(settings, name, model)
    new_value = _as_list(value) if model and value is not None and current["kind"] == "list" else value
    if value and current["name"] in {FOLDERS, "downloads_folder"}:  # the server has another working folder
        is_one = current["name"] == "downloads_folder"
        folders = [value] if is_one else [folder for folder in value.split(os.pathsep) if folder]
        new_value = os.pathsep.join(str(absolute_path(folder)) for folder in folders)
    server = running_server(settings)
    if server is not None:
        path = f"/admin/api/models/{quote(model)}/settings" if model else "/admin/api/settings"
        server.call("PATCH", path, {current["name"]: new_value})
    else:
        _change_stored(settings, current["name"], new_value, model)
    current = row(settings, name, model)
    message = f"{current['name']} is {'unset' if current['value'] is None else text_of(current, current['value'])}"
    if current["origin"] in {"command line", "environment"}:
        return f"{message}: the new value is stored, but {current['variable']} in the environment overrides it"
    return f"{message}: {EFFECT_TEXTS[current['takes_effect']]}"


def _change_stored(settings: Settings, name: str, value: Any, model: str) -> None:
    with open_settings(settings) as live:
        if model:
            model_id, profile = _resolve_model(live, model)
            live.change_model(model_id, {name: value}, SOURCE, reserved=_model_ids(live), profile=profile)
        else:
            live.change({name: value}, SOURCE, models=_model_ids(live) if name in {"default_model", "drafts"} else None)


def table(setting_rows: Sequence[Mapping[str, Any]]) -> Table:
    """Build a list with two lines for each setting. The first has its name, value and origin, and when a change takes
    effect; the second has its description."""
    shown = Table.grid()
    shown.add_column(overflow="fold")
    for setting in setting_rows:
        value = setting["value"] if setting["value"] is not None else setting.get("inherited")
        facts = f"  {setting['origin']} · takes effect {EFFECTS[setting['takes_effect']]}"
        text = text_of(setting, value)[:SHOWN_CHARACTERS]
        shown.add_row(Text.assemble((setting["name"], "bold"), f"  {text}", (facts, "dim")))
        unit = f" ({setting['unit']})" if setting["unit"] else ""
        shown.add_row(Padding(Text(f"{setting['description']}{unit}", style="dim"), (0, 0, 0, 4)))
    return shown


def text_of(setting: Mapping[str, Any], value: Any) -> str:
    """Format a value of a setting in the form that `paceline config set` accepts; an unset or empty one as a dash."""
    if setting["unit"] == "bytes" and value is not None:
        return size_text(value)
    if value is None or value in ("", {}):
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        separator = os.pathsep if setting["name"] == FOLDERS else ", "
        return separator.join(str(entry) for entry in value) or "none"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _as_list(text: str) -> list[str]:
    """Split text at commas; `none` is the empty list."""
    return [] if text.strip() in {"", "none"} else [part.strip() for part in text.split(",") if part.strip()]


def _resolve_model(live: LiveSettings, name: str) -> tuple[str, str]:
    """Return the model id for an id or alias, and the profile in the name or "". Raises `ModelNotFound`."""
    catalog = default_catalog(live.current.model_folders)
    try:
        return catalog.find(live.id_of_alias(name) or name).id, ""
    except ModelNotFound:
        base_name, profile = split_profile(name)
        if not profile and name in live.models:  # a deleted model's settings can still be unset
            return name, ""
        if not profile:
            raise
        return catalog.find(live.id_of_alias(base_name) or base_name).id, profile


def _model_ids(live: LiveSettings) -> set[str]:
    return {model.id for model in default_catalog(live.current.model_folders).models()}


# --- account and keys ---------------------------------------------------------------------------------------------


def read_password() -> str:
    """Read a new password: typed twice without echo, or the first line of a pipe. Raises `CommandError`."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass.getpass("New password for the dashboard: ")
    if getpass.getpass("Again: ") != password:
        raise CommandError("the passwords do not match; nothing was changed")
    return password


def revoke_key(keys: Keys, name: str) -> None:
    """Revoke the key with this number or name. Raises `CommandError` unless exactly one key matches."""
    matches = [key for key in keys.list() if name in {str(key.id), key.name}]
    if len(matches) != 1:
        what = "several keys are" if matches else "no key is"
        raise CommandError(f"{what} called {name}: use its number from `paceline keys`")
    keys.revoke(matches[0].id)


def keys_table(keys: Sequence[KeyRow]) -> Table | Text:
    """Build a table of the keys."""
    if not keys:
        return Text("No API keys. Create one: paceline keys create NAME")
    table = Table("number", "name", "begins with", "scope", "created", "last used", box=None, pad_edge=False)
    for key in keys:
        used = "never" if key.used_at is None else _day(key.used_at)
        table.add_row(str(key.id), Text(key.name), key.hint, key.scope, _day(key.created_at), used)
    return table


def keys_as_json(keys: Sequence[KeyRow]) -> list[dict[str, Any]]:
    """Return the keys as JSON."""
    return [key.model_dump(include={"id", "name", "scope", "created_at", "used_at"}) for key in keys]


def _day(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
