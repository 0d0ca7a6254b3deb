"""Image, menu and notifications of the menu bar, from the state of a server. Nothing here has side effects.

An action is a word, followed by a space and the id for actions on a model: `unload demo-assistant`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.desktop.tray import Face, MenuEntry, TrayState
from app.i18n import Words

LINE = MenuEntry()
MOST_MODELS = 8
ENDING = frozenset({"stop", "quit_all"})
"""Actions that end the server."""


@dataclass(frozen=True, slots=True)
class Seen:
    """State known at one moment."""

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
    newer: str = ""
    """Newer available version, if the server checks for updates."""
    update_command: str = ""
    starts_at_login: bool = False
    doing: str = ""
    """Command of this menu that is running; empty if none is."""
    problem: str = ""
    """Error of the last action."""

    @property
    def loaded(self) -> Sequence[Mapping[str, Any]]:
        """Models in memory."""
        models: Sequence[Mapping[str, Any]] = self.state.get("models", ())
        return models

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Ids of quarantined models, which crashed the worker repeatedly."""
        return tuple(str(model["id"]) for model in self.state.get("quarantined", ()))

    @property
    def worker(self) -> Mapping[str, Any]:
        """State of the worker."""
        state: Mapping[str, Any] = self.state.get("worker", {})
        return state


def tray_state(seen: Seen) -> TrayState:
    """Return the state for the image; trouble takes precedence."""
    if seen.problem or seen.quarantined or seen.full_disk:
        return "trouble"
    if seen.doing or (seen.is_served and not seen.worker.get("ready", False)):
        return "starting"
    if not seen.is_served:
        return "stopped"
    return "busy" if seen.state.get("running") else "ready"


def face(seen: Seen, words: Words) -> Face:
    """Return what the menu bar shows."""
    state = tray_state(seen)
    speed = f"{seen.pace.get('tokens_per_second', 0):.0f}" if state == "busy" else ""
    headline = _headline(seen, state, speed, words)
    entries = (
        *(MenuEntry(text) for text in headline),
        *([MenuEntry(words("menu.update", version=seen.newer), "update")] if seen.newer else []),
        LINE,
        *(_of_running(seen, words) if seen.state else ()),
        *_of_server(seen, words),
        LINE,
        MenuEntry(words("menu.quit"), "quit"),
        *([MenuEntry(words("menu.quit_all"), "quit_all")] if seen.is_served else []),
    )
    return Face(state, speed, f"Paceline: {headline[0]}", entries)


def _headline(seen: Seen, state: TrayState, speed: str, words: Words) -> list[str]:
    if state == "trouble":
        return [text for text in (seen.problem, *_quarantines(seen.quarantined, words), _full(seen, words)) if text]
    if state == "busy":
        share = seen.pace.get("acceptance")
        if share is None:
            return [words("menu.busy", speed=speed)]
        return [words("menu.busy_accepted", speed=speed, share=f"{100 * share:.0f} %")]
    if state == "starting":
        return [words("menu.stopping" if seen.doing in ENDING else "menu.starting")]
    return [words("menu.ready" if state == "ready" else "menu.stopped")]


def _of_running(seen: Seen, words: Words) -> tuple[MenuEntry, ...]:
    """Return the entries that need a responding server."""
    there = {str(model["id"]) for model in seen.loaded}
    others = [name for name in seen.models if name not in there][:MOST_MODELS]
    load = MenuEntry(words("menu.load"), children=tuple(MenuEntry(name, f"load {name}") for name in others))
    memory = MenuEntry(words("menu.memory"), children=tuple(_of_model(model, words) for model in seen.loaded))
    return (
        memory,
        load,
        LINE,
        MenuEntry(words("menu.dashboard"), "dashboard"),
        MenuEntry(words("menu.chat"), "chat"),
        MenuEntry(words("menu.copy"), "copy"),
        MenuEntry(words("menu.copy_key"), "copy_key"),
        LINE,
    )


def _of_model(model: Mapping[str, Any], words: Words) -> MenuEntry:
    name, is_pinned = str(model["id"]), bool(model.get("pinned"))
    drafters = [MenuEntry(str(draft_id)) for draft_id in model.get("draft_ids", ())]
    pin = MenuEntry(words("menu.pin"), f"{'unpin' if is_pinned else 'pin'} {name}", is_checked=is_pinned)
    return MenuEntry(name, children=(*drafters, pin, MenuEntry(words("menu.unload"), f"unload {name}")))


def _of_server(seen: Seen, words: Words) -> tuple[MenuEntry, ...]:
    login = MenuEntry(words("menu.login"), "logout" if seen.starts_at_login else "login", seen.starts_at_login)
    if seen.doing:
        return (login,)
    if not seen.is_served:
        return (MenuEntry(words("menu.start"), "start"), login)
    return MenuEntry(words("menu.stop"), "stop"), MenuEntry(words("menu.restart"), "restart"), login


def _quarantines(names: Sequence[str], words: Words) -> list[str]:
    return [words("menu.quarantined", model=name) for name in names]


def _full(seen: Seen, words: Words) -> str:
    return words("menu.full_disk", folder=seen.full_disk) if seen.full_disk else ""


def news(before: Seen, now: Seen, words: Words) -> list[str]:
    """Return the texts of notifications: only for what is new and was not requested by the user."""
    texts = [now.problem] if now.problem and now.problem != before.problem else []
    texts += _quarantines([name for name in now.quarantined if name not in before.quarantined], words)
    if now.full_disk and not before.full_disk:
        texts.append(_full(now, words))
    if now.newer and now.newer != before.newer:
        texts.append(words("menu.newer", version=now.newer))
    if before.worker and now.worker.get("restarts", 0) > before.worker.get("restarts", 0):
        texts.append(words("menu.restarted", why=_why(now.worker.get("last_exit") or {}, words)))
    if before.is_served and not now.is_served and not before.doing and not now.doing:
        texts.append(words("menu.ended"))
    return texts


def _why(reason: Mapping[str, Any], words: Words) -> str:
    """Return a reason in the user's language; in English if there is no translation."""
    key = f"reason.{reason.get('reason_code', '')}"
    return words(key, **reason.get("reason_values", {})) if key in words.entries else str(reason.get("reason", ""))
