"""Let a training wait for other work on the same machine."""

from __future__ import annotations

import time
from pathlib import Path


def wait_while_paused(path: Path | None) -> float:
    """Sleep while the file exists; return the seconds slept."""
    started = time.monotonic()
    while path is not None and path.exists():
        time.sleep(2)
    return time.monotonic() - started
