"""Image, menu and notifications of the menu bar, from the state of a server. Nothing here has side effects.

An action is a verb; some take one argument after a space: `unload demo-assistant`, `port 8711`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.desktop.tray import MenuEntry, TrayContent, TrayState
from app.i18n.catalogs import Words

SEPARATOR = MenuEntry()
MAX_MODELS = 8
SHUTDOWN_ACTIONS = frozenset({"stop", "quit_all"})
"""Actions that end the server."""
REQUESTED_EXITS = frozenset({"exit_restarted", "exit_stopped"})
"""Codes of the reasons why a worker ended that the user asked for."""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """State of the server and of the menu bar at one moment."""

    is_served: bool = False
    """Whether a server of this home is running, starting or ending."""
    address: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)
    """`state` of `GET /admin/api/menu`; empty while no server answers."""
    pace: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    """Main models on disk, the most recently used first."""
    full_disk: str = ""
    """One of Paceline's folders that is on a full disk; empty if none is."""
    newer_version: str = ""
    """Newer available version, if the server checks for updates."""
    update_command: str = ""
    starts_at_login: bool = False
    running_command: str = ""
    """Action whose command is running; empty if none is."""
    problem: str = ""
    """Error of the last action."""
    free_port: int = 0
    """Free port to offer if another program uses ours; 0 if our port is not the problem."""

    @property
    def loaded(self) -> Sequence[Mapping[str, Any]]:
        """Models in memory."""
        models: Sequence[Mapping[str, Any]] = self.state.get("models", ())
        return models

    @property
    def loading(self) -> tuple[str, ...]:
        """Ids of the models that are being loaded."""
        return tuple(str(model["id"]) for model in self.state.get("loading", ()))

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Ids of quarantined models, which crashed the worker repeatedly."""
        return tuple(str(model["id"]) for model in self.state.get("quarantined", ()))

    @property
    def worker(self) -> Mapping[str, Any]:
        """State of the worker."""
        state: Mapping[str, Any] = self.state.get("worker", {})
        return state


def tray_state(service: ServiceState) -> TrayState:
    """Return the state for the image; trouble takes precedence."""
    if service.problem or service.quarantined or service.full_disk:
        return "trouble"
    if service.running_command or (service.is_served and not service.worker.get("ready", False)):
        return "starting"
    if not service.is_served:
        return "stopped"
    if service.state.get("running"):
        return "busy"
    return "starting" if service.loading else "ready"


def tray_content(service: ServiceState, words: Words) -> TrayContent:
    """Return the content of the menu bar: image, text, tooltip and menu."""
    state = tray_state(service)
    speed = f"{service.pace.get('tokens_per_second', 0):.0f}" if state == "busy" else ""
    headline = _headline(service, state, speed, words)
    entries = (
        *(MenuEntry(text) for text in headline),
        *([MenuEntry(words("menu.update", version=service.newer_version), "update")] if service.newer_version else []),
        SEPARATOR,
        *(_running_entries(service, words) if service.state else ()),
        *_server_entries(service, words),
        SEPARATOR,
        MenuEntry(words("menu.quit"), "quit"),
        *([MenuEntry(words("menu.quit_all"), "quit_all")] if service.is_served else []),
    )
    return TrayContent(state, speed, f"Paceline: {headline[0]}", entries)


def _headline(service: ServiceState, state: TrayState, speed: str, words: Words) -> list[str]:
    if state == "trouble":
        texts = (service.problem, *_quarantine_texts(service.quarantined, words), _full_disk_text(service, words))
        return [text for text in texts if text]
    if state == "busy":
        share = service.pace.get("acceptance")
        if share is None:
            return [words("menu.busy", speed=speed)]
        return [words("menu.busy_accepted", speed=speed, share=f"{share:.0%}")]
    if state == "starting" and service.loading and not service.running_command:
        return [words("menu.loading", model=name) for name in service.loading]
    if state == "starting":
        return [words("menu.stopping" if service.running_command in SHUTDOWN_ACTIONS else "menu.starting")]
    return [words("menu.ready" if state == "ready" else "menu.stopped")]


def _running_entries(service: ServiceState, words: Words) -> tuple[MenuEntry, ...]:
    """Return the entries that need a responding server."""
    loaded_ids = {str(model["id"]) for model in service.loaded}
    others = [name for name in service.models if name not in loaded_ids][:MAX_MODELS]
    load = MenuEntry(words("menu.load"), children=tuple(MenuEntry(name, f"load {name}") for name in others))
    memory = MenuEntry(words("menu.memory"), children=tuple(_model_entry(model, words) for model in service.loaded))
    return (
        memory,
        load,
        SEPARATOR,
        MenuEntry(words("menu.dashboard"), "dashboard"),
        MenuEntry(words("menu.chat"), "chat"),
        MenuEntry(words("menu.copy"), "copy"),
        MenuEntry(words("menu.copy_key"), "copy_key"),
        SEPARATOR,
    )


def _model_entry(model: Mapping[str, Any], words: Words) -> MenuEntry:
    name, is_pinned = str(model["id"]), bool(model.get("pinned"))
    drafters = [MenuEntry(str(draft_id)) for draft_id in model.get("draft_ids", ())]
    pin = MenuEntry(words("menu.pin"), f"{'unpin' if is_pinned else 'pin'} {name}", is_checked=is_pinned)
    return MenuEntry(name, children=(*drafters, pin, MenuEntry(words("menu.unload"), f"unload {name}")))


def _server_entries(service: ServiceState, words: Words) -> tuple[MenuEntry, ...]:
    login = MenuEntry(words("menu.login"), "logout" if service.starts_at_login else "login", service.starts_at_login)
    if service.running_command:
        return (login,)
    if service.is_served:
        return MenuEntry(words("menu.stop"), "stop"), MenuEntry(words("menu.restart"), "restart"), login
    port = service.free_port
    other_port = [MenuEntry(words("menu.other_port", port=port), f"port {port}")] if port else []
    return *other_port, MenuEntry(words("menu.try_again" if port else "menu.start"), "start"), login


def _quarantine_texts(names: Sequence[str], words: Words) -> list[str]:
    return [words("menu.quarantined", model=name) for name in names]


def _full_disk_text(service: ServiceState, words: Words) -> str:
    return words("menu.full_disk", folder=service.full_disk) if service.full_disk else ""


def notifications(old: ServiceState, new: ServiceState, words: Words) -> list[str]:
    """Return the texts of notifications: only for changes that the user did not request."""
    texts = [new.problem] if new.problem and new.problem != old.problem else []
    texts += _quarantine_texts([name for name in new.quarantined if name not in old.quarantined], words)
    if new.full_disk and not old.full_disk:
        texts.append(_full_disk_text(new, words))
    if new.newer_version and new.newer_version != old.newer_version:
        texts.append(words("menu.newer", version=new.newer_version))
    last_exit = new.worker.get("last_exit") or {}
    has_restarted = old.worker and new.worker.get("restarts", 0) > old.worker.get("restarts", 0)
    if has_restarted and last_exit.get("reason_code") not in REQUESTED_EXITS:
        texts.append(words("menu.restarted", why=_reason_text(last_exit, words)))
    if old.is_served and not new.is_served and not old.running_command and not new.running_command:
        texts.append(words("menu.ended"))
    return texts


def _reason_text(reason: Mapping[str, Any], words: Words) -> str:
    """Return a reason in the user's language, or in English if there is no translation."""
    key, values = f"reason.{reason.get('reason_code', '')}", dict(reason.get("reason_values", {}))
    if "seconds" in values:
        values["seconds"] = words("menu.seconds", count=f"{values['seconds']:.0f}")
    return words(key, **values) if key in words.entries else str(reason.get("reason", ""))
