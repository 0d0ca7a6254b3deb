"""The settings as somebody changes them: what is refused goes back, what is changed elsewhere is followed."""

import re

from playwright.sync_api import expect

from app.i18n import read_words
from tests.browser.conftest import Visitor
from tests.browser.server import MODEL, Server

words = read_words()


def test_a_refused_switch_goes_back_and_says_why(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    visit.witness.expects(422)
    page = visit.open("/admin/settings")
    switch = page.locator("#setting-require_key")
    switch.click()
    expect(page.locator("#setting-require_key-problem")).not_to_be_empty()
    expect(switch).not_to_be_checked()
    expect(switch.locator("xpath=..")).to_have_text(words("settings.off"))


def test_a_key_that_is_revoked_is_not_offered_for_copying_any_more(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/settings")
    page.locator("#key-name").fill("laptop")
    page.locator("#keys button[type=submit]").click()
    expect(page.locator("#key-text")).to_be_visible()
    page.get_by_role("button", name=words("keys.revoke_named", name="laptop")).click()
    page.locator("#confirm-yes").click()
    expect(page.locator("#key-text")).to_be_hidden()


def test_another_tab_follows_what_is_saved_and_keeps_what_is_written_in_it(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    here, there = visit.open("/admin/settings"), visit.open("/admin/settings")
    there.locator("#setting-max_requests").fill("77")
    here.locator("#setting-queue_limit").fill("99")
    here.locator("#setting-queue_limit").blur()
    try:
        expect(there.locator("#setting-queue_limit")).to_have_value("99")
        expect(there.locator("#setting-max_requests")).to_have_value("77")
    finally:
        server.call("PATCH", "/admin/api/settings", {"queue_limit": None, "max_requests": None})


def test_ticks_that_are_not_saved_stay_when_another_tab_saves(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    here, there = visit.open(f"/admin/drafts/{MODEL}"), visit.open(f"/admin/drafts/{MODEL}")
    try:
        there.locator("#policy").select_option("auto")
        here.locator("#acceptance").select_option("rejection")
        here.get_by_role("button", name=words("drafts.save")).click()
        expect(here.locator(".toast")).to_have_text(re.compile(".+"))
        expect(there.locator("#policy")).to_have_value("auto")
    finally:
        server.call("PATCH", f"/admin/api/models/{MODEL}/settings", {"acceptance": None, "policy": None})


def test_settings_are_found_by_their_words_and_defaults_are_placeholders(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/settings")
    expect(page.locator("#setting-queue_limit")).to_have_value("")
    expect(page.locator("#setting-queue_limit")).to_have_attribute("placeholder", "128")
    page.locator("#find").fill("memory ceiling")
    expect(page.locator("#setting-memory_limit")).to_be_visible()
    expect(page.locator("#setting-port")).to_be_hidden()
    page.locator("#setting-memory_limit").fill("1.5g")
    page.locator("#setting-memory_limit").blur()
    try:
        expect(page.locator("#setting-memory_limit")).to_have_value("1.5 GB")
    finally:
        server.call("PATCH", "/admin/api/settings", {"memory_limit": None})
