"""A home, and a scripted server that can be registered as the server of this home."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.machine.server_file import RunningServer, lock_home
from app.settings import Settings, read_settings
from tests.cli.fake_server import FakeServer, running_server
from tests.desktop.test_menu import menu


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running_server() as server:
        server.answers |= {
            "/admin/api/session": (200, {"kind": "command"}),
            "/admin/api/menu": (200, menu()),
            "/api/load": (200, {}),
            "/api/unload": (200, {}),
        }
        yield server


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return read_settings(home=tmp_path / "home")


@pytest.fixture
def served(fake: FakeServer, settings: Settings) -> Iterator[FakeServer]:
    """The scripted server, registered as the server of the home."""
    with lock_home(settings.home) as write:
        write(RunningServer("127.0.0.1", fake.port, "key"))
        yield fake
