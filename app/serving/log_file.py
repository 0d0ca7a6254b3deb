"""The log on disk: one JSON object a line, in files that only their owner reads, five of 5 MB at most.

A disk that cannot be written costs lines of the log and nothing else.
"""

import io
import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import msgspec

from app.serving.log_ring import LogLine, clean_line

FOLDER = "logs"
FILE = "paceline.log"
FILE_BYTES = 5_000_000
FILES = 5


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
        folder = home / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(folder / FILE, maxBytes=file_bytes, backupCount=FILES - 1, encoding="utf-8", errors="replace")
        self.setFormatter(JsonLines(secrets))

    def _open(self) -> io.TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Part of logging.Handler: lines that cannot be written are lost, and nobody is bothered with it."""
