"""Prints a release's notes, if its version agrees everywhere, and its Homebrew formula.

python tools/release.py notes v0.2.0 >notes.md
python tools/release.py formula dist/paceline-0.2.0-py3-none-any.whl --url ADDRESS --homepage ADDRESS >paceline.rb
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app import __version__

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.13"
SYSTEMS: Mapping[str, tuple[str, str]] = {
    "macosx_14_0_arm64": ("sonoma", "on_sonoma"),
    "macosx_15_0_arm64": ("sequoia", "on_sequoia"),
    "macosx_26_0_arm64": ("tahoe", "on_tahoe :or_newer"),
}
"""Platforms of wheels, the oldest first, each with Homebrew's name of the system and of its block in a formula. mlx's
packages have a wheel for each platform, since kernels depend on the system."""
MARKERS = {
    "sys_platform": "darwin",
    "platform_system": "Darwin",
    "platform_machine": "arm64",
    "os_name": "posix",
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "extra": "",
}


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file of a package, as the index offers it."""

    name: str
    url: str
    sha256: str

    def stanza(self, indent: str) -> str:
        """Return the wheel as a resource of a formula; Homebrew must not unpack it."""
        lines = (
            f'resource "{self.name}" do',
            f'  url "{self.url}", using: :nounzip',
            f'  sha256 "{self.sha256}"',
            "end",
        )
        return "\n".join(indent + line for line in lines)


class NotReady(Exception):
    """The version cannot be released; the message says why."""


def notes(changelog: str, tag: str, version: str) -> str:
    """Return the changelog's section of this version. Raises `NotReady` where tag, version and changelog disagree."""
    if tag != f"v{version}":
        raise NotReady(f"the tag is {tag}, app/__init__.py says {version}: tag v{version}, or change `__version__`")
    sections = re.split(r"^## \[", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, body = section.partition("\n")
        if re.fullmatch(re.escape(version) + r"\] - \d{4}-\d{2}-\d{2}", heading) and body.strip():
            return body.strip() + "\n"
    raise NotReady(f"CHANGELOG.md has no entries below `## [{version}] - YYYY-MM-DD`: rename `[Unreleased]`")


def locked_for_macos(lock: str) -> Iterator[str]:
    """Yield the lines of a lock file that a Mac installs, each with its hashes and without its marker."""
    for line in lock.replace("\\\n", " ").splitlines():
        words, _, hashes = line.partition("--hash=")
        if not words.strip():
            continue
        locked = Requirement(words)
        if locked.marker is None or locked.marker.evaluate(MARKERS):
            yield f"{locked.name}{locked.specifier} --hash={hashes}"


def wheels(requirements: Sequence[str], platform: str) -> dict[str, Wheel]:
    """Return the wheels that pip's index offers for this platform, by name. Raises `NotReady` with pip's message."""
    with tempfile.TemporaryDirectory() as folder:
        asked, report = Path(folder, "requirements.txt"), Path(folder, "report.json")
        asked.write_text("\n".join(requirements), encoding="utf-8")
        words = ("--dry-run", "--ignore-installed", "--no-deps", "--require-hashes", "--only-binary=:all:", "--quiet")
        target = ("--python-version", PYTHON, "--platform", platform)
        command = (sys.executable, "-m", "pip", "install", *words, *target, "--report", str(report), "-r", str(asked))
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise NotReady(f"pip finds no wheels for {platform}: {ran.stderr.strip()}")
        return wheels_of(json.loads(report.read_text(encoding="utf-8")))


def wheels_of(report: Mapping[str, Any]) -> dict[str, Wheel]:
    """Read the wheels from pip's installation report (version 1)."""
    by_name = {}
    for package in report["install"]:
        origin = package["download_info"]
        name = canonicalize_name(str(package["metadata"]["name"]))
        by_name[name] = Wheel(name, origin["url"], origin["archive_info"]["hashes"]["sha256"])
    return by_name


def formula(url: str, sha256: str, homepage: str, by_platform: Mapping[str, Mapping[str, Wheel]]) -> str:
    """Return the formula's text: first the resources that all systems share, then a block for each system."""
    first, *others = by_platform.values()
    shared = {name for name, wheel in first.items() if all(other.get(name) == wheel for other in others)}
    resources = [first[name].stanza("  ") for name in sorted(shared)]
    for platform, by_name in by_platform.items():
        own = [by_name[name].stanza("    ") for name in sorted(by_name.keys() - shared)]
        if own:
            resources.append("\n".join([f"  {SYSTEMS[platform][1]} do", "\n\n".join(own), "  end"]))
    oldest = SYSTEMS[next(iter(by_platform))][0]
    return FORMULA.format(
        url=url,
        version=__version__,
        sha256=sha256,
        homepage=homepage,
        python=PYTHON,
        oldest=oldest,
        resources="\n\n".join(resources),
    )


FORMULA = """\
# Written by `make formula` out of the locked versions; every wheel is downloaded and compared by Homebrew itself.
class Paceline < Formula
  desc "Local inference with speculative decoding for Apple silicon"
  homepage "{homepage}"
  url "{url}", using: :nounzip
  version "{version}"
  sha256 "{sha256}"
  license "MIT"

  depends_on arch: :arm64
  depends_on macos: :{oldest}
  depends_on "python@{python}"

  # Published wheels leave no room for the longer names that Homebrew would write into their libraries.
  preserve_rpath

{resources}

  def install
    resources.each {{ |wheel| wheel.stage buildpath/"wheels" }}
    system "python{python}", "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--no-index", "--no-deps", "--no-compile",
           *Dir["wheels/*.whl"], *Dir["*.whl"]
    bin.install_symlink libexec/"bin/paceline"
  end

  service do
    run [opt_bin/"paceline", "serve"]
    keep_alive crashed: true
  end

  def caveats
    <<~TEXT
      Start it in the background and open it:  paceline start
      As an app in ~/Applications:             paceline app install
      Before `brew uninstall`:                 paceline uninstall
    TEXT
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/paceline --version")
    assert_match "demo-assistant", shell_output("#{{bin}}/paceline ls")
  end
end
"""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    telling = commands.add_parser("notes", help="print the changelog's section of a tag")
    telling.add_argument("tag")
    brewing = commands.add_parser("formula", help="print the Homebrew formula of a wheel")
    brewing.add_argument("wheel", type=Path)
    brewing.add_argument("--url", required=True, help="where the wheel is downloaded from")
    brewing.add_argument("--homepage", required=True)
    asked = parser.parse_args(words)
    try:
        if asked.command == "notes":
            print(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), asked.tag, __version__), end="")
        else:
            lock = list(locked_for_macos((ROOT / "requirements-desktop.lock").read_text(encoding="utf-8")))
            by_platform = {platform: wheels(lock, platform) for platform in SYSTEMS}
            sha256 = hashlib.sha256(asked.wheel.read_bytes()).hexdigest()
            print(formula(asked.url, sha256, asked.homepage, by_platform), end="")
    except (NotReady, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
