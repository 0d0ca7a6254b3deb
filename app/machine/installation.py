"""Identifies the installer of this copy of Paceline, which also updates and removes it.

It is identified by files: those that an installer writes next to the package (PEP 610, PEP 376), and those that uv,
pipx and Homebrew put into their environments. Available versions are queried through the installer, because only it
knows the index, the proxy and the certificates that an update would use.
"""

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "paceline"
Kind = Literal["checkout", "Homebrew", "uv tool", "pipx", "uv", "pip"]
DRY_RUN = ("install", "--dry-run", "--no-deps", "--upgrade", DISTRIBUTION)
DRY_RUN_VERSION = rf"^(?: \+ {DISTRIBUTION}==|Would install {DISTRIBUTION}-)(\S+)"
PIP_INDEX_VERSION = rf"^{DISTRIBUTION} \((\S+)\)"
HOMEBREW_VERSION = r'"current_version": *"([^"_]+)'
GIT_TAG_VERSION = r"refs/tags/v(\d+(?:\.\d+)*)$"
"""Arguments of a dry run by uv or pipx, and patterns of an available version in the output of each installer."""
QUERY_SECONDS = 60.0
INSTALLER_FOLDERS = ("~/.local/bin", "/opt/homebrew/bin", "/usr/local/bin")
"""Folders to search for installers after PATH, which is short for a server that the system started."""
NON_INTERACTIVE = {"GIT_TERMINAL_PROMPT": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
"""Variables that keep installers from asking questions: there is no terminal."""


@dataclass(frozen=True, slots=True)
class Installation:
    """One installation. `update` and `remove` are shell commands; `path` is the checkout, or the environment.

    `query_command` lists the available versions, `version_pattern` matches each in its output.
    """

    kind: Kind
    path: Path
    update: str
    remove: str
    query_command: tuple[str, ...]
    version_pattern: str

    @property
    def desktop(self) -> str:
        """Command that installs the extra `desktop`."""
        extra = f"'{DISTRIBUTION}[desktop]'"
        if self.kind == "checkout":
            return f"make -C {shlex.quote(str(self.path))} desktop"
        if self.kind == "Homebrew":
            return f"brew reinstall {DISTRIBUTION}"
        if self.kind in {"uv tool", "pipx"}:
            return f"{self.kind} install --force {extra}"
        return self.update.removesuffix(DISTRIBUTION) + extra


def this_installation() -> Installation:
    """Return the installation that is running."""
    try:
        distribution = metadata.distribution(DISTRIBUTION)
        installer, origin = distribution.read_text("INSTALLER") or "", distribution.read_text("direct_url.json") or ""
    except metadata.PackageNotFoundError:
        installer = origin = ""
        source: Path | None = Path(__file__).parents[2]
    else:
        source = editable_source(origin)
    return installation_of(Path(sys.prefix), Path(sys.executable), installer.strip(), source)


def editable_source(origin: str) -> Path | None:
    """Return the checkout of an editable install, from its direct_url.json; None for a regular install."""
    try:
        direct_url = json.loads(origin)
        is_editable = bool(direct_url["dir_info"].get("editable"))
        return Path(url2pathname(urlsplit(direct_url["url"]).path)) if is_editable else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def installation_of(prefix: Path, python: Path, installer: str, source: Path | None) -> Installation:
    """Identify an installation by its environment, Python executable, recorded installer, and checkout, if any."""
    if source is not None:
        folder = shlex.quote(str(source))
        update = f"git -C {folder} pull && make -C {folder} install"
        tags = ("git", "-C", str(source), "ls-remote", "--tags", "--refs", "origin")
        return Installation("checkout", source, update, f"delete the folder {source}", tags, GIT_TAG_VERSION)
    if "Cellar" in prefix.parts:
        outdated = ("brew", "outdated", "--json=v2", "--formula", DISTRIBUTION)
        return Installation("Homebrew", prefix, *_upgrade_and_remove("brew"), outdated, HOMEBREW_VERSION)
    python_word = shlex.quote(str(python))
    dry_run = ("uv", "pip", *DRY_RUN, "--python", str(python))
    if (prefix / "uv-receipt.toml").is_file():
        return Installation("uv tool", prefix, *_upgrade_and_remove("uv tool"), dry_run, DRY_RUN_VERSION)
    if (prefix / "pipx_metadata.json").is_file():
        return Installation(
            "pipx", prefix, *_upgrade_and_remove("pipx"), ("pipx", "runpip", DISTRIBUTION, *DRY_RUN), DRY_RUN_VERSION
        )
    if installer == "uv":
        by_uv = _upgrade_and_remove("uv pip", f" --python {python_word}", "install", " --upgrade")
        return Installation("uv", prefix, *by_uv, dry_run, DRY_RUN_VERSION)
    by_pip = _upgrade_and_remove(f"{python_word} -m pip", "", "install", " --upgrade")
    return Installation(
        "pip", prefix, *by_pip, (str(python), "-m", "pip", "index", "versions", DISTRIBUTION), PIP_INDEX_VERSION
    )


def _upgrade_and_remove(program: str, options: str = "", verb: str = "upgrade", how: str = "") -> tuple[str, str]:
    """Return the commands that update and remove the package."""
    return f"{program} {verb}{options}{how} {DISTRIBUTION}", f"{program} uninstall{options} {DISTRIBUTION}"


def version_order(version: str) -> tuple[tuple[int, ...], bool]:
    """Return the sort key of a version: its numbers; a pre-release (with letters) sorts before its release."""
    numbers = re.match(r"[\d.]*", version)
    release = numbers[0] if numbers else ""
    return tuple(int(number) for number in release.split(".") if number), release == version


def newest_in(output: str, version_pattern: str, version: str) -> str:
    """Return the newest version in an installer's output if it is newer than `version`; else ""."""
    newest = max(re.findall(version_pattern, output, re.MULTILINE), key=version_order, default="")
    return newest if version_order(newest) > version_order(version) else ""


async def newer_version(installation: Installation, version: str) -> str:
    """Return the version that an update would install; "" for none. Raises `OSError` with the installer's output."""
    process = await asyncio.create_subprocess_exec(
        _find_program(installation.query_command[0]),
        *installation.query_command[1:],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | NON_INTERACTIVE,
    )
    try:
        async with asyncio.timeout(QUERY_SECONDS):
            output = (await process.communicate())[0].decode(errors="replace")
    finally:
        if process.returncode is None:
            process.kill()
    if newest := newest_in(output, installation.version_pattern, version):
        return newest
    if process.returncode:
        raise OSError(
            f"`{shlex.join(installation.query_command)}` ended with {process.returncode}: {' '.join(output.split())}"
        )
    return ""


def _find_program(program: str) -> str:
    folders = (os.environ.get("PATH", os.defpath), *(str(Path(folder).expanduser()) for folder in INSTALLER_FOLDERS))
    return shutil.which(program, path=os.pathsep.join(folders)) or program
