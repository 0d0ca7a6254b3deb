"""How this copy of Paceline was installed, and so how it is updated and removed.

Its own files tell: what the installer wrote beside the package (PEP 610, PEP 376), and what uv, pipx and Homebrew keep
in the environments that they make.
"""

import json
import shlex
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "paceline"
Kind = Literal["checkout", "Homebrew", "uv tool", "pipx", "uv", "pip"]


@dataclass(frozen=True, slots=True)
class Installation:
    """`update` and `remove` say what to type; `place` is the checkout, or the environment."""

    kind: Kind
    place: Path
    update: str
    remove: str


def this_installation() -> Installation:
    """The one that runs."""
    try:
        found = metadata.distribution(DISTRIBUTION)
        installer, origin = found.read_text("INSTALLER") or "", found.read_text("direct_url.json") or ""
    except metadata.PackageNotFoundError:
        installer = origin = ""
        source: Path | None = Path(__file__).parents[2]
    else:
        source = editable_source(origin)
    return installation_of(Path(sys.prefix), Path(sys.executable), installer.strip(), source)


def editable_source(origin: str) -> Path | None:
    """The checkout that an editable install runs, out of its direct_url.json; None for an install of its own."""
    try:
        told = json.loads(origin)
        is_editable = bool(told["dir_info"].get("editable"))
        return Path(url2pathname(urlsplit(told["url"]).path)) if is_editable else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def installation_of(prefix: Path, python: Path, installer: str, source: Path | None) -> Installation:
    """What the files of an environment say: its folder and Python, who installed into it, and the checkout it runs."""
    if source is not None:
        place = shlex.quote(str(source))
        return Installation(
            "checkout", source, f"git -C {place} pull && make -C {place} install", f"delete the folder {source}"
        )
    if "Cellar" in prefix.parts:
        return Installation("Homebrew", prefix, f"brew upgrade {DISTRIBUTION}", f"brew uninstall {DISTRIBUTION}")
    if (prefix / "uv-receipt.toml").is_file():
        return Installation("uv tool", prefix, f"uv tool upgrade {DISTRIBUTION}", f"uv tool uninstall {DISTRIBUTION}")
    if (prefix / "pipx_metadata.json").is_file():
        return Installation("pipx", prefix, f"pipx upgrade {DISTRIBUTION}", f"pipx uninstall {DISTRIBUTION}")
    own = shlex.quote(str(python))
    kind: Kind = "uv" if installer == "uv" else "pip"
    if kind == "uv":
        update, remove = f"uv pip install --python {own} --upgrade", f"uv pip uninstall --python {own}"
    else:
        update, remove = f"{own} -m pip install --upgrade", f"{own} -m pip uninstall"
    return Installation(kind, prefix, f"{update} {DISTRIBUTION}", f"{remove} {DISTRIBUTION}")
