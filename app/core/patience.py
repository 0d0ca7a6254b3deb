"""Reads of disks that may not answer, such as a network drive whose server is away."""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")


def patient(
    otherwise: Any, *, patience_seconds: float = 1.0
) -> Callable[[Callable[[Path], Value]], Callable[[Path], Value]]:
    """Decorate a read of a path so that it returns within `patience_seconds`.

    If the disk has not answered by then, it returns the path's last value, or `otherwise` if there is none. One thread
    at a time waits for each path.
    """

    def decorate(read: Callable[[Path], Value]) -> Callable[[Path], Value]:
        known: dict[Path, Value] = {}
        threads: dict[Path, threading.Thread] = {}

        @functools.wraps(read)
        def read_patiently(path: Path) -> Value:
            thread = threads.get(path)
            if thread is None or not thread.is_alive():
                thread = threading.Thread(target=lambda: known.update({path: read(path)}), name="disk", daemon=True)
                thread.start()
                threads[path] = thread  # set after the start: others join it
            thread.join(patience_seconds)
            value: Value = known.get(path, otherwise)
            return value

        return read_patiently

    return decorate
