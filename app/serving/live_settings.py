"""The settings as they are now: the command line, then the environment, then what is stored, then the defaults.

One object for the server, the command line and the benchmark. What may be felt at once reads `current` and `model` at
the moment of use; what is felt after a restart keeps, in `current`, the value of the start. `watch` notices within a
second what another process stored, and calls the listeners on the event loop after every change, wherever it was made.
Saving raises `InvalidSetting`, and is done in a thread: it writes a file.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from app.core.errors import InvalidSetting, StoreUnavailable, wording_of
from app.core.setting_texts import plain
from app.i18n import languages
from app.model_settings import CONFLICTS as MODEL_CONFLICTS
from app.model_settings import Conflict, ModelSettings, find_conflict
from app.serving.conflicts import CONFLICTS, Situation
from app.settings import Settings, SettingsError, check_setting, property_of


class SettingsKeeper(Protocol):
    """Where settings are kept between starts, as plain JSON values. Calls may read and write a file."""

    @property
    def version(self) -> int:
        """Another number after anybody, in any process, kept something."""
        ...

    def settings(self) -> Mapping[str, Any]: ...

    def change_settings(self, changes: Mapping[str, Any], *, source: str) -> None:
        """Keep all of these or none; None forgets one."""
        ...

    def models(self) -> Mapping[str, ModelSettings]: ...

    def save_model(self, model_id: str, settings: ModelSettings, *, source: str) -> None: ...

    def has_keys(self) -> bool:
        """Whether an API key was created that still counts."""
        ...


Origin = Literal["command line", "environment", "store", "default"]
Listener = Callable[[], None]

OWN_CATALOGS = "languages"
"""The folder in `PACELINE_HOME` with languages of the user's own."""
POLL_SECONDS = 0.5
UNSET = ModelSettings()

logger = logging.getLogger(__name__)


class LiveSettings:
    """`given` is what command line and environment say; `keeper` keeps the rest."""

    def __init__(self, given: Settings, keeper: SettingsKeeper) -> None:
        self._given = given
        self._keeper = keeper
        self._lock = threading.RLock()
        self._listeners: list[Listener] = []
        self.changes = self._told = 0
        self._wake: Callable[[], None] = lambda: None
        self._problem = ""
        self._version = keeper.version
        self._stored = dict(keeper.settings())
        self._models = dict(keeper.models())
        self.wanted = self.current = self._composed(self._stored)

    current: Settings
    """Every setting as it is in effect, frozen; another object after a change."""
    wanted: Settings
    """The same with what a restart will bring."""
    changes: int
    """How many changes there were so far, wherever they were made."""

    def origin(self, name: str) -> Origin:
        """Where the value of a setting comes from."""
        if name in self._given.model_fields_set:
            return "command line" if name in self._given.command_line else "environment"
        return "store" if name in self._stored else "default"

    def stored(self, name: str) -> Any:
        """The stored value as plain JSON, also where something else goes first; None: nothing is stored."""
        return self._stored.get(name)

    def save(self, name: str, value: Any, source: str, *, models: Collection[str] | None = None) -> None:
        """Keep one value, given as text or plain JSON; None forgets it."""
        self.change({name: value}, source, models=models)

    def unset(self, name: str, source: str = "") -> None:
        """Forget what is stored: the default is back."""
        self.change({name: None}, source)

    def change(self, changes: Mapping[str, Any], source: str, *, models: Collection[str] | None = None) -> None:
        """Keep all of these values or none. Raises `InvalidSetting` for an unknown name, a bad value or a conflict.

        `models` are those on this computer; None: nobody looked, and any name will do.
        """
        known = self.languages
        checked = {name: checked_value(name, value, known) for name, value in changes.items()}
        with self._lock:
            self.refresh()
            after = {name: value for name, value in {**self._stored, **checked}.items() if value is not None}
            aliases = {each.alias for each in self._models.values() if each.alias}
            names = None if models is None else frozenset({*models, *aliases})
            situation = Situation(self._composed(after), self._keeper.has_keys(), names)
            _refuse(find_conflict(situation, [each for each in CONFLICTS if set(each.names) & set(changes)]))
            self._keeper.change_settings(checked, source=source)
            self._read()

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
            self.refresh()
            model = checked_model({**self.model(model_id).given(), **changes})
            others = {each.alias for name, each in self._models.items() if name != model_id}
            if "alias" in changes and model.alias is not None and model.alias in {*others, *taken}:
                raise InvalidSetting(
                    f"alias: {model.alias} is the name of another model", parameter="alias", wording="alias"
                )
            self._keeper.save_model(model_id, model, source=source)
            self._read()
            return model

    def refresh(self) -> bool:
        """Look whether anybody stored something. Raises `StoreUnavailable`."""
        with self._lock:
            if self._keeper.version == self._version:
                return False
            return self._read()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` on the event loop after every change, while `watch` runs; the answer ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def watch(self, every_seconds: float = POLL_SECONDS) -> None:
        """Look for changes until cancelled; what is saved here is told at once."""
        woken, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        self._wake = wake
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every_seconds):
                        await woken.wait()
                woken.clear()
                await self._look()
                if self._told != self.changes:
                    self._told = self.changes
                    self._tell()
        finally:
            self._wake = lambda: None

    async def _look(self) -> None:
        """Whatever keeps it from looking is told once, and it looks again."""
        try:
            await asyncio.to_thread(self.refresh)
        except StoreUnavailable as error:
            problem = error.message
        except Exception as error:  # noqa: BLE001 - a watch that ended would leave every later change unfelt
            problem = repr(error)
        else:
            problem = ""
        if problem and problem != self._problem:
            logger.warning("the settings stay as they are: %s", problem)
        self._problem = problem

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            try:
                listener()
            except Exception:
                logger.exception("a change of the settings was not felt everywhere")

    def _read(self) -> bool:
        version = self._keeper.version
        stored, models = dict(self._keeper.settings()), dict(self._keeper.models())
        changed = (stored != self._stored) or (models != self._models)
        self._version, self._models = version, models
        if stored != self._stored:
            self._stored = stored
            self.wanted = self._composed(stored)
            at_start = {name: getattr(self.current, name) for name in Settings.model_fields if waits(name)}
            self.current = self.wanted.with_values(at_start)
        if changed:
            self.changes += 1
            self._wake()
        return bool(changed)

    def _composed(self, stored: Mapping[str, Any]) -> Settings:
        """What is stored under what is given; a stored value that means nothing (any more) is left out and told."""
        usable = {}
        for name, value in stored.items():
            try:
                check_setting(name, value)
            except (SettingsError, AttributeError) as error:
                logger.warning("the stored setting %s is left out: %s", name, error)
            else:
                usable[name] = value
        return self._given.over(usable)


def waits(name: str) -> bool:
    """Whether a setting is felt after a restart only."""
    return bool(property_of(name, "takes_effect") == "restart")


def checked_value(name: str, value: Any, known_languages: Collection[str]) -> Any:
    """A value to store, as plain JSON; None stays None. Raises `InvalidSetting`."""
    if name not in Settings.model_fields:
        raise InvalidSetting(f"there is no setting called {name[:60]}", parameter="name")
    if not property_of(name, "stored"):
        raise InvalidSetting(f"{name} comes from the environment only: set PACELINE_{name.upper()}", parameter=name)
    if value is None:
        return None
    try:
        checked = plain(check_setting(name, value))
    except SettingsError as error:
        message = f"{name}: {str(error).partition(': ')[2]}"
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
