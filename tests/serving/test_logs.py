"""The log: harmless lines, no secrets, bounded files that are private, and a terminal that stays as it was."""

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.command.service import log_lines
from app.core.errors import CommandError
from app.machine.server_file import LOG, LOG_FOLDER
from app.serving.logs import (
    LogRing,
    PrivateLogFile,
    ThreadedHandler,
    level_of,
    open_log_handlers,
    redact,
    set_log_level,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07",
    'two\nlines\r\n{"level":"error"}',
    "\u202egnp.exe",
    "\x00\x7f\x85\u2028\u2029",
    "\ud800 alone",
)
SECRETS = (
    "pl-AbCdEf123456_-xyz",
    "hf_abcdefghijklmnop",
    "sk-proj-1234567890",
    "Authorization: Bearer some.thing-else",
    "cookie: paceline_session=abcdef0123456789; other=1",
    "http://127.0.0.1:8710/admin/setup#one-time-code",
)


def fail(text: str) -> None:
    raise ValueError(text)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.getLogger("paceline.test")
    made.propagate = False
    made.setLevel(logging.DEBUG)
    yield made
    made.handlers.clear()
    made.propagate = True
    made.setLevel(logging.NOTSET)


@pytest.fixture
def ring(logger: logging.Logger) -> LogRing:
    ring = LogRing()
    logger.addHandler(ring)
    return ring


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_lines_are_one_harmless_line_everywhere(
    tmp_path: Path, logger: logging.Logger, ring: LogRing, text: str
) -> None:
    file = PrivateLogFile(tmp_path)
    logger.addHandler(file)
    logger.warning("said %s", text)
    try:
        fail(text)
    except ValueError:
        logger.exception("it failed")
    file.close()
    for line in ring.lines():
        assert line.text.isprintable()
        assert all(part.isprintable() for part in line.trace.split("\n"))
    assert "ValueError" in ring.lines()[1].trace
    raw = (tmp_path / LOG_FOLDER / LOG).read_text()
    written = raw.splitlines()
    assert len(written) == raw.count("\n") == 2
    assert json.loads(written[0])["text"] == ring.lines()[0].text
    assert json.loads(written[1])["level"] == "error"


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_in_no_line(tmp_path: Path, logger: logging.Logger, ring: LogRing, text: str) -> None:
    file = PrivateLogFile(tmp_path, ("environment-key",))
    ring.secrets = ("environment-key",)
    logger.addHandler(file)
    try:
        fail(text)
    except ValueError:
        logger.exception("%s and environment-key", text)
    file.close()
    (line,) = ring.lines()
    for shown in (line.text, line.trace, (tmp_path / LOG_FOLDER / LOG).read_text()):
        for secret in ("AbCdEf", "abcdefghij", "1234567890", "some.thing", "0123456789", "one-time", "environment-key"):
            assert secret not in shown


def test_what_only_looks_a_little_like_a_secret_stays() -> None:
    for text in ("a pl-an", "the bearer", "task-1", "hf_x", "GET /admin/setup"):
        assert redact(text) == text


@pytest.mark.parametrize("name", ["cmpl-", "embd-", "rerank-", "ollama-", "msg_", "resp_" + "0" * 24])
def test_a_line_about_a_request_of_any_endpoint_leads_to_it(logger: logging.Logger, name: str) -> None:
    ring = LogRing(capacity=5)
    logger.addHandler(ring)
    logger.error("the end of %s%024x#0", name, 7)
    assert ring.lines()[-1].request == f"{name}{7:024x}"


def test_the_ring_forgets_the_oldest_and_filters(logger: logging.Logger) -> None:
    ring = LogRing(capacity=5)
    logger.addHandler(ring)
    for number in range(8):
        logger.log(logging.ERROR if number % 2 else logging.INFO, "line %d of chatcmpl-%024x", number, number)
    assert [line.number for line in ring.lines()] == [4, 5, 6, 7, 8]
    assert [line.number for line in ring.lines(after=6)] == [7, 8]
    assert [line.number for line in ring.lines(count=2)] == [7, 8]
    assert [line.number for line in ring.lines(level="error")] == [4, 6, 8]
    assert [line.number for line in ring.lines(text="LINE 5")] == [6]
    assert ring.lines(logger="another") == []
    assert ring.lines()[-1].request == f"chatcmpl-{7:024x}"
    assert (ring.last, ring.loggers()) == (8, ["paceline.test"])


def test_levels_have_four_names() -> None:
    assert [level_of(number) for number in (0, 5, 10, 20, 25, 30, 40, 50, 99)] == [
        "debug", "debug", "debug", "info", "info", "warning", "error", "error", "error",
    ]  # fmt: skip


def test_a_wrong_format_string_is_a_line_and_no_crash() -> None:
    ring = LogRing()
    ring.handle(logging.LogRecord("paceline.test", logging.WARNING, "", 0, "%d tokens", ("many",), None))
    assert "tokens" in ring.lines()[0].text


def test_files_are_private_and_bounded(tmp_path: Path, logger: logging.Logger) -> None:
    file = PrivateLogFile(tmp_path, file_bytes=2_000)
    logger.addHandler(file)
    for number in range(200):
        logger.info("line %d", number)
    file.close()
    files = sorted((tmp_path / LOG_FOLDER).iterdir())
    assert [log_file.name for log_file in files] == [LOG, *(f"{LOG}.{number}" for number in range(1, 5))]
    assert sum(log_file.stat().st_size for log_file in files) <= 10_000
    assert {stat.S_IMODE(log_file.stat().st_mode) for log_file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / LOG_FOLDER).stat().st_mode) == 0o700


def test_the_terminal_is_short_and_the_rest_goes_to_ring_and_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ring = LogRing()
    with open_log_handlers(ring, tmp_path) as lines:
        set_log_level("info")
        logging.getLogger("paceline.somewhere").info("quiet")
        logging.getLogger("paceline.somewhere").warning("loud \x1b[31m")
        lines.log("2026-11-21 16:00:00,123 ERROR paceline.loop a step failed")
        lines.log("Traceback (most recent call last):")
        lines.log("2026-11-21 16:00:00,124 INFO paceline.request chatcmpl-" + "a" * 24 + "#0 model=m")
        set_log_level("error")
        logging.getLogger("paceline.somewhere").warning("nobody hears it")
        lines.log("2026-11-21 16:00:00,125 WARNING paceline.loop nor this")
        lines.log("2026-11-21 16:00:00,126 ERROR paceline.loop but this")
    set_log_level("info")
    shown = capfd.readouterr().err.splitlines()
    assert shown[0] == "loud \\x1b[31m"
    assert shown[1:] == [
        "2026-11-21 16:00:00,123 ERROR paceline.loop a step failed",
        "Traceback (most recent call last):",
        "2026-11-21 16:00:00,124 INFO paceline.request chatcmpl-" + "a" * 24 + "#0 model=m",
        "2026-11-21 16:00:00,125 WARNING paceline.loop nor this",
        "2026-11-21 16:00:00,126 ERROR paceline.loop but this",
    ]
    kept = [(line.level, line.logger, line.text) for line in ring.lines()]
    assert kept == [
        ("info", "paceline.somewhere", "quiet"),
        ("warning", "paceline.somewhere", "loud \\x1b[31m"),
        ("error", "paceline.loop", "a step failed"),
        ("error", "paceline.loop", "Traceback (most recent call last):"),
        ("info", "paceline.request", "chatcmpl-" + "a" * 24 + "#0 model=m"),
        ("error", "paceline.loop", "but this"),
    ]
    written = [json.loads(line) for line in (tmp_path / LOG_FOLDER / LOG).read_text().splitlines()]
    assert [line["text"] for line in written] == [line.text for line in ring.lines()]
    assert not [handler for handler in logging.getLogger().handlers if handler is ring]


def test_a_folder_that_cannot_be_written_leaves_the_log_in_memory(tmp_path: Path) -> None:
    (tmp_path / LOG_FOLDER).write_text("in the way")
    ring = LogRing()
    with open_log_handlers(ring, tmp_path):
        logging.getLogger("paceline.test").warning("still told")
    assert [line.text for line in ring.lines()][-1] == "still told"
    assert "in memory only" in ring.lines()[0].text


@pytest.mark.parametrize("kind", ["a pipe", "a link", "a folder"])
def test_what_is_no_file_in_the_place_of_the_log_is_neither_waited_for_nor_written(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / LOG_FOLDER / LOG, tmp_path / "thesis.txt"
    path.parent.mkdir()
    other.write_text("mine")
    makers = {"a pipe": os.mkfifo, "a link": lambda path: path.symlink_to(other), "a folder": Path.mkdir}
    makers[kind](path)
    ring = LogRing()
    with open_log_handlers(ring, tmp_path):
        logging.getLogger("paceline.test").warning("still told")
    assert "in memory only" in ring.lines()[0].text
    assert other.read_text() == "mine"
    with pytest.raises(CommandError, match="cannot be read"):
        list(log_lines(tmp_path, 10))


def test_an_outlet_may_be_closed_again_when_the_program_ends(tmp_path: Path) -> None:
    outlet = ThreadedHandler(logging.FileHandler(tmp_path / "log"))
    outlet.emit(logging.makeLogRecord({"msg": "last words"}))
    outlet.close()
    outlet.close()
    assert (tmp_path / "log").read_text() == "last words\n"
