"""Log handlers of the server: warnings to the terminal, everything at `log_level` and above to ring and file.

Lines contain no control characters that could forge lines or drive a terminal, and no secrets. `LogRing` keeps the last
lines in memory, each with the id of its request. On disk a line is one JSON object, in at most five files of 5 MB
that only their owner can read. The worker's stderr is passed to the terminal unchanged, and to ring and file under the
names of the worker's loggers. Threads write to terminal and file, so that a slow disk or a stopped terminal
blocks nothing; if the disk fails, only log lines are lost.
"""

import contextlib
import io
import logging
import os
import queue
import re
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from typing import Any

import msgspec

from app.machine.own_files import open_regular_file
from app.machine.server_file import LOG, LOG_FOLDER, START_LOG
from app.models.safe_files import escaped

REDACTED = "…"
MAX_CHARACTERS = 8_000
SECRETS = (
    re.compile(r"(\bpl-)[A-Za-z0-9_\-]{6,}"),
    re.compile(r"(\bhf_)[A-Za-z0-9]{6,}"),
    re.compile(r"(\bsk-)[A-Za-z0-9_\-]{6,}"),
    re.compile(r"(\bbearer\s+)[^\s'\"]+", re.IGNORECASE),
    re.compile(r"(\bpaceline_session=)[^\s;'\"]+", re.IGNORECASE),
    re.compile(r"(/(?:setup|enter)#)\S+"),
)
"""Patterns of keys, tokens and cookies; the prefix is kept to show what was redacted."""
REQUEST_ID = re.compile(r"\b(?:(?:chatcmpl|cmpl|embd|rerank|ollama)-|(?:msg|resp)_)[0-9a-f]{24,48}\b")
CAPACITY = 2_000
LEVELS = ("debug", "info", "warning", "error")
FILE_BYTES = 5_000_000
FILES = 5
OUR_LOGGER = "paceline"
WORKER = "paceline.worker"
VERBATIM = "paceline_as_is"
WORKER_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+) (.*)", re.DOTALL
)

logger = logging.getLogger("paceline.log")


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Return `text` without anything that looks like a secret, and without `secrets`."""
    for pattern in SECRETS:
        text = pattern.sub(rf"\1{REDACTED}", text)
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text


@dataclass(frozen=True, slots=True)
class LogLine:
    """One log line. `trace` is an exception's traceback, with line breaks; `at` is in Unix seconds."""

    number: int
    at: float
    level: str
    logger: str
    text: str
    trace: str = ""
    request: str = ""


def clean_line(record: logging.LogRecord, secrets: Sequence[str] = (), number: int = 0) -> LogLine:
    """Return a record as a line that is safe to show and store."""
    try:
        message = record.getMessage()
    except Exception as error:  # noqa: BLE001 - a wrong format string must not break the code that logs
        message = f"{record.msg!r} ({error})"
    message = redact(message, secrets)
    request = REQUEST_ID.search(message)
    trace = ""
    if record.exc_info and record.exc_info[0] is not None:
        lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
        trace = "\n".join(escaped(line) for line in redact("\n".join(lines), secrets).split("\n"))
    return LogLine(
        number=number,
        at=record.created,
        level=level_of(record.levelno),
        logger=escaped(record.name),
        text=escaped(message[:MAX_CHARACTERS]),
        trace=trace[-MAX_CHARACTERS:],
        request=request.group() if request else "",
    )


def level_of(number: int) -> str:
    """Return the name of our highest level that a numeric `logging` level reaches."""
    return LEVELS[min(max(number // 10 - 1, 0), len(LEVELS) - 1)]


class LogRing(logging.Handler):
    """Keeps the last lines; `secrets` are always redacted, whatever they look like."""

    def __init__(self, capacity: int = CAPACITY, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=capacity)
        self.secrets = tuple(secrets)
        self._guard = threading.Lock()
        self.last = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record as a line."""
        with self._guard:
            self.last += 1
            self._lines.append(clean_line(record, self.secrets, self.last))

    def lines(
        self, *, after: int = 0, level: str = "debug", logger: str = "", text: str = "", count: int = CAPACITY
    ) -> list[LogLine]:
        """Return the last `count` lines with a number above `after` that pass the filter, the oldest first."""
        lowest, needle = LEVELS.index(level), text.casefold()
        with self._guard:
            newer = [line for line in self._lines if line.number > after]
        matching = [
            line
            for line in newer
            if LEVELS.index(line.level) >= lowest
            and line.logger.startswith(logger)
            and (not needle or needle in f"{line.text}\n{line.trace}".casefold())
        ]
        return matching[max(0, len(matching) - count) :]

    def loggers(self) -> list[str]:
        """Return the names of the loggers in the ring."""
        with self._guard:
            return sorted({line.logger for line in self._lines})


def line_object(line: LogLine) -> dict[str, Any]:
    """Return a line as an object for file and downloads, without empty values."""
    moment = datetime.fromtimestamp(line.at, UTC).isoformat(timespec="milliseconds")
    values = {"level": line.level, "logger": line.logger, "text": line.text, "trace": line.trace}
    named = {"time": moment, **values, "request": line.request}
    return {name: value for name, value in named.items() if value}


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object without line breaks."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        return msgspec.json.encode(line_object(clean_line(record, self._secrets))).decode()


class PrivateLogFile(RotatingFileHandler):
    """`PACELINE_HOME/logs/paceline.log` and its four predecessors. Raises OSError if it cannot be opened."""

    def __init__(self, home: Path, secrets: Sequence[str] = (), *, file_bytes: int = FILE_BYTES) -> None:
        folder = home / LOG_FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(folder / LOG, maxBytes=file_bytes, backupCount=FILES - 1, encoding="utf-8", errors="replace")
        self.setFormatter(JsonLines(secrets))

    def _open(self) -> io.TextIOWrapper:
        descriptor = open_regular_file(Path(self.baseFilename), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drop lines that cannot be written, silently."""


class TerminalFormatter(logging.Formatter):
    """Format for the terminal: the message, and the traceback of an unexpected exception."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line, escaped and redacted unless it comes from the worker."""
        line = super().formatMessage(record)
        return line if hasattr(record, VERBATIM) else escaped(redact(line))


class ThreadedHandler(QueueHandler):
    """Hands records unchanged to a thread in which `handler` writes them."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(queue.SimpleQueue())
        self._writer = handler
        self._thread: QueueListener | None = QueueListener(self.queue, handler)
        self._thread.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record unchanged."""
        return record

    def close(self) -> None:
        """Write what is queued, then stop. Safe to call twice: logging closes every handler again at exit."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            self._writer.close()
        super().close()


class WorkerLines:
    """Logs the lines of the worker's stderr. Called from one thread at a time."""

    def __init__(self, terminal: logging.Handler, ring: LogRing, handlers: tuple[logging.Handler, ...]) -> None:
        self.ring = ring
        self._terminal = terminal
        self._handlers = handlers
        self._level = logging.INFO
        self._name = WORKER

    def log(self, line: str) -> None:
        """Log a line, given without line break; without a log prefix (a traceback), it belongs to the previous line."""
        raw = _record(WORKER, logging.INFO, line)
        setattr(raw, VERBATIM, True)
        self._terminal.emit(raw)
        match = WORKER_LINE.fullmatch(line)
        if match is not None:
            self._level, self._name = logging.getLevelNamesMapping()[match[1]], match[2]
        if logging.getLogger(WORKER).isEnabledFor(self._level):
            record = _record(self._name, self._level, line if match is None else match[3])
            for handler in self._handlers:
                handler.handle(record)


def _record(name: str, level: int, message: str) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, "%s", (message,), None)


@contextlib.contextmanager
def open_log_handlers(ring: LogRing, home: Path) -> Iterator[WorkerLines]:
    """Send the log to terminal, ring and file until exit; yields the object that logs the worker's lines."""
    terminal = _open_terminal(home)
    handlers: list[logging.Handler] = [ring]
    problem = ""
    try:
        handlers.append(ThreadedHandler(PrivateLogFile(home, ring.secrets)))
    except OSError as error:
        problem = str(error)
    root = logging.getLogger()
    for handler in (terminal, *handlers):
        root.addHandler(handler)
    if problem:
        logger.warning("the log is kept in memory only: %s", problem)
    try:
        yield WorkerLines(terminal, ring, tuple(handlers))
    finally:
        for handler in (terminal, *handlers):
            root.removeHandler(handler)
            handler.close()


def _open_terminal(home: Path) -> logging.Handler:
    """Return a handler for standard error. If that is the start log, empty it: the rotating files take over."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(2), (home / LOG_FOLDER / START_LOG).stat()):
            os.ftruncate(2, 0)
            return logging.NullHandler()
    handler = logging.StreamHandler()
    handler.setFormatter(TerminalFormatter())
    terminal = ThreadedHandler(handler)
    terminal.setLevel(logging.WARNING)
    return terminal


def set_log_level(level: str) -> None:
    """Set the level of our own loggers."""
    logging.getLogger(OUR_LOGGER).setLevel(level.upper())
