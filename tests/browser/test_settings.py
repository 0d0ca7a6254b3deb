"""The settings as a person changes them: refusals are explained, and changes from elsewhere appear."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from app.i18n.catalogs import read_words
from tests.browser.conftest import Visitor
from tests.browser.server import MODEL, Server, serving
from tests.browser.witness import is_settled

words = read_words()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server whose model folders are not set by an environment variable."""
    with serving(tmp_path_factory.mktemp("settings")) as running:
        yield running


def stored(server: Server, name: str, address: str = "/admin/api/settings") -> Any:
    """Return a setting's value as the server reports it."""
    return next(row["value"] for row in server.call("GET", address)["settings"] if row["name"] == name)


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


def test_a_new_key_can_be_copied_on_a_phone(server: Server, visitor: Visitor) -> None:
    page = visitor(server, phone=True).open("/admin/settings")
    page.locator("#key-name").fill("phone")
    page.locator("#keys button[type=submit]").click()
    expect(page.get_by_role("button", name=words("keys.copy"), exact=True)).to_be_in_viewport(ratio=1)
    page.get_by_role("button", name=words("keys.revoke_named", name="phone")).click()
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


def test_what_is_not_saved_stays_when_another_tab_saves_and_the_rest_follows(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    here, there = visit.open(f"/admin/drafts/{MODEL}"), visit.open(f"/admin/drafts/{MODEL}")
    try:
        there.locator("#policy").select_option("auto")
        here.locator("#acceptance").select_option("rejection")
        here.get_by_role("button", name=words("drafts.save")).click()
        expect(here.locator(".toast")).to_have_text(re.compile(".+"))
        expect(there.locator("#acceptance")).to_have_value("rejection")
        expect(there.locator("#policy")).to_have_value("auto")
    finally:
        server.call("PATCH", f"/admin/api/models/{MODEL}/settings", {"acceptance": None, "policy": None})


def test_saving_a_choice_keeps_what_was_saved_unseen_by_this_tab(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    visit.witness.is_offline = True
    page = visit.context.new_page()
    page.route("**/admin/api/live?*", lambda route: route.abort())
    page.goto(f"/admin/drafts/{MODEL}")
    is_settled(page)
    address = f"/admin/api/models/{MODEL}/settings"
    try:
        server.call("PATCH", address, {"acceptance": "rejection"})
        page.locator("#policy").select_option("auto")
        page.get_by_role("button", name=words("drafts.save")).click()
        expect(page.locator("#acceptance")).to_have_value("rejection")
        assert stored(server, "policy", address) == "auto"
        assert stored(server, "acceptance", address) == "rejection"
    finally:
        server.call("PATCH", address, {"acceptance": None, "policy": None})


def test_settings_are_found_by_their_words_and_defaults_are_placeholders(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/settings")
    expect(page.locator("#setting-queue_limit")).to_have_value("")
    expect(page.locator("#setting-queue_limit")).to_have_attribute("placeholder", "128")
    page.locator("#find").fill("no such words")
    expect(page.get_by_role("status").filter(has_text=words("settings.no_match"))).to_be_visible()
    expect(page.locator("section.card:visible")).to_have_count(0)
    page.locator("#find").fill("memory ceiling")
    expect(page.get_by_text(words("settings.no_match"))).to_be_hidden()
    expect(page.locator("#setting-memory_limit")).to_be_visible()
    expect(page.locator("#setting-port, #keys, #sessions").filter(visible=True)).to_have_count(0)
    default = words("settings.default_of", name=words("settings.memory_limit"))
    page.locator("#setting-memory_limit").fill("1.5")
    page.locator("#setting-memory_limit").blur()
    try:
        expect(page.locator("#setting-memory_limit")).to_have_value("1.5")
        expect(page.get_by_role("button", name=default)).to_be_visible()
        assert stored(server, "memory_limit") == 1_500_000_000
        slider = page.get_by_role("slider", name=words("settings.memory_limit"))
        expect(slider).to_have_value("1.5")
        slider.focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#setting-memory_limit")).to_have_value("1.6")
        page.locator("#setting-memory_limit").fill("")
        page.locator("#setting-memory_limit").blur()
        expect(page.get_by_role("button", name=default)).to_be_hidden()
        assert stored(server, "memory_limit") is None
    finally:
        server.call("PATCH", "/admin/api/settings", {"memory_limit": None})


def test_an_empty_field_shows_what_counts_and_a_refusal_speaks_in_the_unit_of_its_field(
    server: Server, visitor: Visitor
) -> None:
    visit = visitor(server)
    visit.witness.expects(422)
    page = visit.open("/admin/settings")
    ceiling = server.until("state", lambda state: state["memory"]["ceiling_bytes"])["memory"]["ceiling_bytes"] / 1e9
    field = page.locator("#setting-memory_limit")
    expect(field).to_have_attribute("placeholder", words("settings.automatic_value", value=f"{ceiling:.1f}"))
    expect(page.get_by_role("slider", name=words("settings.memory_limit"))).to_have_value(f"{ceiling:.1f}")
    expect(page.locator("#setting-prefix_cache_memory")).to_have_attribute("placeholder", words("settings.automatic"))
    expect(page.get_by_role("slider", name=words("settings.prefix_cache_memory"))).to_have_value("0")
    expect(page.locator("#setting-idle_seconds")).to_have_attribute("placeholder", "1 hr")
    field.fill("0.001")
    field.blur()
    expect(page.locator("#setting-memory_limit-problem")).to_have_text(words("invalid.greater_than_equal", ge=0.01))
    expect(field).to_have_value("0.001")


def test_a_number_may_have_a_comma_and_one_that_is_none_is_refused_as_it_stands(
    server: Server, visitor: Visitor
) -> None:
    page = visitor(server).open("/admin/settings")
    for name, typed, problem in (
        ("memory_limit", "2,5", ""),
        ("drain_seconds", "０．７", ""),
        ("prefix_cache_disk", "1,000", "invalid.float_parsing"),
        ("max_rows", "4,5", "invalid.int_parsing"),
        ("max_requests", "many", "invalid.int_parsing"),
        ("queue_limit", "1,024", ""),
    ):
        page.locator(f"#setting-{name}").focus()
        page.keyboard.type(typed)
        page.keyboard.press("Tab")
        expect(page.locator(f"#setting-{name}-problem")).to_have_text(words(problem) if problem else "")
        if problem:
            expect(page.locator(f"#setting-{name}")).to_have_value(typed)
    try:
        expect(page.locator("#setting-memory_limit")).to_have_value("2.5")
        expect(page.locator("#setting-drain_seconds")).to_have_value("0.7")
        expect(page.locator("#setting-queue_limit")).to_have_value("1024")
        assert (stored(server, "memory_limit"), stored(server, "drain_seconds")) == (2_500_000_000, 0.7)
        assert (stored(server, "prefix_cache_disk"), stored(server, "queue_limit")) == (10, 1024)
    finally:
        reset = {"memory_limit": None, "drain_seconds": None, "queue_limit": None}
        server.call("PATCH", "/admin/api/settings", reset)


def test_a_setting_that_waits_offers_a_restart_from_which_the_page_comes_back_signed_in(
    own: Server, visitor: Visitor
) -> None:
    visit = visitor(own)
    visit.witness.is_offline = True
    assert visit.open("/admin/settings").get_by_text("paceline restart").count(), "its port is another one each time"
    own.kill()
    own.restart()
    page = visit.open("/admin/settings")
    row = page.locator("[data-name=prefix_cache_days]")
    restart = row.get_by_role("button", name=words("settings.restart"))
    expect(restart).to_be_hidden()
    row.locator("#setting-prefix_cache_days").fill("3")
    row.locator("#setting-prefix_cache_days").blur()
    try:
        page.route("**/admin/api/restart", lambda route: route.fulfill(json={"new_port": 9}), times=1)
        restart.click()
        page.locator("#confirm-yes").click()
        expect(row.get_by_role("status").get_by_role("link")).to_have_attribute("href", "http://127.0.0.1:9")
        restart.click()
        page.locator("#confirm-yes").click()
        expect(row.get_by_role("status")).to_have_text(words("settings.restarting"))
        expect(restart).to_be_hidden(timeout=60_000)
        expect(row.locator("#setting-prefix_cache_days")).to_have_value("3")
        expect(row.get_by_text(words("settings.waits"))).to_be_hidden()
    finally:
        own.call("PATCH", "/admin/api/settings", {"prefix_cache_days": None})


def test_folders_are_added_and_removed_one_by_one_and_a_wrong_one_stays_in_its_field(
    tmp_path: Path, own: Server, visitor: Visitor
) -> None:
    visit = visitor(own)
    visit.witness.expects(422)
    page = visit.open("/admin/settings")
    row = page.locator("[data-name=model_dirs]")
    field, add = row.locator("#setting-model_dirs"), row.get_by_role("button", name=words("settings.add"), exact=True)
    for name in ("one", "two, too"):
        (tmp_path / name).mkdir()
        field.fill(str(tmp_path / name))
        add.click()
        expect(field).to_have_value("")
    field.fill("/no/such/folder")
    page.keyboard.press("Enter")
    expect(row.get_by_role("alert")).not_to_be_empty()
    with page.expect_response(lambda answer: answer.request.method == "GET" and "/settings" in answer.url):
        own.call("PATCH", "/admin/api/settings", {"queue_limit": 77})
    expect(page.locator("#setting-queue_limit")).to_have_value("77")
    assert row.get_by_role("alert").inner_text(), "what another tab changes takes no reason away"
    expect(field).to_have_value("/no/such/folder")
    expect(row.locator("code")).to_have_text([str(tmp_path / "one"), str(tmp_path / "two, too")])
    with page.expect_response(lambda answer: answer.request.method == "PATCH"):
        row.get_by_role("button", name=words("settings.remove_entry", entry=str(tmp_path / "one"))).click()
    expect(row.locator("code")).to_have_text([str(tmp_path / "two, too")])
    assert stored(own, "model_dirs") == [str(tmp_path / "two, too")]
    (tmp_path / "two, too").rmdir()
    page.reload()
    expect(row.get_by_text(words("models.folder_missing", folder=tmp_path / "two, too"))).to_be_visible()


def test_drafters_are_suggested_from_what_is_there_and_another_tab_follows(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    here, there = visit.open(f"/admin/models/{MODEL}"), visit.open(f"/admin/models/{MODEL}")
    try:
        offered = here.locator("#setting-drafts-list option").evaluate_all("(all) => all.map((each) => each.value)")
        assert offered
        drafter = "demo-assistant-eagle3"
        assert drafter in offered
        there.locator("#setting-max_tokens").fill("77")
        here.locator("#setting-drafts").fill(drafter)
        here.keyboard.press("Enter")
        expect(there.locator("[data-name=drafts] code")).to_have_text(drafter)
        expect(there.locator("#setting-max_tokens")).to_have_value("77")
        page = visit.open("/admin/settings")
        expect(page.locator(f"#setting-drafts-list option[value='{MODEL}={drafter}']")).to_have_count(1)
    finally:
        server.call("PATCH", f"/admin/api/models/{MODEL}/settings", {"drafts": None})
