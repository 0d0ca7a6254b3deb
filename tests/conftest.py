"""Exactness is demanded in float32 with the wheel's own BLAS, whose results do not depend on the width of a forward."""

import os
from collections.abc import Iterator

import pytest

os.environ["PACELINE_OPENBLAS"] = "0"

from tests.scripted.server import ScriptedServer, scripted_server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """One server for all tests whose models say what they are told; each test names its models."""
    with scripted_server(tmp_path_factory.mktemp("scripted") / "home") as server:
        yield server
