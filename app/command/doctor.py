"""`doctor`: what is wrong on this computer, and what to do about it. It changes nothing and loads no model. It sends
nothing either, except for a query for a newer version if `check_updates` is on."""

import asyncio
import contextlib
import ctypes
import difflib
import errno
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

import httpx2
import psutil
from rich.table import Table
from rich.text import Text

from app import __version__
from app.command.config import open_settings
from app.command.listing import models_on_disk
from app.command.port import bind_error, port_owner
from app.command.server import target_server
from app.core.errors import CommandError, StoreUnavailable
from app.core.messages import Pressure
from app.core.setting_texts import bytes_text, local_url
from app.core.unit import DrafterSpecification, ModelSpecification
from app.machine import descriptors
from app.machine.host import chip_name, free_bytes, memory_pressure, sysctl_number, wired_limit_mb
from app.machine.installation import DISTRIBUTION, newer_version, this_installation
from app.machine.own_files import nearest_folder
from app.machine.server_file import read_server
from app.models.footprint import unit_footprint
from app.models.safe_files import folder_problem
from app.serving.awake import CAFFEINATE
from app.serving.live_settings import LiveSettings
from app.settings import Settings
from app.store.database import is_writable_by_others
from app.store.store import FILE_NAME, Store

Level = Literal["ok", "warn", "fail"]
COLOURS: Mapping[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
OLDEST_PYTHON = (3, 11)
OPENBLAS_LIBRARY, OPENBLAS_VARIABLE = "libopenblas.so.0", "PACELINE_OPENBLAS"
LOW_DISK_BYTES = 5_000_000_000
TOP_LEVEL_PACKAGE = "app"
FOLDER_PROBLEMS = {
    "": ("", ""),
    "missing": (" is missing", "connect its drive, or `paceline config set model_dirs` without it"),
    "forbidden": (
        " may not be read",
        "on a Mac allow it in System Settings → Privacy & Security → Files and Folders, else change its permissions",
    ),
}
"""End of the message about a folder, and the next action, for each problem that a folder can have."""
FIRST_ACCELERATED, WHOLE_MACOS = 5, (26, 2)
"""First generation of Apple's chips with neural accelerators in the GPU, and first macOS version that supports them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `action` is the next step for the user; empty if there is none."""

    check: str
    level: Level
    message: str
    action: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Run every check; stored settings apply where `settings` (command line and environment) set nothing."""
    checks: Sequence[Callable[[Settings], Iterator[Finding]]] = (
        check_installation,
        check_variables,
        check_python,
        check_platform,
        check_mlx,
        check_accelerators,
        check_openblas,
        check_package_owner,
        check_port,
        check_folders,
        check_models,
        check_store,
        check_disk,
        check_memory,
        check_memory_pressure,
        check_gpu_memory,
        check_open_files,
        check_sleep,
    )
    with contextlib.suppress(StoreUnavailable), open_settings(settings) as live:  # check_store reports it
        settings = live.current
    return [finding for check in checks for finding in check(settings)]


def check_installation(settings: Settings) -> Iterator[Finding]:
    """Report the version, how to update it, and, if `check_updates` is on, a newer version."""
    installation, newer = this_installation(), ""
    if settings.check_updates:
        with contextlib.suppress(OSError):
            newer = asyncio.run(newer_version(installation, __version__))
    update_note = f"; {newer} is available" if newer else ""
    message = f"{__version__}, {installation.kind}: {installation.path}{update_note}"
    yield Finding("paceline", "warn" if update_note else "ok", message, f"update: {installation.update}")


def check_variables(_settings: Settings, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check that every `PACELINE_*` variable is a setting: a mistyped `PACELINE_REQUIRE_KEYS` protects nothing."""
    known = {OPENBLAS_VARIABLE, *(f"PACELINE_{name.upper()}" for name in Settings.model_fields)}
    for name in sorted(filter(lambda name: name.startswith("PACELINE_"), environment.keys() - known)):
        similar = "".join(difflib.get_close_matches(name.removeprefix("PACELINE_").lower(), Settings.model_fields, 1))
        meant = f"set PACELINE_{similar.upper()} instead, if that is meant"
        action = meant if similar else "docs/settings.md lists all; unset this one"
        yield Finding("variables", "warn", f"{name} is not a setting and has no effect", action)


def check_python(_settings: Settings) -> Iterator[Finding]:
    """Check for Python 3.11 or newer."""
    version = platform.python_version()
    if sys.version_info[:2] >= OLDEST_PYTHON:
        yield Finding("python", "ok", version)
    else:
        yield Finding("python", "fail", f"{version} is too old", "install Python 3.11 or newer: make PYTHON=python3.11")


def check_platform(_settings: Settings) -> Iterator[Finding]:
    """Check for Apple silicon, or Linux for development."""
    system, machine = platform.system(), platform.machine()
    if system == "Darwin" and machine == "arm64":
        yield Finding("platform", "ok", f"macOS {platform.mac_ver()[0]} on {machine}, {chip_name()}")
    elif system == "Linux":
        message = f"Linux {platform.release()} on {machine}, {chip_name()}, computing on the CPU"
        yield Finding("platform", "ok", message)
    elif sysctl_number("sysctl.proc_translated"):
        action = "install one for arm64 (python.org or Homebrew), delete .venv and run `make serve`"
        yield Finding("platform", "fail", "this Python is an Intel build and runs under Rosetta", action)
    else:
        yield Finding("platform", "fail", f"{system} on {machine} has no mlx", "use a Mac with Apple silicon, or Linux")


def check_mlx(_settings: Settings) -> Iterator[Finding]:
    """Check that mlx and mlx-lm are installed, without importing them."""
    try:
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    except metadata.PackageNotFoundError as error:
        yield Finding("mlx", "fail", f"{error.name} is not installed", "run `make serve`, which installs it")
    else:
        yield Finding("mlx", "ok", versions)


def check_accelerators(_settings: Settings) -> Iterator[Finding]:
    """Check that mlx uses the neural accelerators of an M5 or later chip, and that this macOS supports them."""
    with contextlib.suppress(metadata.PackageNotFoundError, OSError):
        wheel = metadata.distribution("mlx-metal").read_text("WHEEL") or ""
        macos = subprocess.run(["sw_vers", "-productVersion"], capture_output=True, text=True, check=False).stdout  # noqa: S607
        if finding := accelerator_finding(chip_name(), macos.strip(), wheel):
            yield finding


def accelerator_finding(chip: str, macos: str, wheel: str) -> Finding | None:
    """Return the finding for a chip's name, a macOS version as `sw_vers` prints it, and the text of mlx-metal's WHEEL
    file. Only wheels for macOS 26 contain the kernels, and these need macOS 26.2 or later (mlx issue 4525)."""
    generation = re.match(r"Apple M(\d+)", chip)
    if generation is None or int(generation[1]) < FIRST_ACCELERATED:
        return None
    if "macosx_26" not in wheel:
        action = "use a newer Python (python.org or Homebrew, made for macOS 26), delete .venv and run `make serve`"
        return Finding("accelerators", "warn", "mlx does not use this chip's neural accelerators", action)
    if tuple(map(int, macos.split(".")[:2])) < WHOLE_MACOS:
        return Finding("accelerators", "warn", f"macOS {macos} lacks kernels that mlx calls here", "update macOS")
    return Finding("accelerators", "ok", "mlx uses this chip's neural accelerators")


def check_openblas(_settings: Settings) -> Iterator[Finding]:
    """Check for OpenBLAS on Linux, where mlx computes about 30 times faster with it."""
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL(OPENBLAS_LIBRARY)
    except OSError:
        yield Finding(
            "openblas",
            "warn",
            f"{OPENBLAS_LIBRARY} is not installed: inference on the CPU is about 30 times slower",
            "install it (Debian: libopenblas0-pthread)",
        )
    else:
        yield Finding("openblas", "ok", OPENBLAS_LIBRARY)


def check_package_owner(_settings: Settings, owners: Mapping[str, Sequence[str]] | None = None) -> Iterator[Finding]:
    """Check that no other distribution provides a package `app`, which would shadow ours."""
    owners = metadata.packages_distributions() if owners is None else owners
    others = sorted(set(owners.get(TOP_LEVEL_PACKAGE, ())) - {DISTRIBUTION})
    if others:
        names = ", ".join(others)
        yield Finding(
            "package",
            "fail",
            f"{names} also provides a package named `{TOP_LEVEL_PACKAGE}`; one shadows the other",
            f"install Paceline in its own environment, without {names}",
        )
    else:
        yield Finding("package", "ok", f"no other package provides `{TOP_LEVEL_PACKAGE}`")


def check_port(settings: Settings, answer_seconds: float = 2.0) -> Iterator[Finding]:
    """Check that the server of this home answers, whatever its address; if none answers, that the port is free."""
    if (server := read_server(settings.home)) is not None:
        settings = settings.with_command_line(host=server.host, port=server.port)
    address = local_url(settings.host, settings.port)
    try:
        answer = httpx2.get(f"{address}/health/ready", timeout=answer_seconds, trust_env=False)
    except httpx2.TransportError:
        yield _unanswered_port(settings)
        return
    if answer.status_code == httpx2.codes.OK:
        yield Finding("server", "ok", f"ready at {address}")
    elif answer.status_code == httpx2.codes.SERVICE_UNAVAILABLE:
        yield Finding("server", "warn", f"at {address}, not ready: its worker is starting", "try again in ten seconds")
    else:
        yield _occupied_port(settings)


def _unanswered_port(settings: Settings) -> Finding:
    error = bind_error(settings.host, settings.port)
    if error is None:
        return Finding("server", "ok", f"not running; port {settings.port} is free", "start it with `paceline serve`")
    if error.errno == errno.EADDRINUSE:
        return _occupied_port(settings)
    message = f"{settings.host}:{settings.port} cannot be used ({error.strerror})"
    return Finding("server", "fail", message, "choose another PACELINE_HOST or PACELINE_PORT")


def _occupied_port(settings: Settings) -> Finding:
    name, pid = port_owner(settings.port)
    return Finding(
        "server",
        "fail",
        f"port {settings.port} is used by {f'{name} (process {pid})' if pid else 'a program of another user'}",
        "stop that program, or choose another port: `paceline serve --port 8711`",
    )


def check_folders(settings: Settings) -> Iterator[Finding]:
    """Check that this process and a running server can read every configured folder. A missing one is only a warning,
    because the server works without it."""
    for folder, problem in folder_problems(settings).items():
        message, action = FOLDER_PROBLEMS[problem]
        yield Finding("folder", "warn" if problem else "ok", f"{folder}{message}", action)


def folder_problems(settings: Settings) -> dict[str, str]:
    """Return the problem of each configured folder, or "". macOS may let a terminal read a folder, but not a server."""
    problems = {str(folder): folder_problem(folder) for folder in settings.model_dirs}
    with contextlib.suppress(CommandError):
        rows = target_server(settings).call("GET", "/admin/api/models").get("folders", ())
        served = {row["folder"]: row["problem"] for row in rows if isinstance(row, dict)}  # old servers send strings
        problems = {folder: problem or served.get(folder, "") for folder, problem in problems.items()}
    return problems


def check_models(settings: Settings) -> Iterator[Finding]:
    """Check that at least one model is usable; name each broken model with its reason."""
    rows = models_on_disk(LiveSettings(settings))
    usable = [row for row in rows if row.kind in {"main", "encoder"} and not row.problem]
    if usable:
        paired = sum(1 for row in usable if row.draft)
        yield Finding("models", "ok", f"{len(usable)} usable, {paired} with a drafter")
    else:
        yield Finding("models", "fail", "no usable model", "add one to a folder in PACELINE_MODEL_DIRS")
    for row in rows:
        if row.problem:
            yield Finding("model", "warn", row.problem, "the other models are not affected")


def check_store(settings: Settings) -> Iterator[Finding]:
    """Check that the store can be read, and that no other user may change it."""
    store = Store(settings.home / FILE_NAME)
    try:
        store.check()
    except StoreUnavailable as error:
        reason, _, action = str(error).rpartition(": ")
        yield Finding("store", "fail", reason, action)
    else:
        yield Finding("store", "ok", str(store.path) if store.exists else "nothing stored yet")
        if is_writable_by_others(settings.home):
            action = f"run `chmod 700 {shlex.quote(str(settings.home))}`; `paceline serve` does this too"
            yield Finding("store", "warn", f"other users can write to {settings.home}", action)
    store.close()


def check_disk(settings: Settings) -> Iterator[Finding]:
    """Check that the disk of the home has room for the state and for downloads."""
    folder, free = nearest_folder(settings.home), free_bytes(settings.home)
    if free is None:
        yield Finding("disk", "warn", f"the free space at {folder} cannot be read", "check that its disk is mounted")
    elif free < LOW_DISK_BYTES:
        yield Finding("disk", "warn", f"{bytes_text(free)} free at {folder}", "free some space before a download")
    else:
        yield Finding("disk", "ok", f"{bytes_text(free)} free at {folder}")


def check_memory(settings: Settings) -> Iterator[Finding]:
    """Check that the ceiling for models fits into the computer's memory."""
    total = psutil.virtual_memory().total
    limit = settings.memory_limit
    if limit is None:
        yield Finding("memory", "ok", f"{bytes_text(total)}; part of it stays reserved for the system")
    elif limit > total:
        message = f"PACELINE_MEMORY_LIMIT is {bytes_text(limit)}, the computer has {bytes_text(total)}"
        yield Finding("memory", "warn", message, "lower it, or unset it to derive it from the machine")
    else:
        yield Finding("memory", "ok", f"models may use {bytes_text(limit)} of {bytes_text(total)}")


def check_memory_pressure(
    _settings: Settings, read_pressure: Callable[[], Pressure] = memory_pressure
) -> Iterator[Finding]:
    """Check that the system is not short of memory. If it is, the server frees caches, and requests may wait."""
    pressure = read_pressure()
    if pressure == "normal":
        yield Finding("pressure", "ok", "the system has memory left")
    else:
        message = f"the system is short of memory ({pressure}): cached prompts and idle models are evicted"
        yield Finding("pressure", "warn", message, "close other programs, or lower PACELINE_MEMORY_LIMIT")


def check_gpu_memory(settings: Settings) -> Iterator[Finding]:
    """Check on a Mac that the memory limit of the GPU is large enough for each model on disk."""
    if platform.system() == "Darwin" and (recommended := metal_bytes()):
        needs = needed_by_models(LiveSettings(settings))
        yield gpu_memory_finding(psutil.virtual_memory().total, recommended, needs)


def gpu_memory_finding(total_bytes: int, recommended_bytes: int, needs_bytes: Mapping[str, int]) -> Finding:
    """Return the finding for a Mac whose GPU may use `recommended_bytes`, and models that need `needs_bytes`."""
    holds = f"the GPU may use {bytes_text(recommended_bytes)} of {bytes_text(total_bytes)}"
    limit = wired_limit_mb(total_bytes, recommended_bytes, needs_bytes.values())
    if not limit:
        return Finding("gpu", "ok", holds)
    too_large = (need for need in needs_bytes.items() if wired_limit_mb(total_bytes, recommended_bytes, need[1:]))
    names = ", ".join(f"{name} ({bytes_text(needed)})" for name, needed in too_large)
    action = f"run `sudo sysctl iogpu.wired_limit_mb={limit}`, which lasts until the Mac restarts"
    return Finding("gpu", "warn", f"{holds}: too little for {names}", action)


def metal_bytes() -> int:
    """Return the memory limit of the GPU in bytes, or 0. A child process asks mlx, because nothing here imports it."""
    program = "import mlx.core as mx; print(mx.device_info().get('max_recommended_working_set_size', 0))"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)  # noqa: S603
    return int(completed.stdout) if completed.returncode == 0 else 0


def needed_by_models(live: LiveSettings) -> dict[str, int]:
    """Return the GPU memory that each usable main model needs with its drafters, in bytes."""
    rows = [row for row in models_on_disk(live) if not row.problem]
    paths = {row.id: row.path for row in rows}
    needs = {}
    for row in rows:
        drafts = tuple(DrafterSpecification(draft["id"], paths[draft["id"]], draft["method"]) for draft in row.drafts)
        if row.kind == "main":
            unit = ModelSpecification(id=row.id, path=row.path, drafters=drafts)
            needs[row.id] = unit_footprint(unit, widen=False).total_bytes
    return needs


def check_open_files(_settings: Settings, attainable: int | None = None) -> Iterator[Finding]:
    """Check that a server, which raises its own limit, can have `WANTED_FILES` files and connections open."""
    attainable = descriptors.attainable() if attainable is None else attainable
    message = f"a server may open {attainable} (this shell: {descriptors.limit()})"
    if attainable < descriptors.WANTED_FILES:
        action = f"for more connections at once raise the hard limit: `ulimit -Hn {descriptors.WANTED_FILES}` as root"
        yield Finding("open files", "warn", message, action)
    else:
        yield Finding("open files", "ok", message)


def check_sleep(settings: Settings, *, is_mac: bool = platform.system() == "Darwin") -> Iterator[Finding]:
    """Check that a Mac does not go to sleep while requests run."""
    if not is_mac:
        return
    if not settings.prevent_sleep:
        yield Finding("sleep", "ok", "the Mac may go to sleep while requests run: PACELINE_PREVENT_SLEEP is off")
    elif (program := shutil.which(CAFFEINATE)) is None:
        action = f"put macOS's own {CAFFEINATE} back on the PATH: /usr/bin"
        yield Finding("sleep", "warn", f"{CAFFEINATE} is not found: the Mac may go to sleep while requests run", action)
    else:
        yield Finding("sleep", "ok", f"while requests run {program} keeps the Mac awake")


def start_findings(settings: Settings) -> list[Finding]:
    """Return the warnings for the start of a server: variables without effect, and reasons why every model is slow."""
    findings = [*check_variables(settings), *check_accelerators(settings), *check_openblas(settings)]
    return [finding for finding in findings if finding.level == "warn"]


def has_failed(findings: Sequence[Finding]) -> bool:
    """Return whether any finding keeps Paceline from working."""
    return any(finding.level == "fail" for finding in findings)


def findings_as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the report of `doctor --json`."""
    return {"ok": not has_failed(findings), "findings": [asdict(finding) for finding in findings]}


def findings_table(findings: Sequence[Finding]) -> Table:
    """Build the report for people."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.message)
        if finding.action:
            text.append(f"\n→ {finding.action}", style="bold" if finding.level != "ok" else "dim")
        table.add_row(Text(finding.level, style=COLOURS[finding.level]), finding.check, text)
    return table
