"""By keyboard alone: every control can be reached and seen, menus and dialogs open and close, a chat is sent."""

import pytest
from playwright.sync_api import Page, Route, expect

from app.i18n.catalogs import read_words
from tests.browser.conftest import Visitor
from tests.browser.places import PLACES, Place
from tests.browser.scene import QUESTION
from tests.browser.server import MODEL, Server

words = read_words()
MOST_STEPS = 150

FOCUS = """() => {
  const node = document.activeElement;
  if (!node || node === document.body) return null;
  const style = getComputedStyle(node);
  const around = getComputedStyle(node.closest("label, .box, .choice") ?? node);
  const hasLine = (each) => each.outlineStyle !== "none" && parseFloat(each.outlineWidth) >= 2;
  const isSeen = (each) => hasLine(each) || each.boxShadow !== "none";
  const box = node.getBoundingClientRect();
  return {
    name: node.outerHTML.slice(0, 140),
    isSeen: isSeen(style) || isSeen(around),
    isInView: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
  };
}"""

PLACE = "() => [...document.querySelectorAll('*')].indexOf(document.activeElement)"

REACHABLE = """() => {
  const isReached = (each) => each.checkVisibility({ visibilityProperty: true }) && !each.disabled && each.tabIndex >= 0
    && !each.closest(".hidden") && !(each.type === "radio" && !each.checked);
  return [...document.querySelectorAll("a[href], button, input, select, textarea, summary")].filter(isReached).length;
}"""


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_the_tab_key_reaches_every_control_and_shows_where_it_is(
    server: Server, visitor: Visitor, place: Place
) -> None:
    page = visitor(server, signed_in=place.signed_in).open(place.address(server))
    if place.name == "chat":  # the page focuses the draft once it knows that there is no conversation to open
        expect(page.locator("#draft")).to_be_focused()
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.locator("body").evaluate("(body) => { body.tabIndex = -1; body.focus(); body.removeAttribute('tabindex'); }")
    page.keyboard.press("Tab")
    assert "skip" in page.evaluate(FOCUS)["name"]
    seen = {}
    wanted = page.evaluate(REACHABLE)
    for _ in range(MOST_STEPS):
        focus = page.evaluate(FOCUS)
        if focus is None:
            break
        assert focus["isSeen"], focus["name"]
        assert focus["isInView"], focus["name"]
        seen[
            page.evaluate(
                "() => { const all = [...document.querySelectorAll('*')]; return all.indexOf(document.activeElement); }"
            )
        ] = focus
        page.keyboard.press("Tab")
    assert len(seen) >= wanted


def test_the_first_key_skips_to_the_content(page: Page) -> None:
    page.locator("body").evaluate("(body) => { body.tabIndex = -1; body.focus(); body.removeAttribute('tabindex'); }")
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name=words("page.skip"))
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("#content")).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")


def test_pages_models_and_actions_are_found_by_typing(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/requests")
    page.keyboard.press("Control+k")
    field = page.get_by_role("combobox", name=words("palette.title"))
    options = page.locator("#palette-list").get_by_role("option")
    expect(field).to_be_focused()
    field.fill("set page")
    page.keyboard.press("Enter")
    page.wait_for_url("**/admin/settings")

    page.get_by_role("button", name=words("palette.title")).click()
    expect(field).to_be_focused()
    field.fill(f"{MODEL} model")
    expect(options.first).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowDown")
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowUp")
    field.fill("no such thing anywhere")
    expect(page.get_by_text(words("palette.none"))).to_be_visible()
    field.fill(words("palette.chat", model=MODEL))
    options.first.click()
    page.wait_for_url(f"**/admin/chat?model={MODEL}")


def test_drafting_benchmarks_and_settings_are_found_by_typing(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/requests")
    field = page.get_by_role("combobox", name=words("palette.title"))
    places = {
        f"{MODEL} {words('model.tab_drafts')}": f"**/admin/drafts/{MODEL}",
        f"{MODEL} {words('model.tab_pays')}": f"**/admin/pays/{MODEL}",
        words("settings.prefix_cache_days"): "**/admin/settings#setting-prefix_cache_days",
    }
    for typed, address in places.items():
        page.keyboard.press("Control+k")
        field.fill(typed)
        expect(page.locator("#palette-list").get_by_role("option")).to_have_count(1)
        page.keyboard.press("Enter")
        page.wait_for_url(address)
    expect(page.locator("#setting-prefix_cache_days")).to_be_in_viewport()


def test_the_highlighted_entry_stays_highlighted_when_the_models_arrive(page: Page) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/admin/api/models", hold)
    field = page.get_by_role("combobox", name=words("palette.title"))
    options = page.locator("#palette-list").get_by_role("option")
    with page.expect_request("**/admin/api/models"):
        page.keyboard.press("Control+k")
    field.press("ArrowUp")
    highlighted = page.locator("#palette-list [aria-selected=true]")
    action, count = highlighted.inner_text(), options.count()
    assert action == options.last.inner_text()
    held[0].continue_()
    expect(options).not_to_have_count(count)
    assert highlighted.inner_text() == action
    page.keyboard.press("Escape")


def test_the_palette_is_closed_as_it_was_opened_and_leaves_other_dialogs_alone(page: Page) -> None:
    field = page.get_by_role("combobox", name=words("palette.title"))
    page.keyboard.press("Control+k")
    expect(field).to_be_visible()
    page.keyboard.press("Control+k")
    expect(field).to_be_hidden()
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    expect(field).to_be_hidden()
    page.get_by_role("button", name=words("overview.restart"), exact=True).click()
    page.keyboard.press("Control+k")
    expect(field).to_be_hidden()
    page.keyboard.press("Escape")


def test_a_dialog_takes_the_focus_and_escape_gives_it_back(page: Page) -> None:
    opener = page.get_by_role("button", name=words("overview.restart"), exact=True)
    opener.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    for _ in range(4):
        assert page.evaluate("['BODY', 'BUTTON'].includes(document.activeElement.tagName)")
        page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(opener).to_be_focused()
    expect(page.locator(".status")).to_have_attribute("data-tone", "good")


def test_the_menu_of_a_phone_opens_and_leads_on(server: Server, visitor: Visitor) -> None:
    page = visitor(server, phone=True).open("/admin/")
    more = page.get_by_role("button", name=words("navigation.more"))
    settings = page.get_by_role("link", name=words("navigation.settings"), exact=True)
    expect(settings).to_be_hidden()
    more.focus()
    page.keyboard.press("Enter")
    expect(more).to_have_attribute("aria-expanded", "true")
    expect(settings).to_be_visible()
    settings.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(words("settings.title"))


def test_a_chat_is_sent_stopped_and_put_away_by_keyboard(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    visit.witness.expects(409)  # the reply may have ended by itself before it is cancelled
    page = visit.open("/admin/chat")
    expect(page.locator("#draft")).to_be_focused()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Slowly.")
    expect(page.locator("#draft")).to_have_value(f"{QUESTION}\nSlowly.")
    page.keyboard.press("Enter")
    reply = page.locator('article[data-role="assistant"]')
    expect(reply.locator(".body")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(reply.locator("footer dl")).to_be_visible()
    expect(page.locator("#draft")).to_have_value("")
    listed = page.locator(".conversations li[data-current=true]")  # another conversation has the same title
    delete = listed.get_by_role("button", name=words("chat.delete_named", title=QUESTION))
    delete.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(delete).to_be_focused()
    page.keyboard.press("Enter")
    page.locator("#confirm-yes").focus()
    page.keyboard.press("Enter")
    expect(page.locator('article[data-role="assistant"]')).to_have_count(0)


def test_a_question_that_was_closed_and_asked_again_at_once_is_answered_once(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/chat")
    expect(page.locator("#draft")).to_be_focused()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator('article[data-role="assistant"] footer dl')).to_be_visible()
    listed = page.locator(".conversations li[data-current=true]")
    delete = listed.get_by_role("button", name=words("chat.delete_named", title=QUESTION))
    deletions = []
    page.on("request", lambda request: deletions.append(request.url) if request.method == "DELETE" else None)
    delete.evaluate(
        """(button) => {
          const box = document.getElementById("confirm");
          for (const answer of ["no", "yes"]) {
            button.click();
            box.close(answer);  // its event comes only after all of this
          }
        }"""
    )
    expect(page.locator('article[data-role="assistant"]')).to_have_count(0)
    page.reload()
    assert len(deletions) == 1
