"""Start at login: a LaunchAgent on macOS or a systemd user unit on Linux, one for each home.

Functions without side effects build the content of both. The system restarts the server after a crash, but not after
`paceline stop`, because the server then exits with code 0.
"""

import hashlib
import os
import plistlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.errors import CommandError
from app.machine.own_files import write_privately
from app.machine.server_file import LOG_FOLDER, SERVICE_LABEL, START_LOG
from app.settings import Settings

THROTTLE_SECONDS = 10
STOP_MARGIN_SECONDS = 15
"""Time that the system waits for the server to end, beyond `drain_seconds`, in seconds."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
FORWARDED_VARIABLES = frozenset(
    {
        *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_ENDPOINT", "SSL_CERT_FILE"),
        *PROXIES,
        *map(str.upper, PROXIES),
    }
)
"""Environment variables that a server needs besides our own, to find models and the hub."""
LAUNCHCTL, SYSTEMCTL = "launchctl", "systemctl"
APP_IDENTIFIER = "app.paceline.Paceline"
BOOTSTRAP_TRIES, BOOTSTRAP_SECONDS = 4, 1.0
"""Number of attempts to load an agent, and seconds between them: launchd refuses until an earlier agent has ended."""


def stable_python(executable: Path) -> Path:
    """Return a path of this Python that stays valid after updates: a path in Homebrew's Cellar contains the version."""
    parts = executable.parts
    if "Cellar" in parts[:-3]:
        index = parts.index("Cellar")
        linked = Path(*parts[:index], "opt", parts[index + 1], *parts[index + 3 :])
        if linked.exists():
            return linked
    return executable


def program() -> tuple[str, ...]:
    """Return the command of this installation's `paceline`; -P ignores an `app` package in the current folder."""
    return (str(stable_python(Path(sys.executable))), "-P", "-m", "app.cli")


def is_default_home(settings: Settings) -> bool:
    """Return whether the home is the default one."""
    usual: Path = type(settings).model_fields["home"].default
    return settings.home == usual.expanduser()


@dataclass(frozen=True, slots=True)
class Agent:
    """The server of one home as a service of the system: `label` names it, the file `path` defines it."""

    label: str
    path: Path
    is_launchd: bool
    log: Path

    @property
    def domain(self) -> str:
        """Domain of this user in launchd: `gui` during a graphical session, else `user`."""
        has_screen = _run(LAUNCHCTL, "print", f"gui/{os.getuid()}", may_fail=True) == 0
        return f"{'gui' if has_screen else 'user'}/{os.getuid()}"

    @property
    def target(self) -> str:
        """Name of the agent in launchd, with its domain."""
        return f"{self.domain}/{self.label}"

    def start(self) -> None:
        """Have the system start the server now. Raises `CommandError`."""
        if self.is_launchd:
            _run(LAUNCHCTL, "bootstrap", self.domain, str(self.path), may_fail=True)  # fails if it is loaded already
            _run(LAUNCHCTL, "kickstart", self.target)
        else:
            _run(SYSTEMCTL, "--user", "reset-failed", self.label, may_fail=True)
            _run(SYSTEMCTL, "--user", "start", self.label)

    def end(self) -> None:
        """Have the system stop the server, until the next start or login."""
        if self.is_launchd:
            _run(LAUNCHCTL, "bootout", self.target, may_fail=True)
        else:
            _run(SYSTEMCTL, "--user", "stop", self.label, may_fail=True)

    def failure_reason(self) -> str:
        """Return why the system does not run the agent; empty while it runs."""
        if self.is_launchd:
            is_active = _run(LAUNCHCTL, "print", self.target, may_fail=True) == 0
        else:
            is_active = _run(SYSTEMCTL, "--user", "is-failed", "--quiet", self.label, may_fail=True) != 0
        return "" if is_active else f"the system could not start it: `paceline logs`, or {self.log}, says why"


def agent_of(settings: Settings, *, is_mac: bool = sys.platform == "darwin") -> Agent:
    """Return the agent of a home, installed or not; homes other than the default have names of their own."""
    suffix = "" if is_default_home(settings) else "." + hashlib.sha256(os.fsencode(settings.home)).hexdigest()[:8]
    log = settings.home / LOG_FOLDER / START_LOG
    if is_mac:
        label = f"{SERVICE_LABEL}{suffix}"
        return Agent(label, Path.home() / "Library/LaunchAgents" / f"{label}.plist", is_launchd=True, log=log)
    name = f"paceline{suffix.replace('.', '-')}.service"
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user"
    return Agent(name, folder / name, is_launchd=False, log=log)


def installed_agent(settings: Settings) -> Agent | None:
    """Return the agent of this home if it is installed, else None."""
    agent = agent_of(settings)
    return agent if agent.path.is_file() else None


def environment_of(settings: Settings, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that the agent must pass on: our settings, and those for hub and proxies.

    Raises `CommandError` for an API key, because the file would contain the key in plain text.
    """
    if "PACELINE_API_KEY" in environment:
        advice = "make a key with `paceline keys create NAME`, run `paceline config set require_key true`, and unset it"
        raise CommandError(f"PACELINE_API_KEY is not written into a file that starts the server: {advice}")
    wanted = {
        name: value
        for name, value in environment.items()
        if name.startswith("PACELINE_") or name in FORWARDED_VARIABLES
    }
    return wanted if is_default_home(settings) else {**wanted, "PACELINE_HOME": str(settings.home)}


# --- macOS ------------------------------------------------------------------------------------------------------


def launch_agent(agent: Agent, settings: Settings, arguments: Sequence[str]) -> dict[str, Any]:
    """Build the property list, with the keys of launchd.plist(5)."""
    return {
        "Label": agent.label,
        "ProgramArguments": [*program(), "serve", *arguments],
        "EnvironmentVariables": environment_of(settings),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": THROTTLE_SECONDS,
        "ExitTimeOut": int(settings.drain_seconds) + STOP_MARGIN_SECONDS,
        "ProcessType": "Interactive",  # other types get less CPU time
        "LimitLoadToSessionType": ["Aqua", "Background"],  # "Background" is a login over ssh
        "AssociatedBundleIdentifiers": APP_IDENTIFIER,  # the app that macOS names in its list of background items
        "StandardOutPath": "/dev/null",  # the greeting may contain the set-up code
        "StandardErrorPath": str(agent.log),
    }


# --- Linux ------------------------------------------------------------------------------------------------------


def systemd_unit(agent: Agent, settings: Settings, arguments: Sequence[str]) -> str:
    """Build the unit, with the settings of systemd.service(5) and systemd.exec(5)."""
    environment = [f"Environment={_quoted(f'{name}={value}')}" for name, value in environment_of(settings).items()]
    lines = [
        "[Unit]",
        "Description=Paceline, local inference with speculative decoding",
        "StartLimitIntervalSec=300",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "ExecStart=" + " ".join(_quoted(word, is_command=True) for word in (*program(), "serve", *arguments)),
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
    """Quote a word for systemd.syntax(7): escape specifiers and quotes, and in a command also variables."""
    text = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text.replace("$", "$$") if is_command else text}"'


# --- commands ---------------------------------------------------------------------------------------------------


def agent_file_content(settings: Settings, arguments: Sequence[str]) -> bytes:
    """Build the content of the file that defines the home's agent. Raises `CommandError`."""
    agent = agent_of(settings)
    if agent.is_launchd:
        return plistlib.dumps(launch_agent(agent, settings, arguments))
    return systemd_unit(agent, settings, arguments).encode()


def install(settings: Settings, content: bytes) -> Agent:
    """Write the file and have the system read it and start the server. Raises `CommandError`."""
    agent = agent_of(settings)
    try:
        agent.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        agent.path.parent.mkdir(parents=True, exist_ok=True)
        write_privately(agent.path, content)  # a proxy's address may contain a password
    except OSError as error:
        raise CommandError(f"{agent.path} cannot be written: {error.strerror}") from None
    try:
        if agent.is_launchd:
            _bootstrap(agent)
        else:
            _run(SYSTEMCTL, "--user", "daemon-reload")
            _run(SYSTEMCTL, "--user", "enable", agent.label)
            _run(SYSTEMCTL, "--user", "restart", agent.label)
    except CommandError:
        uninstall(settings)
        raise
    return agent


def _bootstrap(agent: Agent) -> None:
    """Have launchd load the agent in place of an earlier one. Raises `CommandError`."""
    agent.end()
    _run(LAUNCHCTL, "enable", agent.target, may_fail=True)  # it may have been disabled
    for _ in range(BOOTSTRAP_TRIES - 1):
        if _run(LAUNCHCTL, "bootstrap", agent.domain, str(agent.path), may_fail=True) == 0:
            return
        time.sleep(BOOTSTRAP_SECONDS)
    _run(LAUNCHCTL, "bootstrap", agent.domain, str(agent.path))


def uninstall(settings: Settings) -> bool:
    """Stop the server, unregister its agent and delete the file; return False if none exists. Raises `CommandError`."""
    agent = installed_agent(settings)
    if agent is None:
        return False
    if agent.is_launchd:
        agent.end()
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


def _run(*command: str, may_fail: bool = False) -> int:
    """Run a system command and return its exit code. Raises `CommandError` with its output, unless it may fail."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed program
    except FileNotFoundError:
        if may_fail:
            return 127
        advice = "start it with `paceline start` instead"
        raise CommandError(f"this system has no {command[0]}: {advice}") from None
    if completed.returncode and not may_fail:
        output = " ".join((completed.stderr or completed.stdout).split())
        raise CommandError(f"`{' '.join(command)}` failed: {output or completed.returncode}")
    return completed.returncode
