"""Warn of known vulnerabilities in the locked packages. It never fails: a person decides what to do.

`python tools/advisories.py requirements.lock requirements-dev.lock` asks pip-audit, which installs nothing here.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SECONDS = 120
COMMAND = (sys.executable, "-m", "pip_audit", "--service", "osv", "--disable-pip", "--require-hashes")
FORMAT = ("--format", "json", "--progress-spinner", "off", "--timeout", "10")


def scan(locks: Sequence[str], command: Sequence[str] = COMMAND) -> list[str]:
    """Return the lines to print: one for each vulnerability, or the reason why nothing was compared."""
    words = [*command, *FORMAT, *(word for lock in locks for word in ("-r", lock))]
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
        return findings(json.loads(ran.stdout))
    except subprocess.TimeoutExpired:
        return unknown(f"no answer within {SECONDS} seconds")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return unknown("the service could not be asked, or its answer not be read")


def unknown(why: str) -> list[str]:
    """Return a warning that nothing was compared, which is no reason to stop a release."""
    return [f"WARNING: the locked packages were not compared with known vulnerabilities: {why}."]


def findings(report: dict[str, Any]) -> list[str]:
    """Return pip-audit's report as lines."""
    lines = [
        f"WARNING: {package['name']} {package['version']} has a known vulnerability, {vulnerability['id']}"
        f" ({_repair(vulnerability['fix_versions'])}): {' '.join(vulnerability['description'].split())[:160]}"
        for package in report["dependencies"]
        for vulnerability in package.get("vulns", ())
    ]
    skipped = [package["name"] for package in report["dependencies"] if "skip_reason" in package]
    if skipped:
        lines.append(f"WARNING: not compared with known vulnerabilities: {', '.join(skipped)}.")
    return lines or [f"{len(report['dependencies'])} locked packages, no known vulnerability."]


def _repair(versions: Sequence[str]) -> str:
    return f"repaired in {' and '.join(versions)}; `make lock` takes it" if versions else "not repaired yet"


if __name__ == "__main__":
    print("\n".join(scan(sys.argv[1:])))
