"""Every page, wide and on a phone, light and dark: usable by everybody, nothing cut off, nothing out of reach."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from app.i18n.catalogs import read_words
from tests.admin.test_route_matrix import ROUTES
from tests.browser.conftest import Visitor
from tests.browser.places import ENTER, PLACES, SET_UP, Place
from tests.browser.server import MODEL, Server
from tests.browser.visit import sends
from tests.browser.witness import is_settled

words = read_words()
LAYOUT = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
TOUCH_PIXELS = 44
SERIOUS = {"serious", "critical"}
LAYOUT_CALLS = ("scrollsSideways", "outside", "clipped")


NEXT_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def look(page: Page, *calls: str, argument: Any = None) -> list[str]:
    """Return the findings of these calls of `layout.js` on the page."""
    page.evaluate(LAYOUT)
    return [finding for call in calls for finding in page.evaluate(f"(argument) => layout.{call}(argument)", argument)]


def check(findings: list[str]) -> None:
    """Assert that there are no findings."""
    assert not findings, "\n" + "\n".join(findings)


def axe(page: Page) -> list[str]:
    """Return the serious and critical violations that axe-core finds, each with the first three elements concerned."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {rule['help']}: {[(node['html'][:160], node['failureSummary']) for node in rule['nodes'][:3]]}"
        for rule in violations
        if rule["impact"] in SERIOUS
    ]


def test_every_page_there_is_is_visited() -> None:
    pages = {route.removeprefix("GET ") for route, access in ROUTES.items() if access == "page"}
    pages.discard("/admin")  # it redirects to the overview
    assert pages <= {place.route for place in PLACES}
    entrances = {
        route.removeprefix("GET ") for route in ROUTES if ROUTES[route] == "entrance" and route.startswith("GET")
    }
    assert entrances <= {place.route for place in (*PLACES, SET_UP, ENTER)}


SHIFTS = """() => new Promise((done) => {
  const seen = [];
  new PerformanceObserver((list) => seen.push(...list.getEntries())).observe({ type: "layout-shift", buffered: true });
  const at = ({ x, y }) => `${Math.round(x)},${Math.round(y)}`;
  const moved = ({ node, previousRect, currentRect }) =>
    `${at(previousRect)} to ${at(currentRect)} ${(node?.outerHTML ?? node?.textContent ?? "").trim().slice(0, 60)}`;
  const told = () => seen.map((each) => [each.value, `${Math.round(each.startTime)} ms`, ...each.sources.map(moved)]);
  requestAnimationFrame(() => setTimeout(() => done(told())));
})"""
MOST_SHIFT = 0.1
"""Limit on the sum of layout shifts, below which web.dev calls a page good."""


def check_shifts(page: Page) -> None:
    """Assert that the page's layout shifts add up to less than `MOST_SHIFT`."""
    shifts = page.evaluate(SHIFTS)
    assert sum(value for value, *_ in shifts) < MOST_SHIFT, json.dumps(shifts, indent=1)


@pytest.mark.parametrize("phone", [False, True], ids=["wide", "phone"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_nothing_on_a_page_jumps_while_it_appears(server: Server, visitor: Visitor, place: Place, phone: bool) -> None:
    page = visitor(server, signed_in=place.signed_in, phone=phone).open(place.address(server))
    check_shifts(page)


def test_nothing_jumps_on_a_phone_beside_a_measurement_that_loads_the_model(server: Server, visitor: Visitor) -> None:
    person = visitor(server, phone=True)
    server.call("POST", "/admin/api/models/unload", {"model": MODEL})
    server.call("POST", "/admin/api/measurements", {"model": MODEL, "minutes": 0.5})
    page = person.open(f"/admin/drafts/{MODEL}")
    link = page.get_by_role("link", name=words("drafts.see"), exact=True)
    try:
        expect(link).to_be_visible()
        expect(page.get_by_role("status").filter(has_text=words("model.loaded"))).to_be_visible()
        check_shifts(page)
    finally:
        server.call("DELETE", "/admin/api/measurements/current")
    expect(link).to_be_hidden()


def test_a_narrowed_list_stays_narrowed_on_the_way_back(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/requests?outcome=cancelled")
    expect(page.locator("#outcome")).to_have_value("cancelled")
    page.locator("#outcome").select_option("fine")
    expect(page).to_have_url(re.compile(r"outcome=fine$"))
    row = page.locator("tbody tr").first
    row.click()  # the whole row is a link
    expect(page).to_have_url(re.compile("/admin/requests/chatcmpl-"))
    page.go_back()
    expect(page.locator("#outcome")).to_have_value("fine")
    page.goto("/admin/logs")
    page.locator("#level").select_option("error")
    page.reload()
    expect(page.locator("#level")).to_have_value("error")


LOGGED = "(({ last, began }) => [last, began])(JSON.parse(document.getElementById('data').textContent))"


def test_the_log_of_a_server_that_was_restarted_begins_with_its_first_line(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/logs")
    last, began = page.evaluate(LOGGED)

    def line(number: int) -> dict[str, Any]:
        words = {"level": "info", "logger": "x", "text": f"anew {number}.", "trace": "", "request": ""}
        return {"number": number, "at": 1.0, **words}

    count = last + 5
    event = json.dumps({"last": count, "began": began + 60, "lines": [line(count)]})
    page.route(
        re.compile("/admin/api/live[?]"),
        lambda route: route.fulfill(content_type="text/event-stream", body=f"event: logs\ndata: {event}\n\n"),
    )
    all_lines = json.dumps({"lines": [line(number) for number in range(1, count + 1)]})
    page.route(
        re.compile("/admin/api/logs[?]"), lambda route: route.fulfill(content_type="application/json", body=all_lines)
    )
    page.goto("/admin/logs")
    expect(page.get_by_text(re.compile(rf"^{count} "))).to_be_visible()


def test_a_long_log_draws_its_last_lines_and_the_earlier_ones_when_asked(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/logs")
    last, began = page.evaluate(LOGGED)
    lines = [
        {
            "number": last + 1 + at,
            "at": 1.0,
            "level": "info",
            "logger": "x",
            "text": f"line {at}",
            "trace": "",
            "request": "",
        }
        for at in range(900)
    ]
    body = json.dumps({"last": last + 900, "began": began, "lines": lines})
    page.route(
        re.compile("/admin/api/live[?]"),
        lambda route: route.fulfill(content_type="text/event-stream", body=f"event: logs\ndata: {body}\n\n"),
    )
    page.goto("/admin/logs")
    rows = page.locator(".line")
    expect(rows.last).to_contain_text("line 899")
    expect(rows).to_have_count(100)
    page.get_by_role("button", name=words("requests.more")).click()
    expect(rows).to_have_count(300)


def test_lines_that_come_while_missed_ones_are_asked_for_stand_there_once(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/logs")
    last, began = page.evaluate(LOGGED)

    def line(number: int) -> dict[str, Any]:
        words = {"level": "info", "logger": "x", "text": f"line {number}.", "trace": "", "request": ""}
        return {"number": last + number, "at": 1.0, **words}

    # Lines 1 and 2 were missed.
    events = [{"last": last + number, "began": began, "lines": [line(number)]} for number in (3, 4)]
    body = "".join(f"event: logs\ndata: {json.dumps(event)}\n\n" for event in events)
    page.route(
        re.compile("/admin/api/live[?]"),
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    missed = json.dumps({"lines": [line(number) for number in range(1, 5)]})
    page.route(
        re.compile("/admin/api/logs[?]"), lambda route: route.fulfill(content_type="application/json", body=missed)
    )
    page.goto("/admin/logs")
    expect(page.locator(".line", has_text="line 4.")).to_have_count(1)
    expect(page.locator(".line", has_text=re.compile(r"line [1-4]\."))).to_have_count(4)
    listed = page.evaluate("JSON.parse(document.getElementById('data').textContent).lines.length")
    expect(page.get_by_text(re.compile(rf"^{listed + 4} "))).to_be_visible()


def test_a_request_that_ends_as_the_list_is_read_again_stands_there_once(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/requests")
    listed = page.evaluate("JSON.parse(document.getElementById('data').textContent).page")
    row, total = listed["requests"][0] | {"outcome": "stop"}, listed["total"]
    ended, later = (row | {"id": f"chatcmpl-{name}"} for name in ("ended", "later"))
    page.route(
        re.compile("/admin/api/requests[?]"),
        lambda route: route.fulfill(
            content_type="application/json",
            body=json.dumps({"requests": [ended, row], "next": "", "total": total + 1, "models": [row["model"]]}),
        ),
    )
    streams: list[Route] = []

    def hold(route: Route) -> None:
        streams.append(route)

    page.route(re.compile("/admin/api/live[?]"), hold)
    page.goto("/admin/requests")
    page.locator("#outcome").select_option("fine")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    news = json.dumps({"running": [], "open": 0, "recent": [later, ended, row]})
    streams.pop().fulfill(content_type="text/event-stream", body=f"event: requests\ndata: {news}\n\n")
    expect(rows).to_have_count(3)


def test_methods_and_outcomes_are_called_by_their_names(server: Server, visitor: Visitor) -> None:
    for address in ("/admin/", "/admin/requests"):
        page = visitor(server).open(address)
        expect(page.locator("tbody tr").first).to_be_visible()
        assert not re.search(r"draft_model|ngram|dflash\b|eagle3|\boff\b", page.locator("tbody").first.inner_text())


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


def test_every_link_of_every_page_leads_somewhere(server: Server, visitor: Visitor) -> None:
    server.reply("Count to three.", max_tokens=5)
    visit, places = visitor(server), dict[str, str]()
    for place in PLACES:
        page = visit.open(place.address(server))
        for address in page.locator("a[href^='/']:visible").evaluate_all("(links) => links.map((link) => link.href)"):
            places.setdefault(address, place.name)
        page.close()
    assert any("/admin/requests/" in address for address in places), "of the recent requests"
    statuses = {(place, address): visit.context.request.get(address).status for address, place in places.items()}
    assert {link: status for link, status in statuses.items() if status >= 400} == {}


def test_a_models_name_leads_to_its_drafters_with_memory_in_the_head(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/")
    loaded = page.locator("section[aria-labelledby=loaded-title]")
    expect(loaded.get_by_text(words("overview.drafter"), exact=True)).to_have_count(1)
    for address in ("/admin/", "/admin/models"):
        page.goto(address)
        page.locator("main").get_by_role("link", name=MODEL, exact=True).first.click()
        expect(page).to_have_url(re.compile(f"/admin/drafts/{MODEL}$"))
    head = page.locator("[x-data=modelHead]")
    expect(head.get_by_role("navigation").get_by_role("link").first).to_have_attribute("aria-current", "page")
    expect(head).to_contain_text(re.compile(rf"{words('model.memory_used')} [\d.]+ MB"))
    expect(head).to_contain_text(re.compile(rf"{words('overview.drafter')} demo-"))


def test_a_base_model_is_told_apart_on_the_models_page_and_comes_last_in_the_chat(
    server: Server, visitor: Visitor
) -> None:
    page = visitor(server).open("/admin/")

    def without_template(route: Route) -> None:
        listing = route.fetch().json()
        route.fulfill(json={**listing, "models": [{**row, "chats": row["id"] != MODEL} for row in listing["models"]]})

    page.route("**/admin/api/models", without_template)
    page.goto("/admin/models")
    for name, count in ((MODEL, 1), ("demo-draft", 0)):
        # By the row's head: where a draft is chosen, the row of its main model links to it too.
        row = page.locator("tbody tr", has=page.locator("th").get_by_role("link", name=name, exact=True))
        expect(row.get_by_text(words("models.base"), exact=True).filter(visible=True)).to_have_count(count)
    page.goto("/admin/chat")
    expect(page.locator("#option-model option").last).to_have_text(f"{MODEL} · {words('models.base')}")
    page.unroute("**/admin/api/models")


def test_narrowed_models_stay_narrowed_on_the_way_back(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/models?kind=nothing")
    expect(page.locator("#kind")).to_have_value("main")
    page.locator("#kind").select_option("all")
    page.locator("#filter").fill(MODEL)
    expect(page).to_have_url(re.compile(rf"filter={MODEL}&kind=all$"))
    page.get_by_role("link", name=MODEL, exact=True).click()
    expect(page).to_have_url(re.compile(f"/admin/drafts/{MODEL}$"))
    page.go_back()
    expect(page.locator("#filter")).to_have_value(MODEL)
    expect(page.locator("#kind")).to_have_value("all")


def test_a_request_that_waits_for_its_model_counts_as_waiting(server: Server, visitor: Visitor) -> None:
    state = server.call("GET", "/admin/api/state")["state"] | {"running": 0, "waiting": 0, "open_requests": 1}
    page = visitor(server).context.new_page()
    page.route("**/admin/api/live?*", sends(state=state))
    page.goto("/admin/")
    is_settled(page)
    figure = page.locator(".figures div", has=page.get_by_text(words("overview.waiting"), exact=True)).locator("dd")
    expect(figure).to_have_text("1")
    page.get_by_role("button", name=words("overview.restart"), exact=True).click()
    expect(page.locator("#confirm-text")).to_contain_text("1 open request")
    page.keyboard.press("Escape")


def test_the_overview_names_the_loaded_model_and_shows_an_hour_or_a_day(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/")
    expect(page.locator(".head p")).to_have_text(re.compile(MODEL))
    server.reply("Count to three.", max_tokens=20)
    chart = page.locator(".chart[role=img]")
    for name, oldest in (("hour", "1 hr ago"), ("day", "1 day ago")):
        page.locator("#range").select_option(name)
        expect(page).to_have_url(re.compile(f"range={name}$"))
        expect(chart).to_contain_text(oldest)
        page.reload()
        expect(chart).to_contain_text(oldest)
    page.locator("#range").select_option("minutes")
    expect(chart).to_contain_text("2 min ago")
