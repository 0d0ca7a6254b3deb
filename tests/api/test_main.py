"""The server process: quick to start, free of mlx, safe by default, and clear about what is in its way."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from app.main import address_url, run
from app.serving.server import bind
from app.settings import Settings
from tests.api.fakes import make_site, served

RUN = "import sys; from app.main import run; from app.settings import read_settings; sys.exit(run(read_settings()))"
IMPORTS = """
import sys, time
began = time.process_time()
from app.main import create_app
from app.settings import Settings
from app.worker.client import WorkerClient
from app.worker.supervisor import Supervisor
from app.hub.catalog import Catalog
create_app(Settings(), WorkerClient(Supervisor()), Catalog(()))
print(time.process_time() - began)
print([name for name in ("mlx", "mlx_lm", "transformers", "torch", "numpy") if name in sys.modules])
"""


@pytest.fixture(autouse=True)
def _home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept in `~/.paceline` is not the tests' to touch."""
    monkeypatch.setenv("HOME", str(tmp_path))


def settings(**values: object) -> Settings:
    return Settings(**values)  # type: ignore[arg-type]


def test_the_server_is_made_in_time_and_without_mlx() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    seconds, imported = result.stdout.splitlines()
    assert float(seconds) < 1.5, "processor seconds, so that a busy machine does not fail it"
    assert imported == "[]"


def test_beyond_loopback_without_a_key_it_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5"):  # noqa: S104
        assert run(settings(host=host, port=0)) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all("PACELINE_API_KEY" in line for line in lines)


def test_a_taken_port_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(bind("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert run(settings(port=port)) == 1
    assert capfd.readouterr().err.splitlines() == [
        f"paceline: port {port} is taken (by another Paceline? see `paceline ps`): stop it or set PACELINE_PORT"
    ]


def test_it_serves_and_ends_with_0_on_sigterm() -> None:
    environment = {
        "PACELINE_PORT": "0",
        "PACELINE_DRAIN_SECONDS": "1",
        "PATH": "/usr/bin:/bin",
        "HOME": os.environ["HOME"],
    }
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Paceline listens on http://127.0.0.1:")
        url = line.split()[3]
        with urllib.request.urlopen(f"{url}health/live", timeout=10) as response:  # noqa: S310
            assert response.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    assert time.monotonic() - began < 20


def test_addresses() -> None:
    assert address_url("127.0.0.1", 1) == "http://127.0.0.1:1/"
    assert address_url("0.0.0.0", 1) == "http://127.0.0.1:1/"  # noqa: S104
    assert address_url("::", 1) == "http://127.0.0.1:1/"
    assert address_url("::1", 1) == "http://[::1]:1/"


@pytest.mark.anyio
async def test_ipv6_loopback() -> None:
    with closing(bind("::1", 0)) as listener:
        assert listener.getsockname()[0] == "::1"
    async with asyncio.timeout(5), served(make_site()) as (port, _):
        assert port > 0
