"""`make screenshots`: save every page of a server that has been in use, light and dark, to `docs/screenshots/`."""

import itertools
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.conftest import CHROMIUM, MISSING
from tests.browser.picture import smaller
from tests.browser.places import PLACES, SET_UP, Place
from tests.browser.scene import QUESTION, Scene, scene
from tests.browser.server import MODEL, Server, serving
from tests.browser.test_pages import NEXT_FRAMES
from tests.browser.visit import PHONE, WIDE, visiting

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "screenshots"
ASKED = (
    "Write a markdown table of the squares from 1 to 20.",
    "Count from 1 to 60.",
    "Write a Python function that adds two numbers.",
    "Return a JSON object with the keys name, age and city.",
)
ANSWERED_BEFORE = 30
SCHEMES = ("light", "dark")
ON_A_PHONE = ("overview", "drafts", "chat")
HIGHEST_PIXELS = 1300
MOST_BYTES = 2_500_000


def names() -> list[str]:
    """Return the name of every file that `make screenshots` writes."""
    wide = [f"{place.name}-{scheme}.png" for place in (*PLACES, SET_UP) for scheme in SCHEMES]
    return sorted(wide + [f"{name}-phone-{scheme}.png" for name in ON_A_PHONE for scheme in SCHEMES])


class Photographer:
    """Takes pictures of pages."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self._browser = browser
        self._folder = folder
        self._desk = browser.new_page()

    def take(self, server: Server, place: Place, *, phone: bool = False) -> None:
        """Take one page, light and dark."""
        with visiting(self._browser, server, signed_in=place.signed_in, phone=phone, reduced_motion="reduce") as visit:
            page = visit.open(place.address(server))
            prepare(page, place)
            self._fit(page, PHONE if phone else WIDE)
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                page.evaluate(NEXT_FRAMES)
                name = f"{place.name}{'-phone' if phone else ''}-{scheme}.png"
                self._keep(name, page)
            visit.check()

    def _fit(self, page: Page, size: dict[str, int]) -> None:
        """Make the window as high as the page, up to a limit, so that no sticky part covers its middle."""
        height = min(page.evaluate("document.documentElement.scrollHeight"), HIGHEST_PIXELS)
        page.set_viewport_size({**size, "height": max(height, size["height"])})
        page.evaluate(NEXT_FRAMES)

    def _keep(self, name: str, page: Page) -> None:
        (self._folder / name).write_bytes(smaller(page.screenshot(), self._desk))


def prepare(page: Page, place: Place) -> None:
    """Open what a person who presents the page would open."""
    if place.name == "chat":
        page.get_by_role("button", name=QUESTION).first.click()
        expect(page.locator('article[data-role="assistant"] footer dl').first).to_be_visible()
        page.locator("header .segments button").last.click()
        expect(page.locator("article mark").first).to_be_visible()
    if place.name == "models":
        page.locator("#kind").select_option("all")
    if place.name == "downloads":
        page.locator("#query").fill("qwen3")
        page.keyboard.press("Enter")
        expect(page.locator("#search-title ~ ul > li").first).to_be_visible()


def photograph(browser: Browser, folder: Path) -> None:
    """Save all screenshots to `folder`."""
    photographer = Photographer(browser, folder)
    with tempfile.TemporaryDirectory(prefix="paceline-") as state:
        with serving(Path(state) / "first", account=False) as fresh:
            photographer.take(fresh, SET_UP)
        with scene(Path(state) / "second", browser, is_under_way=True) as made:
            show(photographer, made)


def show(photographer: Photographer, made: Scene) -> None:
    """Take the downloads page first, before its download ends, and the pages with requests last, while requests run."""
    busy = ("overview", "requests")
    for place in sorted(PLACES, key=lambda place: place.name != "downloads"):
        if place.name not in busy:
            photographer.take(made.server, place)
    for name in ("chat", "drafts"):
        photographer.take(made.server, named(name), phone=True)
    with asking(made.server):
        for name in busy:
            photographer.take(made.server, named(name))
        photographer.take(made.server, named("overview"), phone=True)


def named(name: str) -> Place:
    return next(place for place in PLACES if place.name == name)


@contextmanager
def asking(server: Server) -> Iterator[None]:
    """Send one request after another during the block, which begins once the speed chart has enough answers to show."""
    ended, begun = threading.Event(), threading.Semaphore(0)

    def ask() -> None:
        with server.another_client() as client:
            for number in itertools.count():
                if ended.is_set():
                    return
                asked = {"model": MODEL, "messages": [{"role": "user", "content": ASKED[number % len(ASKED)]}]}
                client.post("/admin/api/v1/chat/completions", json=asked)
                begun.release()

    asker = threading.Thread(target=ask)
    asker.start()
    for _ in range(ANSWERED_BEFORE):
        begun.acquire()
    yield
    ended.set()
    asker.join()


def main() -> None:
    if not CHROMIUM.exists():
        sys.exit(MISSING)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        photograph(browser, FOLDER)
        browser.close()
    for file in FOLDER.glob("*.png"):
        if file.name not in names():
            file.unlink()
    size = sum(picture.stat().st_size for picture in FOLDER.glob("*.png"))
    print(f"{len(names())} pictures, {size / 1e6:.2f} MB, in {FOLDER}")
    assert size < MOST_BYTES


if __name__ == "__main__":
    main()
