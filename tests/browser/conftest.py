"""One browser and one server that has been in use for the whole folder; each test gets a new browser context.

The browser closes after this folder's tests, since Playwright's event loop would disturb tests that run event loops.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.scene import Scene, scene
from tests.browser.server import Server
from tests.browser.visit import WAIT_MS, Visit, visiting

WINDOWLESS = Path("/usr/lib/chromium/chromium-headless-shell")
CHROMIUM = WINDOWLESS if WINDOWLESS.exists() else Path("/usr/bin/chromium")
"""Browser of the tests: the headless shell where it is installed, since it takes half the time."""
MISSING = "The browser tests need Debian's chromium: apt-get install -y chromium-headless-shell fonts-noto-cjk"
Visitor = Callable[..., Visit]

expect.set_options(timeout=WAIT_MS)


def pytest_itemcollected(item: pytest.Item) -> None:
    if "browser" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.system("chromium"))


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.fail(MISSING)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="package")
def stage(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Scene]:
    """Yield the scene that tests share and leave as they found it."""
    with scene(tmp_path_factory.mktemp("stage"), browser) as made:
        yield made


@pytest.fixture
def server(stage: Scene) -> Server:
    return stage.server


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    """Yield a function that begins visits: `visitor(server, phone=True)`. Fail the test if any visit met a problem."""
    visits: list[Visit] = []
    with ExitStack() as stack:

        def make(server: Server, **options: Any) -> Visit:
            visits.append(stack.enter_context(visiting(browser, server, **options)))
            return visits[-1]

        yield make
    assert [problem for visit in visits for problem in visit.witness.problems] == []


@pytest.fixture
def page(server: Server, visitor: Visitor) -> Page:
    """Return the overview, signed in, on a wide screen."""
    return visitor(server).open("/admin/")
