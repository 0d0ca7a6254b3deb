"""What holds for every test: exactness is demanded in float32 with the wheel's own BLAS, whose results do not depend on
the width of a forward; each process of the suite has a temporary folder of its own; and the end says what was left out.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ["PACELINE_OPENBLAS"] = "0"
sys.dont_write_bytecode = (
    False  # hundreds of servers, workers and commands would compile the app again, each for itself
)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that to what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None)  # a busy machine is no finding
settings.load_profile("suite")

RUN_BY = {"system": "make test-all", "soak": "make soak", "agents": "make agents"}
"""The command that runs the tests of a marker."""
_left_out: Counter[str] = Counter()


def _take_temporary_folder(process: str) -> None:
    """One for this process alone, gone at its end. What mlx compiled stays for the next run: two processes that share
    it would read what the other has half written.
    """
    folder = tempfile.mkdtemp(prefix="tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    kernels = Path(sys.prefix) / "kernels" / process
    kernels.mkdir(parents=True, exist_ok=True)
    (Path(folder) / "mlx").symlink_to(kernels)
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def pytest_configure(config: pytest.Config) -> None:
    if not getattr(config.option, "numprocesses", 0):  # the one that only hands out tests
        _take_temporary_folder(os.environ.get("PYTEST_XDIST_WORKER", "alone"))


from tests.scripted.server import ScriptedServer, scripted_server  # noqa: E402 - it imports mlx


def pytest_deselected(items: Iterable[pytest.Item]) -> None:
    """Count what the markers leave out by the command that runs it, and why."""
    for item in items:
        for name, command in RUN_BY.items():
            if (mark := item.get_closest_marker(name)) is not None:
                _left_out[f"{command} ({', '.join(mark.args)})" if mark.args else command] += 1
                break


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make what a test wrote readable for the process that prints: some write halves of characters."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of two processes of a suite both leave out the same: the first tells it."""
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        session.config.workeroutput["left_out"] = dict(_left_out)  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear in the process that prints."""
    _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests did not run, and what runs them."""
    for command, count in sorted(_left_out.items()):
        terminalreporter.write_line(f"Left out: {count} tests of {command}")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """One server for all tests whose models say what they are told; each test names its models."""
    with scripted_server(tmp_path_factory.mktemp("scripted") / "home") as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Leave what earlier modules and the imports made to no collection of garbage: each model that is let go makes a
    full one, which would take seconds at the end of the suite."""
    gc.collect()
    gc.freeze()
