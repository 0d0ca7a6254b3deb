"""Current settings: from the command line, else the environment, else the store, else the defaults.

Server, command line and benchmark use the same class; `app/admin/setting_rows.py` prepares its settings for display.
Settings with immediate effect are read from `current` and `model` at each use; settings that need a restart keep their
initial value in `current`. While a server runs, only the server changes stored values, even for the command line.
Saving raises `InvalidSetting`; it writes a file, so call it in a thread.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from pydantic import ValidationError

from app.core.errors import InvalidSetting, StoreUnavailable, invalid_setting
from app.core.setting_texts import to_json_value
from app.i18n.catalogs import languages
from app.model_settings import CONFLICTS as MODEL_CONFLICTS
from app.model_settings import PROFILED, Conflict, ModelSettings, refuse_conflicts, split_profile
from app.settings import WHERE_UNREADABLE, Settings, check_setting, setting_info

if TYPE_CHECKING:
    from app.store.rows import StoredSettings

Origin = Literal["command line", "environment", "store", "default"]
Listener = Callable[[], None]

RESTART_ONLY = frozenset(name for name in Settings.model_fields if setting_info(name)["takes_effect"] == "restart")
"""Names of the settings that take effect only after a restart."""
USER_LANGUAGES = "languages"
"""Folder in `PACELINE_HOME` with the user's own languages."""
UNSET = ModelSettings()

logger = logging.getLogger("paceline.settings")


@dataclass(frozen=True, slots=True)
class SettingsState:
    """The settings and everything else that decides whether they conflict."""

    settings: Settings
    has_keys: bool = False
    """Whether an API key exists in the store."""
    models: frozenset[str] | None = None
    """Ids and aliases of the models on this computer; None: not looked up."""
    known_folders: tuple[Path, ...] = ()
    """Model folders before a change; they need not exist, because their drive may be disconnected."""

    @property
    def has_any_key(self) -> bool:
        """Whether there is any key that a client could use."""
        return self.has_keys or self.settings.api_key is not None

    def lacks(self, names: Iterable[str]) -> bool:
        """Return whether one of `names` is not the name of a model on this computer."""
        return self.models is not None and not self.models.issuperset(names)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


BEYOND_LOOPBACK: Conflict[SettingsState] = Conflict(
    ("host",),
    "other machines reach this address, so a key is needed: set PACELINE_API_KEY, make one with "
    "`paceline keys create`, or listen on 127.0.0.1",
    lambda state: not state.settings.is_loopback and not state.has_any_key,
)
"""The only conflict that keeps the server from starting."""
CONFLICTS: tuple[Conflict[SettingsState], ...] = (
    BEYOND_LOOPBACK,
    Conflict(
        ("require_key",),
        "nobody has a key yet: create one first, or set PACELINE_API_KEY",
        lambda state: state.settings.require_key and not state.has_any_key,
    ),
    Conflict(
        ("default_model",),
        "no model on this computer has that name; `paceline ls` lists them",
        lambda state: bool(state.settings.default_model) and state.lacks([state.settings.default_model]),
        translation_key="no_model",
    ),
    Conflict(
        ("drafts",),
        "one of these models or drafters is not on this computer: `paceline ls` names them",
        lambda state: state.lacks(
            name
            for main, drafters in state.settings.drafts.items()
            for name in (main, *drafters.split("+"))
            if name != "off"
        ),
        translation_key="no_model",
    ),
    Conflict(
        ("memory_limit",),
        "this computer has less memory than that: give less, or leave it empty",
        lambda state: (state.settings.memory_limit or 0) > psutil.virtual_memory().total,
    ),
    Conflict(
        ("model_dirs",),
        "there is no such folder: check how it is written",
        lambda state: not all(map(_is_folder, {*state.settings.model_dirs} - {*state.known_folders})),
        translation_key="no_folder",
    ),
    Conflict(
        ("downloads_folder",),
        "neither this folder nor its parent exists: check how it is written",
        lambda state: (folder := state.settings.downloads_folder) is not None and not _is_folder(folder.parent),
        translation_key="no_folder",
    ),
    Conflict(
        ("policy", "drafts", "speculative_config", "num_draft_tokens"),
        "the policy off never drafts: unset drafts, speculative_config and num_draft_tokens, or choose another policy",
        lambda state: (
            state.settings.policy == "off"
            and bool(
                state.settings.speculative_config
                or state.settings.num_draft_tokens
                or set(state.settings.drafts.values()) - {"off"}
            )
        ),
    ),
)


class LiveSettings:
    """Settings in effect. `given` are those from command line and environment, `storage` has the stored ones.

    Without storage nothing can be changed; `stored` and `models` then provide the stored values.
    """

    def __init__(
        self,
        given: Settings,
        storage: "StoredSettings | None" = None,
        *,
        stored: Mapping[str, Any] | None = None,
        models: Mapping[str, ModelSettings] | None = None,
    ) -> None:
        self._given = given
        self._storage = storage
        self._lock = threading.RLock()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Listener]] = []
        self.changes = 0
        self._stored = _usable(storage.settings() if storage else stored or {})
        self._models = dict(storage.models() if storage else models or {})
        self.pending = self.current = given.over(self._stored)

    current: Settings
    """Settings in effect, frozen; a change replaces the object."""
    pending: Settings
    """Settings as they will be after a restart."""
    changes: int
    """Number of changes so far."""

    def origin(self, name: str) -> Origin:
        """Return where the value of a setting comes from."""
        if name in self._given.model_fields_set:
            return "command line" if name in self._given.command_line else "environment"
        return "store" if name in self._stored else "default"

    def stored(self, name: str) -> Any:
        """Return the stored value as plain JSON, even if it is overridden; None: nothing is stored."""
        return self._stored.get(name)

    def change(self, changes: Mapping[str, Any], source: str, *, models: Collection[str] | None = None) -> None:
        """Store all `changes`, given as text or plain JSON, or none of them; a value of None deletes the stored one.

        Raises `InvalidSetting` for an unknown name, a bad value or a conflict. `models` are the model ids on
        this computer; None: any model name is accepted.
        """
        values = {name: check_setting(name, value) for name, value in changes.items()}
        checked = self.pending.with_left_downloads(values)
        if checked.get("language") and checked["language"] not in self.languages:
            advice = f"language: use one of {', '.join(self.languages)}, or nothing"
            raise InvalidSetting(advice, parameter="language")
        with self._lock:
            storage = self._open_storage()
            changeable = {name: value for name, value in checked.items() if name not in self._given.model_fields_set}
            pending = self.pending.with_values(
                {name: default_of(name) if value is None else value for name, value in changeable.items()}
            )
            aliases = {model.alias for model in self._models.values() if model.alias}
            names = None if models is None else frozenset({*models, *aliases, *self._models})
            state = SettingsState(pending, storage.has_keys(), names, self.pending.model_dirs)
            refuse_conflicts(state, [conflict for conflict in CONFLICTS if set(conflict.names) & set(changes)])
            texts = {name: to_json_value(value) for name, value in checked.items()}
            storage.change_settings(texts, source=source)
            self._stored = {name: value for name, value in {**self._stored, **texts}.items() if value is not None}
            self.pending = pending
            at_start = {name: getattr(self.current, name) for name in RESTART_ONLY}
            self.current = pending.with_values(at_start)
            self._notify()

    @property
    def languages(self) -> tuple[str, ...]:
        """Possible values of the setting `language`: the package's languages and the user's own."""
        return tuple(sorted({*languages(), *languages(self._given.home / USER_LANGUAGES)}))

    def model(self, model_id: str) -> ModelSettings:
        """Return the settings of a model; `UNSET` for an unknown one."""
        return self._models.get(model_id, UNSET)

    @property
    def models(self) -> Mapping[str, ModelSettings]:
        """Settings of every model and profile that has any, by name."""
        return dict(self._models)

    def profile(self, requested: str | None, model_id: str) -> ModelSettings:
        """Return the settings of the profile in the name `requested` (`MODEL:PROFILE`); `UNSET` if it has none."""
        requested = requested or self.current.default_model
        return UNSET if self.id_of_alias(requested) else self.model(f"{model_id}:{split_profile(requested)[1]}")

    def request_defaults(self, requested: str | None, model_id: str) -> ModelSettings:
        """Return the defaults of a request for `requested`: the settings of its profile, else those of the model."""
        return self.profile(requested, model_id).over(self.model(model_id))

    def profiles(self, model_id: str) -> list[str]:
        """Return the names of a model's profiles, as requests use them (`MODEL:PROFILE`)."""
        return sorted(name for name in self._models if split_profile(name)[0] == model_id)

    def id_of_alias(self, alias: str) -> str | None:
        """Return the id of the model with this alias."""
        return next((name for name, model in self._models.items() if model.alias == alias), None)

    def change_model(
        self,
        model_id: str,
        changes: Mapping[str, Any],
        source: str,
        *,
        reserved: Collection[str] = (),
        profile: str = "",
    ) -> ModelSettings:
        """Store `changes` of a model or its `profile`; None deletes a value. `reserved` names cannot be an alias."""
        disallowed = (
            sorted(set(changes).intersection(ModelSettings.model_fields).difference(PROFILED)) if profile else ()
        )
        if disallowed:
            advice = f"{disallowed[0]}: a profile cannot set that; set it for {model_id}"
            raise InvalidSetting(advice, parameter=disallowed[0], translation_key="profile")
        model_id = f"{model_id}:{profile}" if profile else model_id
        with self._lock:
            storage = self._open_storage()
            model = checked_model({**self.model(model_id).given(), **changes})
            others = {other.alias for name, other in self._models.items() if name != model_id}
            if "alias" in changes and model.alias is not None and model.alias in {*others, *reserved}:
                raise InvalidSetting(
                    f"alias: {model.alias} is the name of another model", parameter="alias", translation_key="alias"
                )
            storage.save_model(model_id, model, source=source)
            self._models = {
                name: stored for name, stored in {**self._models, model_id: model}.items() if stored != UNSET
            }
            self._notify()
            return model

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after every change, on the running event loop; the returned function unsubscribes it."""
        entry = (asyncio.get_running_loop(), listener)
        self._listeners.append(entry)
        return lambda: self._listeners.remove(entry)

    def _notify(self) -> None:
        self.changes += 1
        for loop, listener in tuple(self._listeners):
            loop.call_soon_threadsafe(_call, listener)

    def _open_storage(self) -> "StoredSettings":
        if self._storage is None:
            raise StoreUnavailable("settings cannot be stored here")
        return self._storage


def _call(listener: Listener) -> None:
    try:
        listener()
    except Exception:
        logger.exception("a listener to the settings failed")


def default_of(name: str) -> Any:
    """Return the default of a setting of the server."""
    return Settings.model_fields[name].get_default(call_default_factory=True)


def _usable(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return `stored` without unreadable values, which are logged; `WHERE_UNREADABLE` has safe substitutes for some."""
    usable = {}
    for name, value in stored.items():
        try:
            usable[name] = _validated(name, value)
        except InvalidSetting as error:
            if name in WHERE_UNREADABLE:
                usable[name] = WHERE_UNREADABLE[name]
            substitute = f"taken for {usable[name]}" if name in usable else "left out"
            logger.warning("the stored setting %s is %s: %s", name, substitute, error)
    return usable


def _validated(name: str, value: Any) -> Any:
    """Return a stored value if it is valid for its setting. A switch must be a bool. Raises `InvalidSetting`."""
    check_setting(name, value)
    if value is None or (isinstance(default_of(name), bool) and not isinstance(value, bool)):  # 0 is not a bool
        raise InvalidSetting(f"{name}: the value cannot be read", parameter=name)
    return value


def checked_model(values: Mapping[str, Any]) -> ModelSettings:
    """Return the settings of a model. Raises `InvalidSetting` for an unknown name, a bad value or a conflict."""
    try:
        model = ModelSettings.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise invalid_setting(error.errors()[0]) from None
    refuse_conflicts(model, MODEL_CONFLICTS)
    return model
