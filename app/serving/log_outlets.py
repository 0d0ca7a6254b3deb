"""Where the server's log goes: warnings to the terminal, everything that `log_level` lets through to ring and file.

Lines of the worker's stderr go to the terminal as they are, as they always did, and as lines of its own loggers into
ring and file. Terminal and file are written by threads, so that a slow disk or a stopped terminal holds nobody up.
"""

import contextlib
import logging
import queue
import re
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path

from app.core.log_text import escape, redact
from app.serving.log_file import PrivateLogFile
from app.serving.log_ring import LogRing

OURS = ("app", "paceline")
WORKER = "paceline.worker"
AS_IS = "paceline_as_is"
WORKER_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+) (.*)", re.DOTALL
)

logger = logging.getLogger("paceline.log")


class Plain(logging.Formatter):
    """What people read on a terminal: the message, and the traceback of what nobody expected."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Part of logging.Formatter."""
        line = super().formatMessage(record)
        return line if hasattr(record, AS_IS) else escape(redact(line))


class Handed(QueueHandler):
    """Hands records, as they are, to a thread that `handler` writes in."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(queue.SimpleQueue())
        self._writer = handler
        self._thread: QueueListener | None = QueueListener(self.queue, handler)
        self._thread.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Part of QueueHandler."""
        return record

    def close(self) -> None:
        """Write what is left, then stop. Logging closes every handler once more when the program ends."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            self._writer.close()
        super().close()


class WorkerLines:
    """Takes the lines of the worker's stderr, from one thread at a time."""

    def __init__(self, terminal: logging.Handler, ring: LogRing, kept: tuple[logging.Handler, ...]) -> None:
        self.ring = ring
        self._terminal = terminal
        self._kept = kept
        self._level = logging.INFO
        self._name = WORKER

    def take(self, line: str) -> None:
        """One line without its end. What is no line of a log (a traceback) belongs to the one before it."""
        raw = _record(WORKER, logging.INFO, line)
        setattr(raw, AS_IS, True)
        self._terminal.emit(raw)
        found = WORKER_LINE.fullmatch(line)
        if found is not None:
            self._level, self._name = logging.getLevelNamesMapping()[found[1]], found[2]
        if logging.getLogger(WORKER).isEnabledFor(self._level):
            record = _record(self._name, self._level, line if found is None else found[3])
            for handler in self._kept:
                handler.handle(record)


def _record(name: str, level: int, said: str) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, "%s", (said,), None)


@contextlib.contextmanager
def open_outlets(ring: LogRing, home: Path) -> Iterator[WorkerLines]:
    """Send the log to terminal, ring and file until the end; the answer takes the worker's lines."""
    terminal = Handed(_plain_terminal())
    terminal.setLevel(logging.WARNING)
    kept: list[logging.Handler] = [ring]
    problem = ""
    try:
        kept.append(Handed(PrivateLogFile(home, ring.secrets)))
    except OSError as error:
        problem = str(error)
    root = logging.getLogger()
    for handler in (terminal, *kept):
        root.addHandler(handler)
    if problem:
        logger.warning("the log is kept in memory only: %s", problem)
    try:
        yield WorkerLines(terminal, ring, tuple(kept))
    finally:
        for handler in (terminal, *kept):
            root.removeHandler(handler)
            handler.close()


def _plain_terminal() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(Plain())
    return handler


def set_log_level(level: str) -> None:
    """What our own log tells from now on."""
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
