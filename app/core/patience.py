"""Reads of disks that may not answer, such as a network drive whose server is away."""

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")
logger = logging.getLogger("paceline.disks")


def patient(
    otherwise: Any, *, patience_seconds: float = 1.0
) -> Callable[[Callable[[Path], Value]], Callable[[Path], Value]]:
    """Decorate a read of a path so that it returns within `patience_seconds`.

    If the disk has not answered by then, it returns the path's last value, or `otherwise` if there is none, and the log
    says so once. One thread at a time waits for each path; an error of `read` is the caller's.
    """

    def decorate(read: Callable[[Path], Value]) -> Callable[[Path], Value]:
        known: dict[Path, Value] = {}
        answers: dict[Path, Future[Value]] = {}

        def wait_for_disk(path: Path, answer: "Future[Value]") -> None:
            try:
                answer.set_result(read(path))
            except (OSError, ValueError) as error:  # raised again where it is waited for
                answer.set_exception(error)

        @functools.wraps(read)
        def read_patiently(path: Path) -> Value:
            answer = answers.get(path)
            is_new = answer is None or answer.done()
            if answer is None or is_new:
                answer = answers[path] = Future()
                threading.Thread(target=wait_for_disk, args=(path, answer), name="disk", daemon=True).start()
            try:
                known[path] = answer.result(patience_seconds)
            except TimeoutError:
                if is_new:
                    logger.warning("the disk of %s does not answer: check its drive or network", path)
            value: Value = known.get(path, otherwise)
            return value

        return read_patiently

    return decorate
