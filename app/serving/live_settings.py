"""The settings as they are now: the command line, then the environment, then what is stored, then the defaults.

One object for the server, the command line and the benchmark. What may be felt at once reads `current` and `model` at
the moment of use; what is felt after a restart keeps, in `current`, the value of the start. While a server runs, only
it changes what is stored: the command line asks it to. Saving raises `InvalidSetting`, and is done in a thread: it
writes a file.
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

from app.core.errors import InvalidSetting, StoreUnavailable, wording_of
from app.core.setting_texts import plain
from app.i18n import languages
from app.model_settings import CONFLICTS as MODEL_CONFLICTS
from app.model_settings import Conflict, ModelSettings, find_conflict
from app.settings import Settings, check_setting, property_of

if TYPE_CHECKING:
    from app.store.rows import StoredSettings

Origin = Literal["command line", "environment", "store", "default"]
Listener = Callable[[], None]

OWN_CATALOGS = "languages"
"""The folder in `PACELINE_HOME` with languages of the user's own."""
UNSET = ModelSettings()

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Situation:
    """The settings and what else decides whether they can stand together."""

    settings: Settings
    has_keys: bool = False
    """Whether an API key was created."""
    models: frozenset[str] | None = None
    """The models on this computer, by id and alias; None: nobody looked."""

    @property
    def has_any_key(self) -> bool:
        """Whether there is a key that could let anybody in."""
        return self.has_keys or self.settings.api_key is not None

    def lacks(self, names: Iterable[str]) -> bool:
        """Whether one of these is no model of this computer."""
        return self.models is not None and not self.models.issuperset(names)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


BEYOND_LOOPBACK: Conflict[Situation] = Conflict(
    ("host",),
    "other machines reach this address, so a key is needed: set PACELINE_API_KEY, make one with "
    "`paceline keys create`, or listen on 127.0.0.1",
    lambda now: not now.settings.is_loopback and not now.has_any_key,
)
"""The one conflict with which the server does not start."""
CONFLICTS: tuple[Conflict[Situation], ...] = (
    BEYOND_LOOPBACK,
    Conflict(
        ("require_key",),
        "nobody has a key yet: create one first, or set PACELINE_API_KEY",
        lambda now: now.settings.require_key and not now.has_any_key,
    ),
    Conflict(
        ("default_model",),
        "no model on this computer is called so: `paceline ls` names them",
        lambda now: bool(now.settings.default_model) and now.lacks([now.settings.default_model]),
        wording="no_model",
    ),
    Conflict(
        ("drafts",),
        "a model or drafter of these is not on this computer: `paceline ls` names them",
        lambda now: now.lacks(
            name
            for main, drafters in now.settings.drafts.items()
            for name in (main, *drafters.split("+"))
            if name != "off"
        ),
        wording="no_model",
    ),
    Conflict(
        ("memory_limit",),
        "this computer has less memory than that: give less, or leave it empty",
        lambda now: (now.settings.memory_limit or 0) > psutil.virtual_memory().total,
    ),
    Conflict(
        ("model_dirs",),
        "there is no such folder: check how it is written",
        lambda now: not all(map(_is_folder, now.settings.model_dirs)),
        wording="no_folder",
    ),
    Conflict(
        ("downloads_folder",),
        "neither this folder nor the one around it is there: check how it is written",
        lambda now: (folder := now.settings.downloads_folder) is not None and not _is_folder(folder.parent),
        wording="no_folder",
    ),
    Conflict(
        ("policy", "drafts", "speculative_config", "num_draft_tokens"),
        "the policy off never drafts: unset drafts, speculative_config and num_draft_tokens, or choose another policy",
        lambda now: (
            now.settings.policy == "off"
            and bool(
                now.settings.speculative_config
                or now.settings.num_draft_tokens
                or set(now.settings.drafts.values()) - {"off"}
            )
        ),
    ),
)


class LiveSettings:
    """`given` is what command line and environment say; `keeper` keeps the rest.

    Without a keeper nothing can be changed: `stored` and `models` are what is known to be stored.
    """

    def __init__(
        self,
        given: Settings,
        keeper: "StoredSettings | None" = None,
        *,
        stored: Mapping[str, Any] | None = None,
        models: Mapping[str, ModelSettings] | None = None,
    ) -> None:
        self._given = given
        self._keeper = keeper
        self._lock = threading.RLock()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Listener]] = []
        self.changes = 0
        self._stored = _usable(keeper.settings() if keeper else stored or {})
        self._models = dict(keeper.models() if keeper else models or {})
        self.wanted = self.current = given.over(self._stored)

    current: Settings
    """Every setting as it is in effect, frozen; another object after a change."""
    wanted: Settings
    """The same with what a restart will bring."""
    changes: int
    """How many changes there were so far."""

    def origin(self, name: str) -> Origin:
        """Where the value of a setting comes from."""
        if name in self._given.model_fields_set:
            return "command line" if name in self._given.command_line else "environment"
        return "store" if name in self._stored else "default"

    def stored(self, name: str) -> Any:
        """The stored value as plain JSON, also where something else goes first; None: nothing is stored."""
        return self._stored.get(name)

    def change(self, changes: Mapping[str, Any], source: str, *, models: Collection[str] | None = None) -> None:
        """Keep all of these values, given as text or plain JSON, or none; None forgets one.

        Raises `InvalidSetting` for an unknown name, a bad value or a conflict. `models` are those on this computer;
        None: nobody looked, and any name will do.
        """
        known = self.languages
        checked = {name: checked_value(name, value, known) for name, value in changes.items()}
        with self._lock:
            keeper = self._open_keeper()
            free = {name: value for name, value in checked.items() if name not in self._given.model_fields_set}
            wanted = self.wanted.with_values({name: _or_default(name, value) for name, value in free.items()})
            aliases = {each.alias for each in self._models.values() if each.alias}
            names = None if models is None else frozenset({*models, *aliases})
            situation = Situation(wanted, keeper.has_keys(), names)
            _refuse(find_conflict(situation, [each for each in CONFLICTS if set(each.names) & set(changes)]))
            texts = {name: plain(value) for name, value in checked.items()}
            keeper.change_settings(texts, source=source)
            self._stored = {name: value for name, value in {**self._stored, **texts}.items() if value is not None}
            self.wanted = wanted
            at_start = {name: getattr(self.current, name) for name in Settings.model_fields if waits(name)}
            self.current = wanted.with_values(at_start)
            self._tell()

    @property
    def languages(self) -> tuple[str, ...]:
        """What the setting `language` may say: the package's, and the user's own."""
        return tuple(sorted({*languages(), *languages(self._given.home / OWN_CATALOGS)}))

    def model(self, model_id: str) -> ModelSettings:
        """What is set for a model; nothing is set for an unknown one."""
        return self._models.get(model_id, UNSET)

    @property
    def models(self) -> Mapping[str, ModelSettings]:
        """What is set for each model that something is set for."""
        return dict(self._models)

    def named(self, alias: str) -> str | None:
        """The id of the model with this alias."""
        return next((name for name, model in self._models.items() if model.alias == alias), None)

    def change_model(
        self, model_id: str, changes: Mapping[str, Any], source: str, *, taken: Collection[str] = ()
    ) -> ModelSettings:
        """Keep these values of a model, None forgets one; `taken` are names that an alias must not have."""
        with self._lock:
            keeper = self._open_keeper()
            model = checked_model({**self.model(model_id).given(), **changes})
            others = {each.alias for name, each in self._models.items() if name != model_id}
            if "alias" in changes and model.alias is not None and model.alias in {*others, *taken}:
                raise InvalidSetting(
                    f"alias: {model.alias} is the name of another model", parameter="alias", wording="alias"
                )
            keeper.save_model(model_id, model, source=source)
            self._models = {name: each for name, each in {**self._models, model_id: model}.items() if each != UNSET}
            self._tell()
            return model

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after every change, on the event loop that runs now; the answer ends that."""
        entry = (asyncio.get_running_loop(), listener)
        self._listeners.append(entry)
        return lambda: self._listeners.remove(entry)

    def _tell(self) -> None:
        self.changes += 1
        for loop, listener in tuple(self._listeners):
            loop.call_soon_threadsafe(_feel, listener)

    def _open_keeper(self) -> "StoredSettings":
        if self._keeper is None:
            raise StoreUnavailable("nothing is kept here")
        return self._keeper


def _feel(listener: Listener) -> None:
    try:
        listener()
    except Exception:
        logger.exception("a change of the settings was not felt everywhere")


def _usable(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Without the values that mean nothing (any more), which is told."""
    usable = {}
    for name, value in stored.items():
        try:
            check_setting(name, value)
        except (InvalidSetting, AttributeError) as error:
            logger.warning("the stored setting %s is left out: %s", name, error)
        else:
            usable[name] = value
    return usable


def _or_default(name: str, value: Any) -> Any:
    return Settings.model_fields[name].get_default(call_default_factory=True) if value is None else value


def waits(name: str) -> bool:
    """Whether a setting is felt after a restart only."""
    return bool(property_of(name, "takes_effect") == "restart")


def checked_value(name: str, value: Any, known_languages: Collection[str]) -> Any:
    """The value of a setting to keep; None stays None. Raises `InvalidSetting`."""
    if name not in Settings.model_fields:
        raise InvalidSetting(f"there is no setting called {name[:60]}", parameter="name")
    if not property_of(name, "stored"):
        raise InvalidSetting(f"{name} comes from the environment only: set PACELINE_{name.upper()}", parameter=name)
    if value is None:
        return None
    try:
        checked = check_setting(name, value)
    except InvalidSetting as error:
        message = f"{name}: {error.message.partition(': ')[2]}"
        raise InvalidSetting(message, parameter=name, wording=error.wording, values=error.values) from None
    if name == "language" and checked and checked not in known_languages:
        raise InvalidSetting(f"language: use one of {', '.join(known_languages)}, or nothing", parameter=name)
    return checked


def checked_model(values: Mapping[str, Any]) -> ModelSettings:
    """The settings of a model. Raises `InvalidSetting` for an unknown name, a bad value or a conflict."""
    try:
        model = ModelSettings.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        message = str(first["msg"]).removeprefix("Value error, ")
        wording, values = wording_of(first)
        raise InvalidSetting(f"{name[:60]}: {message}", parameter=name[:60], wording=wording, values=values) from None
    _refuse(find_conflict(model, MODEL_CONFLICTS))
    return model


def _refuse(conflict: Conflict[Any] | None) -> None:
    if conflict is not None:
        message = f"{', '.join(conflict.names)}: {conflict.advice}"
        name = conflict.names[0]
        wording = conflict.wording or f"conflict_{name}"
        raise InvalidSetting(message, code="conflicting_settings", parameter=name, wording=wording)
