"""The answer to the latest request counts: a late answer to an earlier request does not replace it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Visitor
from tests.browser.server import Server, serving
from tests.browser.test_chat_keeping import ALL, button

LARGE, SMALL = "A large conversation", "A small one"
ENTRIES = ".conversations .open"
ROUND_TRIP = "fetch('/admin/api/models').then((response) => response.text())"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("latest")) as server:
        for number, text in enumerate((LARGE, SMALL), 1):
            turn = {"id": f"a{number}", "parent": "", "role": "user", "content": text}
            body = {"version": 0, "turns": [turn], "begin": {"title": text}}
            server.call("POST", f"{ALL}/{number}/turns", body)
        yield server


def held(page: Page, address: str | re.Pattern[str], act: Callable[[], object]) -> Route:
    """Call `act`; return the route of its request to `address`, which waits until the test continues or fulfills it."""
    routes: list[Route] = []

    def hold(route: Route) -> None:
        routes.append(route)

    page.route(address, hold, times=1)
    with page.expect_request(address):
        act()
    page.evaluate(ROUND_TRIP)
    return routes.pop()


@contextmanager
def late(page: Page, address: str | re.Pattern[str], act: Callable[[], object]) -> Iterator[None]:
    """Call `act`, hold its request to `address` until the block ends, and wait until the page has read the answer."""
    route = held(page, address, act)
    yield
    with page.expect_response(address):
        route.continue_()
    page.evaluate(ROUND_TRIP)


def test_the_conversation_that_was_clicked_last_stays_open(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/chat")
    large, small = page.locator(ENTRIES, has_text=LARGE), page.locator(ENTRIES, has_text=SMALL)
    title = page.locator("#chat-title")
    with late(page, f"**{ALL}/1", large.click):
        small.click()
        expect(title).to_have_text(SMALL)
    expect(title).to_have_text(SMALL)
    assert page.url.endswith("#2")
    with late(page, f"**{ALL}/1", large.click):
        button(page, "New chat").click()
        expect(title).to_have_text("New chat")
    expect(title).to_have_text("New chat")


def test_drafters_that_were_chosen_elsewhere_stay_chosen_when_an_older_answer_comes(
    server: Server, visitor: Visitor
) -> None:
    address = "/admin/api/drafts/demo-assistant"
    page = visitor(server).open("/admin/drafts/demo-assistant")
    policy = page.locator("#policy")
    expect(policy).to_have_value("")
    route = held(page, f"**{address}", lambda: server.call("PUT", address, {"num_draft_tokens": 3}))
    older = route.fetch()
    with page.expect_response(f"**{address}"):
        server.call("PUT", address, {"policy": "single"})
    expect(policy).to_have_value("single")
    route.fulfill(response=older)
    page.evaluate(ROUND_TRIP)
    expect(policy).to_have_value("single")


def test_the_list_is_that_of_the_last_search(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/chat")
    search = page.get_by_label("Search conversations")
    with late(page, re.compile(r"search=large"), lambda: search.fill("large")):
        search.fill("small")
        expect(page.locator(ENTRIES)).to_have_text([re.compile(SMALL)])
    expect(page.locator(ENTRIES)).to_have_text([re.compile(SMALL)])


def test_the_requests_are_those_of_the_last_filter(server: Server, visitor: Visitor) -> None:
    server.reply("Count from 1 to 3.", max_tokens=3)
    page = visitor(server).open("/admin/requests")
    rows, outcome = page.locator("tbody tr"), page.locator("#outcome")
    expect(rows).to_have_count(1)
    with late(page, re.compile(r"outcome=failed"), lambda: outcome.select_option("failed")):
        with page.expect_response(re.compile(r"outcome=fine")):
            outcome.select_option("fine")
        expect(rows).to_have_count(1)
    expect(rows).to_have_count(1)
    expect(outcome).to_have_value("fine")
