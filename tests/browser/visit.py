"""Pages in a separate browser context, signed in and watched for problems."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, Route

from app.serving.auth import COOKIE
from tests.browser.server import Server
from tests.browser.witness import Witness, is_settled

WIDE = {"width": 1440, "height": 900}
TABLET = {"width": 850, "height": 1100}
PHONE = {"width": 390, "height": 844}
WAIT_MS = 20_000


class Visit:
    """One person with one browser at one server."""

    def __init__(self, context: BrowserContext, witness: Witness) -> None:
        self.context = context
        self.witness = witness

    def open(self, path: str) -> Page:
        """Open a new tab; return it once it has settled."""
        page = self.context.new_page()
        page.goto(path)
        is_settled(page)
        return page

    def check(self) -> None:
        """Assert that nothing has gone wrong so far."""
        assert self.witness.problems == []


@contextmanager
def visiting(
    browser: Browser, server: Server, *, signed_in: bool = True, phone: bool = False, **more: Any
) -> Iterator[Visit]:
    """Yield a visit; `more` are further options of the context, such as `color_scheme`."""
    sizes: dict[str, Any] = {"viewport": PHONE, "has_touch": True, "is_mobile": True} if phone else {"viewport": WIDE}
    context = browser.new_context(**{"base_url": server.address, "locale": "en-US", **sizes, **more})
    context.set_default_timeout(WAIT_MS)
    visit = Visit(context, Witness(context, server.address))
    if signed_in:
        context.add_cookies([session_cookie(server)])
    try:
        yield visit
    finally:
        context.close()


def sends(**topics: Any) -> Callable[[Route], None]:
    """Return a handler for `page.route`: a live feed that sends these values once each time the page connects."""
    events = "".join(f"event: {topic}\ndata: {json.dumps(value)}\n\n" for topic, value in topics.items())
    return lambda route: route.fulfill(status=200, content_type="text/event-stream", body=events)


def session_cookie(server: Server) -> Any:
    """Return the session cookie of the server's client, for a browser."""
    return {
        "name": COOKIE,
        "value": server.cookie,
        "url": f"{server.address}/admin/",
        "sameSite": "Strict",
        "httpOnly": True,
    }
