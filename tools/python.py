"""Prints in one line what is wrong with the Python that runs this file, and where to get another. Runs on Python 3.9.

python3 tools/python.py
"""

import platform
import sys

GET = "install one from python.org or with `brew install python`, then run make again (or make PYTHON=…)"
OLD_MACOS = ("11", "12", "13")


def complaint(version: "tuple[int, int]", system: str, machine: str, macos: str) -> str:
    """Return why Paceline cannot run on this Python, and the next action; "" if it can."""
    if version < (3, 11):
        return f"Paceline needs Python 3.11 or newer, this is {version[0]}.{version[1]}: {GET}"
    if system == "Darwin" and machine != "arm64":
        return f"Paceline needs a Python for Apple silicon, this one was made for Intel: {GET}"
    if system == "Darwin" and macos.split(".", maxsplit=1)[0] in OLD_MACOS:
        return f"Paceline needs macOS 14 or newer, this is {macos}: update macOS"
    return ""


if __name__ == "__main__":
    sys.exit(complaint(sys.version_info[:2], platform.system(), platform.machine(), platform.mac_ver()[0]) or 0)
