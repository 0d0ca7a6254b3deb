"""Pages that stay open follow what happens elsewhere: new models, other settings, a cleared history, time itself."""

import shutil
from pathlib import Path

from playwright.sync_api import Page, Route, expect

import app
from app.i18n.catalogs import read_words
from tests.browser.conftest import Visitor
from tests.browser.server import MODEL, PASSWORD, Server
from tests.browser.visit import sends
from tests.browser.witness import is_settled

words = read_words()
OTHER = "demo-hybrid"
LATE = "late-model"
EMPTY = {"requests": [], "next": "", "total": 0, "models": [], "running": []}


def test_open_pages_offer_a_model_that_has_come_since(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    models, chat = visit.open("/admin/models"), visit.open("/admin/chat")
    expect(models.locator("tbody tr").first).to_be_visible()
    shown = models.locator("tbody tr").count()
    expect(models.locator(".head p").first).to_contain_text(f"{shown} models")
    folder = server.home.parent / "models" / LATE
    shutil.copytree(Path(app.__file__).parent / "demo_models" / MODEL, folder)
    try:
        while all(entry["id"] != LATE for entry in server.call("GET", "/v1/models")["data"]):
            continue  # folders are looked at every two seconds
        server.call("PATCH", "/admin/api/settings", {"queue_limit": 127})
        for page, place in ((models, "tbody"), (chat, "#option-model")):
            page.bring_to_front()
            expect(page.locator(place)).to_contain_text(LATE)
    finally:
        shutil.rmtree(folder)
        server.call("PATCH", "/admin/api/settings", {"queue_limit": None})


def test_the_head_of_a_model_follows_its_settings(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open(f"/admin/models/{OTHER}")
    pin, unpin = (page.get_by_role("button", name=words(key), exact=True) for key in ("model.pin", "model.unpin"))
    expect(pin).to_be_visible()
    try:
        page.locator("#setting-pinned").check()
        expect(unpin).to_be_visible()
        expect(page.locator(".head .badge", has_text=words("models.pinned"))).to_be_visible()
        unpin.focus()
        page.keyboard.press("Enter")
        expect(pin).to_be_focused()
    finally:
        server.call("PATCH", f"/admin/api/models/{OTHER}/settings", {"pinned": None})


def test_a_history_that_was_cleared_elsewhere_leaves_no_rows(server: Server, visitor: Visitor) -> None:
    server.reply("Count to three.", max_tokens=3)
    recent = server.until("requests", lambda now: now["recent"])["recent"]
    now = {"running": [], "recent": recent, "open": 0}

    def feed(route: Route) -> None:
        sends(requests=now)(route)

    page = visitor(server).open("/admin/requests")
    rows = page.locator("[aria-labelledby=past-title] tbody tr")
    expect(rows.first).to_be_visible()
    page.route("**/admin/api/live?*", feed)
    page.route("**/admin/api/requests?*", lambda route: route.fulfill(json=EMPTY))
    page.reload()
    expect(rows.first).to_be_visible()
    now["recent"] = []
    expect(rows).to_have_count(0)


def test_ages_grow_while_a_page_is_open(server: Server, visitor: Visitor) -> None:
    def aged(page: Page, path: str, place: str) -> None:
        page.goto(path)
        is_settled(page)
        age = page.locator(place).first
        expect(age).to_be_visible()
        at_first = age.inner_text()
        page.clock.fast_forward("50:00:00")
        expect(age).not_to_have_text(at_first)
        expect(age).to_contain_text("days ago")

    server.reply("Count to three.", max_tokens=3)
    page = visitor(server).context.new_page()
    page.clock.install()
    aged(page, "/admin/", "[aria-labelledby=recent-title] tbody tr td")
    aged(page, "/admin/settings", "#sessions li .small")


def test_signing_in_leads_back_to_the_same_filter_and_name(server: Server, visitor: Visitor) -> None:
    for path in ("/admin/requests?outcome=failed", "/admin/drafts/caf%C3%A9", "/admin/models/demo-assistant%3Afast"):
        visit = visitor(server, signed_in=False)
        visit.witness.expects(401, 404)
        page = visit.open(path)
        page.locator("#password").fill(PASSWORD)
        page.keyboard.press("Enter")
        expect(page).to_have_url(server.url(path))


def test_a_text_is_copied_where_the_browser_has_no_clipboard(server: Server, visitor: Visitor) -> None:
    """Over http from another computer, as on a LAN, browsers have no `navigator.clipboard`."""
    visit = visitor(server)
    visit.context.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page = visit.open("/admin/")
    button = page.locator("[data-copy]").first
    button.click()
    expect(page.locator(".toast")).to_have_text(words("core.copied"))
    expect(button).to_be_focused()
    page.goto("/admin/models")
    is_settled(page)
    page.locator("#filter").focus()
    page.keyboard.press("ControlOrMeta+v")
    expect(page.locator("#filter")).to_have_value(f"{server.address}/v1")
