"""Empty environments, as pip, uv and pipx make them, without a network and without the checkout.

Each installer resolves Paceline's real requirements against the versions that this environment has, out of wheels that
carry their metadata alone; the code of these packages is then lent by a `.pth` file.
"""

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

TOOLS = Path(sys.executable).parent
"""Where uv and pipx of the locked development packages are."""


@dataclass(frozen=True, slots=True)
class Distributions:
    wheel: Path
    sdist: Path


@dataclass(frozen=True, slots=True)
class Installed:
    """A person's home, the program in it, and the Python that runs this."""

    home: Path
    program: Path
    python: Path

    def run(self, *words: str) -> str:
        """What the program printed. Fails the test where it ended with an error."""
        return run(self.home, str(self.program), *words)


def environment_of(home: Path) -> Mapping[str, str]:
    path = os.pathsep.join((str(TOOLS), os.defpath))
    return {"HOME": str(home), "PATH": path, "COLUMNS": "300", "LANG": "C.UTF-8"}


def run(home: Path, *words: str) -> str:
    """Run a program as the person of this home, who knows nothing of the checkout."""
    done = subprocess.run(
        words, env=environment_of(home), cwd=home, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def write_hollow_wheels(folder: Path) -> Path:
    """A wheel for each package of this environment, with its metadata alone; returns the folder of them."""
    for each in metadata.distributions():
        name, version = each.name.replace("-", "_"), each.version
        if name == "paceline":
            continue
        needs = "".join(f"Requires-Dist: {need}\n" for need in each.requires or ())
        extras = "".join(f"Provides-Extra: {extra}\n" for extra in each.metadata.get_all("Provides-Extra") or ())
        record = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"{record}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}{extras}"
            )
            wheel.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{record}/RECORD", "")
    return folder


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
    """Let the environment run the code of the dependencies that the test has."""
    (packages,) = installed.python.parents[1].glob("lib/python*/site-packages")
    lender = metadata.distribution("mlx-lm").locate_file("")
    (packages / "lent.pth").write_text(f"{lender}\n", encoding="utf-8")
    return installed
