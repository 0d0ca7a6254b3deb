"""Where the server's log goes: warnings to the terminal, everything that `log_level` lets through to ring and file.

A line holds no control characters that could forge lines or drive a terminal, and no secrets. `LogRing` has the last
ones in memory, with the request that each is about; on disk a line is one JSON object, in files that only their owner
reads, five of 5 MB at most. Lines of the worker's stderr go to the terminal as they are, and as lines of its own
loggers into ring and file. Terminal and file are written by threads, so that a slow disk or a stopped terminal holds
nobody up; a disk that cannot be written costs lines of the log and nothing else.
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

from app.core.own_files import open_own
from app.core.server_file import LOG, LOG_FOLDER, START_LOG

HIDDEN = "…"
MAX_CHARACTERS = 8_000
SECRETS = (
    re.compile(r"(\bpl-)[A-Za-z0-9_\-]{6,}"),
    re.compile(r"(\bhf_)[A-Za-z0-9]{6,}"),
    re.compile(r"(\bsk-)[A-Za-z0-9_\-]{6,}"),
    re.compile(r"(\bbearer\s+)[^\s'\"]+", re.IGNORECASE),
    re.compile(r"(\bpaceline_session=)[^\s;'\"]+", re.IGNORECASE),
    re.compile(r"(/(?:setup|enter)#)\S+"),
)
"""What begins like a key, a token or a cookie; the beginning stays, so that one sees what it was."""
REQUEST_ID = re.compile(r"\b(?:chatcmpl|cmpl)-[0-9a-f]{24}\b")
CAPACITY = 2_000
LEVELS = ("debug", "info", "warning", "error")
FILE_BYTES = 5_000_000
FILES = 5
OURS = ("app", "paceline")
WORKER = "paceline.worker"
AS_IS = "paceline_as_is"
WORKER_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+) (.*)", re.DOTALL
)

logger = logging.getLogger("paceline.log")


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Without anything that looks like a secret, and without these."""
    for pattern in SECRETS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def escape(text: str) -> str:
    """One line in which every control character, also those that turn the direction of writing, is spelled out."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. `trace` is that of an exception, with line breaks; `at` is in Unix seconds."""

    number: int
    at: float
    level: str
    logger: str
    text: str
    trace: str = ""
    request: str = ""


def clean_line(record: logging.LogRecord, secrets: Sequence[str] = (), number: int = 0) -> LogLine:
    """A record as a line that may be shown and kept."""
    try:
        said = record.getMessage()
    except Exception as error:  # noqa: BLE001 - a wrong format string must not end what wanted to log
        said = f"{record.msg!r} ({error})"
    said = redact(said, secrets)
    request = REQUEST_ID.search(said)
    trace = ""
    if record.exc_info and record.exc_info[0] is not None:
        lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
        trace = "\n".join(escape(line) for line in redact("\n".join(lines), secrets).split("\n"))
    return LogLine(
        number=number,
        at=record.created,
        level=level_of(record.levelno),
        logger=escape(record.name),
        text=escape(said[:MAX_CHARACTERS]),
        trace=trace[-MAX_CHARACTERS:],
        request=request.group() if request else "",
    )


def level_of(number: int) -> str:
    """The name of the highest of our levels that a number of `logging` reaches."""
    return LEVELS[min(max(number // 10 - 1, 0), len(LEVELS) - 1)]


class LogRing(logging.Handler):
    """The last lines; `secrets` are never shown, whatever they look like."""

    def __init__(self, capacity: int = CAPACITY, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=capacity)
        self.secrets = tuple(secrets)
        self._guard = threading.Lock()
        self.last = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record."""
        with self._guard:
            self.last += 1
            self._lines.append(clean_line(record, self.secrets, self.last))

    def lines(
        self, *, after: int = 0, level: str = "debug", logger: str = "", text: str = "", count: int = CAPACITY
    ) -> list[LogLine]:
        """The last `count` lines with a number above `after` that pass the filter, the oldest first."""
        lowest, wanted = LEVELS.index(level), text.casefold()
        with self._guard:
            newer = [line for line in self._lines if line.number > after]
        passing = [
            line
            for line in newer
            if LEVELS.index(line.level) >= lowest
            and line.logger.startswith(logger)
            and (not wanted or wanted in f"{line.text}\n{line.trace}".casefold())
        ]
        return passing[max(0, len(passing) - count) :]

    def loggers(self) -> list[str]:
        """Who wrote them."""
        with self._guard:
            return sorted({line.logger for line in self._lines})


def line_object(line: LogLine) -> dict[str, Any]:
    """A line as the file and downloads have it; what is empty is left out."""
    moment = datetime.fromtimestamp(line.at, UTC).isoformat(timespec="milliseconds")
    values = {"level": line.level, "logger": line.logger, "text": line.text, "trace": line.trace}
    named = {"time": moment, **values, "request": line.request}
    return {name: value for name, value in named.items() if value}


class JsonLines(logging.Formatter):
    """One JSON object without line breaks for each record."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        """Part of logging.Formatter."""
        return msgspec.json.encode(line_object(clean_line(record, self._secrets))).decode()


class PrivateLogFile(RotatingFileHandler):
    """`PACELINE_HOME/logs/paceline.log` and its four predecessors. Raises OSError when it cannot be opened."""

    def __init__(self, home: Path, secrets: Sequence[str] = (), *, file_bytes: int = FILE_BYTES) -> None:
        folder = home / LOG_FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(folder / LOG, maxBytes=file_bytes, backupCount=FILES - 1, encoding="utf-8", errors="replace")
        self.setFormatter(JsonLines(secrets))

    def _open(self) -> io.TextIOWrapper:
        descriptor = open_own(Path(self.baseFilename), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Part of logging.Handler: lines that cannot be written are lost, and nobody is bothered with it."""


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
    terminal = _open_terminal(home)
    kept: list[logging.Handler] = [ring]
    problem = ""
    try:
        kept.append(Handed(PrivateLogFile(home, ring.secrets)))
    except OSError as error:
        problem = str(error)
    root = logging.getLogger()
    for each in (terminal, *kept):
        root.addHandler(each)
    if problem:
        logger.warning("the log is kept in memory only: %s", problem)
    try:
        yield WorkerLines(terminal, ring, tuple(kept))
    finally:
        for each in (terminal, *kept):
            root.removeHandler(each)
            each.close()


def _open_terminal(home: Path) -> logging.Handler:
    """Standard error, unless it is the start log: that one ends here, the log goes on in files that take turns."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(2), (home / LOG_FOLDER / START_LOG).stat()):
            os.ftruncate(2, 0)
            return logging.NullHandler()
    handler = logging.StreamHandler()
    handler.setFormatter(Plain())
    terminal = Handed(handler)
    terminal.setLevel(logging.WARNING)
    return terminal


def set_log_level(level: str) -> None:
    """What our own log tells from now on."""
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
