"""Reads of disks that may not answer, such as a network drive whose server is away."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from app.core.errors import DiskUnavailable

Value = TypeVar("Value")
logger = logging.getLogger("paceline.disks")


def patient(
    otherwise: Any, *, patience_seconds: float = 1.0
) -> Callable[[Callable[[Path], Value]], Callable[[Path], Value]]:
    """Decorate a read of a path so that it returns within `patience_seconds`.

    If the disk has not answered by then, it returns the path's last value, or `otherwise` if there is none (raises it,
    if it is `DiskUnavailable`), and the log says so once. One thread at a time waits for each path, and further callers
    only for the rest of its time; an error of `read` is the caller's.
    """

    def decorate(read: Callable[[Path], Value]) -> Callable[[Path], Value]:
        known: dict[Path, Value] = {}
        answers: dict[Path, tuple[Future[Value], float]] = {}
        """Answer that is waited for, and the time until which it is, by path."""

        @functools.wraps(read)
        def read_patiently(path: Path) -> Value:
            answer, deadline = answers.get(path, (Future[Value](), 0.0))
            is_new = not deadline or answer.done()
            if is_new:
                answer, deadline = answers[path] = Future(), time.monotonic() + patience_seconds
                threading.Thread(target=_answer, args=(read, path, answer), name="disk", daemon=True).start()
            try:
                known[path] = answer.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                if is_new:
                    logger.warning("the disk of %s does not answer: check its drive or network", path)
            value: Value = known.get(path, otherwise)
            if value is DiskUnavailable:
                raise DiskUnavailable("models cannot be read at the moment (the disk does not answer): try again soon")
            return value

        return read_patiently

    return decorate


def _answer(read: Callable[[Path], Value], path: Path, answer: "Future[Value]") -> None:
    try:
        answer.set_result(read(path))
    except (OSError, ValueError) as error:  # raised again where it is waited for
        answer.set_exception(error)
