"""Every page, wide and on a phone, light and dark: usable by everybody, nothing cut off, nothing out of reach."""

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.admin.test_route_matrix import ROUTES
from tests.browser.conftest import Visitor
from tests.browser.places import PLACES, SET_UP, Place
from tests.browser.server import Server

LAYOUT = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
TOUCH_PIXELS = 44
SERIOUS = {"serious", "critical"}
LAYOUT_CALLS = ("scrollsSideways", "outside", "clipped")


NEXT_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def look(page: Page, *calls: str, argument: Any = None) -> list[str]:
    """What `layout.js` finds on the page."""
    page.evaluate(LAYOUT)
    return [each for call in calls for each in page.evaluate(f"(argument) => layout.{call}(argument)", argument)]


def check(found: list[str]) -> None:
    """Nothing may have been found."""
    assert not found, "\n" + "\n".join(found)


def axe(page: Page) -> list[str]:
    """Serious and critical violations by the rules of axe-core, each with the first element it concerns."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {[(node['html'][:160], node['failureSummary']) for node in each['nodes'][:3]]}"
        for each in violations
        if each["impact"] in SERIOUS
    ]


def test_every_page_there_is_is_visited() -> None:
    pages = {route.removeprefix("GET ") for route, access in ROUTES.items() if access == "page"}
    pages.discard("/admin")  # it leads to the overview
    assert pages <= {place.route for place in PLACES}
    entrances = {
        route.removeprefix("GET ") for route in ROUTES if ROUTES[route] == "entrance" and route.startswith("GET")
    }
    assert entrances <= {place.route for place in (*PLACES, SET_UP)}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_page_is_usable_by_everybody_on_a_wide_screen(server: Server, visitor: Visitor, place: Place) -> None:
    page = visitor(server, signed_in=place.signed_in, reduced_motion="reduce").open(place.address(server))
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.evaluate(NEXT_FRAMES)
        check(axe(page))
    check(look(page, *LAYOUT_CALLS))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_page_is_usable_by_everybody_on_a_phone(server: Server, visitor: Visitor, place: Place) -> None:
    page = visitor(server, signed_in=place.signed_in, phone=True, reduced_motion="reduce").open(place.address(server))
    assert page.evaluate("matchMedia('(pointer: coarse)').matches")
    check(axe(page))
    check(look(page, *LAYOUT_CALLS) + look(page, "smallTargets", argument=TOUCH_PIXELS))
