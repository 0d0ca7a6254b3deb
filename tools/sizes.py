"""Prints the lines of each package of the app beside its budget; fails where one is 10 % above it.

    python tools/sizes.py

Budgets are set at a release, for the release after it. On an alarm, look for a missing concept, not for shorter lines.
"""

import sys
from collections import Counter
from pathlib import Path

APP = Path(__file__).resolve().parents[1] / "app"
BUDGETS = {
    "(app)": 1_820,
    "core": 1_900,
    "machine": 870,
    "models": 3_010,
    "engine": 7_120,
    "scheduler": 1_780,
    "text": 4_880,
    "supervision": 1_130,
    "worker": 2_090,
    "hub": 1_250,
    "store": 1_850,
    "serving": 4_620,
    "api": 4_050,
    "admin": 3_540,
    "i18n": 150,
    "command": 2_600,
    "desktop": 1_420,
}
"""Lines of each package, set on 2026-11-30."""
ALARM = 1.10
"""Ratio of lines to budget at which the check fails."""


def package_lines(app: Path = APP) -> Counter[str]:
    """Return the lines of Python in each package; `(app)` for the modules outside of any."""
    lines: Counter[str] = Counter()
    for path in app.rglob("*.py"):
        package, *rest = path.relative_to(app).parts
        lines[package if rest else "(app)"] += len(path.read_bytes().splitlines())
    return lines


def main() -> int:
    """Print the table and return the exit status: 1 where a package is too large or has no budget."""
    lines = package_lines()
    over = [name for name, count in lines.items() if count > ALARM * BUDGETS.get(name, 0)]
    for name in sorted(lines, key=list({**BUDGETS, **lines}).index):
        alarm = "  ← 10 % above its budget, or without one: find the missing concept" if name in over else ""
        print(f"{name:10} {lines[name]:6,} of {BUDGETS.get(name, 0):6,}{alarm}")
    print(f"{'all':10} {lines.total():6,} of {sum(BUDGETS.values()):6,}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
