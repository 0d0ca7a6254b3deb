"""The last lines of the log in memory, clean: escaped, without secrets, with the request that they are about.

`LogRing` is a handler of `logging`: lines may come from any thread. Numbers rise by one for each line.
"""

import logging
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from app.core.log_text import MAX_CHARACTERS, escape, redact, request_id_in

CAPACITY = 2_000
LEVELS = ("debug", "info", "warning", "error")


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
        request=request_id_in(said),
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
