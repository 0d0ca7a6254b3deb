"""Empty environments, as pip, uv and pipx make them, without a network and without the checkout.

Each installer resolves Paceline's real requirements from wheels that have the versions of this environment, but contain
only metadata. A `.pth` file then lends the installation the code of these packages.
"""

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

TOOLS = Path(sys.executable).parent
"""Folder of uv and pipx, which are among the locked development packages."""


@dataclass(frozen=True, slots=True)
class Distributions:
    wheel: Path
    sdist: Path


@dataclass(frozen=True, slots=True)
class Installed:
    """An installation: a user's home, the program in it, and the Python that runs the program."""

    home: Path
    program: Path
    python: Path

    def run(self, *words: str, **environment: str) -> str:
        """Run the program and return its output. Fails the test if the program fails."""
        return run(self.home, str(self.program), *words, **environment)


def run(home: Path, *words: str, **environment: str) -> str:
    """Run a program as the user of this home, whose environment does not refer to the checkout."""
    path = os.pathsep.join((str(TOOLS), os.defpath))
    known = {"HOME": str(home), "PATH": path, "COLUMNS": "300", "LANG": "C.UTF-8", **environment}
    done = subprocess.run(words, env=known, cwd=home, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def write_hollow_wheels(folder: Path) -> Path:
    """Write a wheel with only the metadata of each package of this environment; return the folder."""
    for distribution in metadata.distributions():
        if distribution.name != "paceline":
            needs = [f"Requires-Dist: {need}\n" for need in distribution.requires or ()]
            extras = [f"Provides-Extra: {extra}\n" for extra in distribution.metadata.get_all("Provides-Extra") or ()]
            write_hollow_wheel(folder, distribution.name, distribution.version, "".join(needs + extras))
    return folder


def write_hollow_wheel(folder: Path, project: str, version: str, needs: str = "") -> None:
    """Write a wheel that contains only metadata."""
    name = project.replace("-", "_")
    record = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{record}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{record}/RECORD", "")


def with_pip(home: Path, wheel: Path, dependencies: Path) -> Installed:
    environment = home / "environment"
    run(home, sys.executable, "-m", "venv", str(environment))
    python = environment / "bin" / "python"
    run(home, str(python), "-m", "pip", "install", "--no-index", "--find-links", str(dependencies), str(wheel))
    return lend(Installed(home, environment / "bin" / "paceline", python))


def with_uv(home: Path, wheel: Path, dependencies: Path) -> Installed:
    words = ("--offline", "--no-index", "--find-links", str(dependencies), "--python", sys.executable)
    run(home, str(TOOLS / "uv"), "tool", "install", *words, str(wheel))
    tool = home / ".local" / "share" / "uv" / "tools" / "paceline"
    return lend(Installed(home, home / ".local" / "bin" / "paceline", tool / "bin" / "python"))


def with_pipx(home: Path, wheel: Path, dependencies: Path) -> Installed:
    pip_words = f"--no-index -f {dependencies}"
    run(home, str(TOOLS / "pipx"), "install", "--python", sys.executable, f"--pip-args={pip_words}", str(wheel))
    (python,) = home.glob(".local/**/venvs/paceline/bin/python")
    return lend(Installed(home, home / ".local" / "bin" / "paceline", python))


def lend(installed: Installed) -> Installed:
    """Let the installation run the code of the dependencies in this environment."""
    (packages,) = installed.python.parents[1].glob("lib/python*/site-packages")
    lender = metadata.distribution("mlx-lm").locate_file("")
    (packages / "lent.pth").write_text(f"{lender}\n", encoding="utf-8")
    return installed
