"""The first minute: the printed address, a password, the dashboard; then signing out and in again."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from app.i18n.catalogs import read_words
from tests.browser.conftest import Visitor
from tests.browser.server import PASSWORD, Server, serving
from tests.browser.test_pages import LAYOUT_CALLS, axe, check, check_shifts, look
from tests.browser.witness import is_settled

words = read_words()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Server]:
    """Yield a server that nobody has set up yet."""
    with serving(tmp_path, account=False) as running:
        yield running


def submit(page: Page, password: str) -> None:
    page.locator("#password").fill(password)
    page.locator("main form button[type=submit]").click()


def test_a_problem_is_shown_at_the_field_that_it_is_with(fresh: Server, visitor: Visitor) -> None:
    visit = visitor(fresh, signed_in=False)
    visit.witness.expects(403)
    page = visit.open("/admin/setup")
    submit(page, PASSWORD)
    expect(page.locator("#problem")).to_have_text(words("setup.no_code"))
    page.goto("/admin/setup#wrong-code")
    page.reload()
    expect(page.locator("#code")).to_be_hidden()
    submit(page, PASSWORD)
    for field, is_wrong in (("#code", "true"), ("#password", "false")):
        expect(page.locator(field)).to_have_attribute("aria-invalid", is_wrong)
    expect(page.locator("#code")).to_be_focused()
    submit(page, "short")
    for field, is_wrong in (("#code", "false"), ("#password", "true")):
        expect(page.locator(field)).to_have_attribute("aria-invalid", is_wrong)
    expect(page.locator("#password")).to_be_focused()


def test_a_first_run_leads_from_the_printed_address_to_a_chosen_password(fresh: Server, visitor: Visitor) -> None:
    visit = visitor(fresh, signed_in=False)
    page = visit.open("/")
    expect(page).to_have_url(re.compile("/admin/setup$"))
    expect(page.locator("#code")).to_be_focused()
    printed = visit.context.new_page()
    printed.goto(fresh.setup)
    is_settled(printed)
    assert "#" not in printed.url
    expect(printed.locator("#code")).to_be_hidden()
    submit(printed, "short")
    expect(printed.locator("#problem")).to_have_text(words("setup.short", characters=8))
    submit(printed, PASSWORD)
    expect(printed).to_have_url(fresh.url("/admin/welcome"))
    expect(printed.get_by_role("heading", level=1)).to_have_text(words("welcome.title"))
    printed.goto("/admin/")
    expect(printed.get_by_role("heading", level=1)).to_have_text(words("navigation.overview"))
    expect(printed.locator(".status")).to_have_attribute("data-tone", "good")
    printed.reload()
    expect(printed).to_have_url(fresh.url("/admin/"))


def test_one_signs_out_and_in_again(server: Server, visitor: Visitor) -> None:
    visit = visitor(server, signed_in=False)
    visit.witness.expects(403)
    page = visit.open("/admin/models")
    expect(page).to_have_url(re.compile("/admin/login"))
    expect(page.locator("#password")).to_be_focused()
    submit(page, "wrong wrong wrong")
    expect(page.locator("#problem")).to_have_text(words("login.wrong"))
    expect(page.locator("#password")).to_be_focused()
    submit(page, PASSWORD)
    expect(page).to_have_url(server.url("/admin/models"))
    page.get_by_role("button", name=words("navigation.leave")).click()
    expect(page).to_have_url(re.compile("/admin/login"))
    page.goto("/admin/")
    expect(page).to_have_url(re.compile("/admin/login"))
    assert [cookie for cookie in visit.context.cookies() if cookie["value"]] == []


def test_the_printed_address_is_worth_nothing_afterwards(server: Server, visitor: Visitor) -> None:
    visit = visitor(server, signed_in=False)
    page = visit.context.new_page()
    page.goto(server.setup)
    expect(page).to_have_url(re.compile("/admin/login"))


@pytest.mark.parametrize("phone", [False, True], ids=["wide", "phone"])
def test_the_overview_says_what_to_do_next_until_the_first_request_fills_its_chart(
    tmp_path: Path, visitor: Visitor, phone: bool
) -> None:
    with serving(tmp_path) as own:
        page = visitor(own, phone=phone).open("/admin/")
        steps = page.locator("section[aria-labelledby=steps-title]")
        for name, address in (("chat", "/admin/chat"), ("connect", "/admin/connect"), ("models", "/admin/models")):
            expect(steps.locator(f"a[href='{address}']"), name).to_be_visible()
        chart = page.locator(".chart[role=img]")
        expect(chart).to_be_hidden()
        expect(page.locator("#range")).to_be_hidden()
        check(axe(page))
        check(look(page, *LAYOUT_CALLS))
        own.reply("Count to three.", max_tokens=20)
        expect(chart).to_be_visible()
        expect(steps).to_be_hidden()
        check_shifts(page)
        page.reload()
        expect(steps).to_be_hidden()
        page.close()


def test_the_console_tells_the_way(server: Server) -> None:
    assert f"{server.address}/v1" in server.said
    assert f"{server.address}/admin/" in server.said
    assert server.setup in server.said
    assert server.setup.partition("#")[2] not in server.log.read_text(encoding="utf-8")
