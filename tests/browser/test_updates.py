"""A notice of a newer version is on every page, with the command that installs it, until it is dismissed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import expect

from app.i18n.catalogs import languages, read_words
from tests.admin.test_updates import Releases
from tests.browser.conftest import Visitor
from tests.browser.server import Server, serving
from tests.browser.test_pages import LAYOUT_CALLS, axe, check, check_shifts, look

words = read_words()


@contextmanager
def outdated_server(folder: Path) -> Iterator[tuple[Server, Releases]]:
    """Yield a server that is older than the latest release, and the stand-in for the releases that it finds."""
    (folder / "releases").mkdir()
    releases = Releases(folder / "releases")
    releases.tell("0.10.0")
    with serving(folder / "server", PATH=releases.path) as running:
        yield running, releases


@pytest.fixture(scope="module")
def outdated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with outdated_server(tmp_path_factory.mktemp("updates")) as (running, _):
        yield running


def test_a_newer_version_is_told_once_asked_for_and_put_away(tmp_path: Path, visitor: Visitor) -> None:
    with outdated_server(tmp_path) as (outdated, releases):
        visit = visitor(outdated)
        visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = visit.open("/admin/settings")
        expect(page.locator(".news")).to_have_count(0)
        assert releases.asked == 0
        page.locator("#setting-check_updates").click()
        expect(page.get_by_role("status").get_by_text(words("updates.newer", version="0.10.0"))).to_be_visible()

        page.goto("/admin/")
        notice = page.locator(".news")
        expect(notice).to_contain_text(words("updates.newer", version="0.10.0"))
        state = outdated.call("GET", "/admin/api/state")
        assert state["newer"] == "0.10.0"
        notice.get_by_role("button", name=words("updates.copy")).click()
        expect(page.get_by_text(words("core.copied"))).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == state["update_command"]
        notice.get_by_role("button", name=words("updates.put_away")).click()
        expect(notice).to_be_hidden()
        page.goto("/admin/models")
        expect(page.locator("h1")).to_be_visible()
        expect(notice).to_have_count(0)

        releases.tell("0.10.0", "0.20.0")
        page.goto("/admin/settings")
        page.locator("#setting-check_updates").click()
        expect(page.get_by_role("status").get_by_text(words("updates.newer", version="0.10.0"))).to_have_count(0)
        page.locator("#setting-check_updates").click()
        expect(page.get_by_role("status").get_by_text(words("updates.newer", version="0.20.0"))).to_be_visible()
        page.goto("/admin/models")
        expect(notice).to_contain_text("0.20.0")
        page.close()


@pytest.mark.parametrize("language", languages())
def test_the_notice_speaks_every_language_and_fits_a_phone(outdated: Server, visitor: Visitor, language: str) -> None:
    outdated.call("PATCH", "/admin/api/settings", {"check_updates": True})
    outdated.until("updates", lambda update: update["outcome"] == "newer")
    visit = visitor(outdated, phone=True)
    visit.context.add_cookies([{"name": "paceline_language", "value": language, "url": outdated.url("/admin")}])
    page = visit.open("/admin/models")
    version = outdated.call("GET", "/admin/api/state")["newer"]
    expect(page.locator(".news p")).to_have_text(read_words(language)("updates.newer", version=version))
    check_shifts(page)
    check(look(page, *LAYOUT_CALLS))
    check(axe(page))
