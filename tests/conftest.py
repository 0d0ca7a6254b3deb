"""Setup of all tests: without OpenBLAS, because tests of exactness need float32 results that do not depend on the width
of a forward pass; with a temporary folder for each process; and with a summary of the tests that did not run.
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
sys.dont_write_bytecode = False  # else hundreds of servers, workers and commands would each compile the app again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell sets this for background processes
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None)  # a slow example on a busy machine is no failure
settings.load_profile("suite")

RUN_BY = {"system": "make test-all", "soak": "make soak", "agents": "make agents"}
"""The command that runs the tests of a marker."""
_left_out: Counter[str] = Counter()


def _take_temporary_folder() -> None:
    """Give this process its own temporary folder, deleted at exit, and no root certificates: tests speak HTTP, and each
    client would read all of them."""
    folder = tempfile.mkdtemp(prefix="tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    certificates = Path(folder) / "certificates"
    certificates.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ["SSL_CERT_DIR"] = str(certificates)


def _share_kernels() -> None:
    """Put the compiler that shares mlx's kernels between test processes before the real one."""
    if (compiler := shutil.which("g++")) is not None and "KERNELS" not in os.environ:
        os.environ["COMPILER"], os.environ["KERNELS"] = compiler, str(Path(sys.prefix) / "kernels")
        os.environ["PATH"] = os.pathsep.join((str(Path(__file__).parent / "compiler"), os.environ["PATH"]))


def pytest_configure(config: pytest.Config) -> None:
    if not getattr(config.option, "numprocesses", 0):  # xdist's controller only hands out tests
        _take_temporary_folder()
        _share_kernels()


from tests.scripted.server import ScriptedServer, scripted_server  # noqa: E402 - it imports mlx


def pytest_deselected(items: Iterable[pytest.Item]) -> None:
    """Count the tests that markers deselect, by the command that runs them and the marker's reason."""
    for item in items:
        for name, command in RUN_BY.items():
            if (mark := item.get_closest_marker(name)) is not None:
                _left_out[f"{command} ({', '.join(mark.args)})" if mark.args else command] += 1
                break


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what xdist cannot send to its controller: some tests write lone surrogates."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts to xdist's controller from the first worker only: all workers deselect the same tests."""
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        session.config.workeroutput["left_out"] = dict(_left_out)  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add a worker's counts to those of the controller, which prints them."""
    _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests did not run, and the commands that run them."""
    for command, count in sorted(_left_out.items()):
        terminalreporter.write_line(f"Left out: {count} tests of {command}")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """Serve scripted models to all tests of the session; each test names its models."""
    with scripted_server(tmp_path_factory.mktemp("scripted") / "home") as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Exempt the objects of imports and earlier modules from garbage collection: each model that is released runs a
    full collection, which would take seconds at the end of the suite."""
    gc.collect()
    gc.freeze()
