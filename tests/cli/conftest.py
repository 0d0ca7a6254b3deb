from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cli.fake_server import FakeServer, running_server


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def environment(tmp_path: Path, fake: FakeServer) -> Mapping[str, str]:
    """Environment of the command line: the port of the scripted server, and only the embedded models."""
    return {
        "PACELINE_PORT": str(fake.port),
        "PACELINE_HOME": str(tmp_path / "home"),
        "HF_HOME": str(tmp_path / "hub"),
        "HOME": str(tmp_path),
        "COLUMNS": "200",
    }
