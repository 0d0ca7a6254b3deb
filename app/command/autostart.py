"""Start at login: a LaunchAgent on macOS, a user unit of systemd on Linux, for one home each.

The text of both is made by pure functions. The system starts the server again when it crashed, not when it was stopped:
`paceline stop` ends it in order, with exit code 0.
"""

import hashlib
import os
import plistlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.errors import CommandError
from app.core.safe_files import write_privately
from app.core.server_file import LOG_FOLDER, START_LOG
from app.settings import Settings

LABEL = "app.paceline.server"
THROTTLE_SECONDS = 10
STOP_MARGIN_SECONDS = 15
"""What the system waits beyond the time that requests get to finish."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
NAMES = frozenset({"HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "SSL_CERT_FILE", *PROXIES, *map(str.upper, PROXIES)})
"""What of a terminal's environment a server needs besides our own variables, to find models and the hub."""
LAUNCHCTL, SYSTEMCTL = "launchctl", "systemctl"


def steady_python(executable: Path) -> Path:
    """This installation's Python by a path that outlives its updates: Homebrew's own changes with each version."""
    parts = executable.parts
    if "Cellar" in parts[:-3]:
        place = parts.index("Cellar")
        linked = Path(*parts[:place], "opt", parts[place + 1], *parts[place + 3 :])
        if linked.exists():
            return linked
    return executable


def program() -> tuple[str, ...]:
    """The words that run this installation's `paceline`, from any folder: -P keeps an `app` there out of the way."""
    return (str(steady_python(Path(sys.executable))), "-P", "-m", "app.cli")


def usual_home(settings: Settings) -> bool:
    """Whether the home is the one that nobody has to name."""
    usual: Path = type(settings).model_fields["home"].default
    return settings.home == usual.expanduser()


@dataclass(frozen=True, slots=True)
class Agent:
    """The server of one home as the system starts it: `label` names it, the file `path` says how."""

    label: str
    path: Path
    is_launchd: bool
    log: Path

    @property
    def domain(self) -> str:
        """Where launchd keeps what belongs to this person's screen."""
        return f"gui/{os.getuid()}"

    def start(self) -> None:
        """Have the system start it now. Raises `CommandError`."""
        if self.is_launchd:
            _run(LAUNCHCTL, "bootstrap", self.domain, str(self.path), may_fail=True)  # where it knows it, it says so
            _run(LAUNCHCTL, "kickstart", f"{self.domain}/{self.label}")
        else:
            _run(SYSTEMCTL, "--user", "reset-failed", self.label, may_fail=True)
            _run(SYSTEMCTL, "--user", "start", self.label)

    def end(self) -> None:
        """Have the system leave it ended, until it is told to start it or the next login."""
        if self.is_launchd:
            _run(LAUNCHCTL, "bootout", f"{self.domain}/{self.label}", may_fail=True)
        else:
            _run(SYSTEMCTL, "--user", "stop", self.label, may_fail=True)

    def why_not(self) -> str:
        """Why the system does not run it; empty while it does."""
        if self.is_launchd:
            is_active = _run(LAUNCHCTL, "print", f"{self.domain}/{self.label}", may_fail=True) == 0
        else:
            is_active = _run(SYSTEMCTL, "--user", "is-failed", "--quiet", self.label, may_fail=True) != 0
        return "" if is_active else f"the system could not start it: `paceline logs`, or {self.log}, says why"


def agent_of(settings: Settings, *, is_mac: bool = sys.platform == "darwin") -> Agent:
    """The agent of a home, installed or not; homes of other places have names of their own."""
    own = "" if usual_home(settings) else "." + hashlib.sha256(os.fsencode(settings.home)).hexdigest()[:8]
    log = settings.home / LOG_FOLDER / START_LOG
    if is_mac:
        label = f"{LABEL}{own}"
        return Agent(label, Path.home() / "Library/LaunchAgents" / f"{label}.plist", is_launchd=True, log=log)
    name = f"paceline{own.replace('.', '-')}.service"
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user"
    return Agent(name, folder / name, is_launchd=False, log=log)


def installed(settings: Settings) -> Agent | None:
    """The agent of this home, if there is one."""
    agent = agent_of(settings)
    return agent if agent.path.is_file() else None


def environment_of(settings: Settings, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the server is to know of this terminal's environment: our settings, and how hub and cache are reached.

    Raises `CommandError` for a key: it would lie open in a file of the system.
    """
    if "PACELINE_API_KEY" in environment:
        advice = "make a key with `paceline keys create NAME`, run `paceline config set require_key true`, and unset it"
        raise CommandError(f"PACELINE_API_KEY is not written into a file that starts the server at login: {advice}")
    wanted = {name: value for name, value in environment.items() if name.startswith("PACELINE_") or name in NAMES}
    return wanted if usual_home(settings) else {**wanted, "PACELINE_HOME": str(settings.home)}


# --- macOS ------------------------------------------------------------------------------------------------------


def launch_agent(agent: Agent, settings: Settings, words: Sequence[str]) -> dict[str, Any]:
    """The property list, as launchd.plist(5) names its keys."""
    return {
        "Label": agent.label,
        "ProgramArguments": [*program(), "serve", *words],
        "EnvironmentVariables": environment_of(settings),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": THROTTLE_SECONDS,
        "ExitTimeOut": int(settings.drain_seconds) + STOP_MARGIN_SECONDS,
        "ProcessType": "Interactive",  # others get less of the processor
        "StandardOutPath": "/dev/null",  # the greeting may hold the code of the set-up
        "StandardErrorPath": str(agent.log),
    }


# --- Linux ------------------------------------------------------------------------------------------------------


def systemd_unit(agent: Agent, settings: Settings, words: Sequence[str]) -> str:
    """The unit, as systemd.service(5) and systemd.exec(5) name its settings."""
    environment = [f"Environment={_quoted(f'{name}={value}')}" for name, value in environment_of(settings).items()]
    lines = [
        "[Unit]",
        "Description=Paceline, local inference with speculative decoding",
        "StartLimitIntervalSec=300",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "ExecStart=" + " ".join(_quoted(word, is_command=True) for word in (*program(), "serve", *words)),
        *environment,
        "Restart=on-failure",
        f"RestartSec={THROTTLE_SECONDS}",
        "KillMode=mixed",
        f"TimeoutStopSec={int(settings.drain_seconds) + STOP_MARGIN_SECONDS}",
        "StandardOutput=null",
        f"StandardError=append:{_escaped(str(agent.log))}",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str, *, is_command: bool = False) -> str:
    """A word as systemd.syntax(7) reads it: specifiers and quotes escaped, for a command variables too."""
    text = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text.replace("$", "$$") if is_command else text}"'


# --- what the commands do ---------------------------------------------------------------------------------------


def written(settings: Settings, words: Sequence[str]) -> bytes:
    """What the file of a home's agent says. Raises `CommandError`."""
    agent = agent_of(settings)
    if agent.is_launchd:
        return plistlib.dumps(launch_agent(agent, settings, words))
    return systemd_unit(agent, settings, words).encode()


def install(settings: Settings, content: bytes) -> Agent:
    """Write the file and have the system read it and start the server. Raises `CommandError`."""
    agent = agent_of(settings)
    try:
        agent.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        agent.path.parent.mkdir(parents=True, exist_ok=True)
        write_privately(agent.path, content)  # a proxy's address may hold a password
    except OSError as error:
        raise CommandError(f"{agent.path} cannot be written: {error.strerror}") from None
    try:
        if agent.is_launchd:
            _run(LAUNCHCTL, "bootout", f"{agent.domain}/{agent.label}", may_fail=True)
            _run(LAUNCHCTL, "bootstrap", agent.domain, str(agent.path))
        else:
            _run(SYSTEMCTL, "--user", "daemon-reload")
            _run(SYSTEMCTL, "--user", "enable", agent.label)
            _run(SYSTEMCTL, "--user", "restart", agent.label)
    except CommandError:
        uninstall(settings)
        raise
    return agent


def uninstall(settings: Settings) -> bool:
    """The server ends, the system forgets it, the file goes. False where there was none. Raises `CommandError`."""
    agent = installed(settings)
    if agent is None:
        return False
    if agent.is_launchd:
        _run(LAUNCHCTL, "bootout", f"{agent.domain}/{agent.label}", may_fail=True)
    else:
        _run(SYSTEMCTL, "--user", "disable", "--now", agent.label, may_fail=True)
    try:
        agent.path.unlink(missing_ok=True)
        for wanted in agent.path.parent.glob(f"*.wants/{agent.label}"):
            wanted.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"{agent.path} cannot be removed: {error.strerror}") from None
    if not agent.is_launchd:
        _run(SYSTEMCTL, "--user", "daemon-reload", may_fail=True)
        _run(SYSTEMCTL, "--user", "reset-failed", agent.label, may_fail=True)
    return True


def _run(*words: str, may_fail: bool = False) -> int:
    """The exit code of a command of the system. Raises `CommandError` with what it said, unless it may fail."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - by name, our own words
    except FileNotFoundError:
        if may_fail:
            return 127
        advice = "start it with `paceline start` instead"
        raise CommandError(f"this system has no {words[0]}: {advice}") from None
    if done.returncode and not may_fail:
        said = " ".join((done.stderr or done.stdout).split())
        raise CommandError(f"`{' '.join(words)}` failed: {said or done.returncode}")
    return done.returncode
