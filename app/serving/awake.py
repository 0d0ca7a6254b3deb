"""Keeps a Mac from idle sleep while requests run, through macOS's `caffeinate`, which exits when this process does,
for any reason. The screen may sleep, and closing the lid still puts the Mac to sleep."""

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Protocol

from app.core.clock import Clock
from app.core.messages import Event

CAFFEINATE = "caffeinate"
LINGER_SECONDS = 15.0
"""Seconds to stay awake after the last request: an agent's next request follows soon."""

logger = logging.getLogger("paceline.awake")


class WakeLock(Protocol):
    """Keeps the computer awake. Both methods may be called repeatedly."""

    def hold(self) -> None:
        """Prevent sleep until `release`."""

    def release(self) -> None:
        """Allow sleep."""


class Caffeinate:
    """A `WakeLock` that runs `caffeinate`; does nothing where there is no such program."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def hold(self) -> None:
        """Start `caffeinate`, again if it was killed."""
        if self._child is not None and self._child.poll() is None:
            return
        if (program := shutil.which(CAFFEINATE)) is None:
            return
        nothing = subprocess.DEVNULL
        words = (program, "-i", "-w", str(os.getpid()))
        try:
            self._child = subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing)  # noqa: S603 - macOS's own
        except OSError as error:
            logger.warning("%s cannot be started, the computer may go to sleep: %s", CAFFEINATE, error)

    def release(self) -> None:
        """Kill `caffeinate`."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()


class Awake:
    """Holds the lock from the first request until `LINGER_SECONDS` after the last. Called from the event loop."""

    def __init__(self, lock: WakeLock, *, is_busy: Callable[[], bool], clock: Clock = time.monotonic) -> None:
        self._lock = lock
        self._is_busy = is_busy
        self._clock = clock
        self._until = clock()

    def on_event(self, _event: Event) -> None:
        """Check for running requests on every worker event; there is at least one per second."""
        now = self._clock()
        if self._is_busy():
            self._until = now + LINGER_SECONDS
        if now < self._until:
            self._lock.hold()
        else:
            self._lock.release()

    def close(self) -> None:
        """Allow sleep, for good."""
        self._lock.release()
