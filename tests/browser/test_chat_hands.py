"""The chat in a person's hands: where the focus goes, a phone's keyboard, files and pastes, a second window."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from app.i18n.catalogs import read_words
from tests.browser.conftest import Visitor
from tests.browser.server import MODEL, Server
from tests.browser.test_chat import REPLIES, STREAM, answer, ask
from tests.browser.test_chat_keeping import ALL, is_saved
from tests.browser.visit import Visit, sends
from tests.browser.witness import is_settled

words = read_words()
ENTRIES = ".conversations .entry"
MINE = '.message[data-role="user"]'
PASTE = """(field, [text, names]) => {
  for (const name of names.length ? names : [""]) {
    const clipboardData = new DataTransfer();
    if (name) clipboardData.items.add(new File([name.repeat(1000)], name, { type: "text/plain" }));
    else clipboardData.setData("text", text);
    field.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
  }
}"""


@pytest.fixture
def visit(server: Server, visitor: Visitor) -> Iterator[Visit]:
    """Yield a visit; afterwards, delete the conversations that the test had."""
    had = {conversation["id"] for conversation in server.call("GET", ALL)["conversations"]}
    yield visitor(server)
    for conversation in server.call("GET", ALL)["conversations"]:
        if conversation["id"] not in had:
            server.call("DELETE", f"{ALL}/{conversation['id']}")


def rename(page: Page, title: str) -> None:
    entry = page.locator(ENTRIES, has_text=title)
    entry.hover()
    entry.get_by_title(words("chat.rename"), exact=True).click()
    expect(page.get_by_label(words("chat.title"), exact=True)).to_be_focused()


def test_the_focus_stays_where_a_person_works(visit: Visit) -> None:
    visit.witness.expects(500)
    page = visit.open("/admin/chat")
    answer(page, "Fine.")
    ask(page, "First?")
    edit = page.locator(MINE).get_by_title(words("chat.edit"), exact=True)
    edit.click()
    page.keyboard.press("Escape")
    expect(edit).to_be_focused()
    page.keyboard.press("Enter")
    page.locator(".editing textarea").fill("First, please?")
    page.locator(".editing").get_by_role("button", name=words("chat.resend")).click()
    expect(page.locator("#draft")).to_be_focused()
    again = page.locator(REPLIES).get_by_title(words("chat.again"), exact=True)
    again.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#draft")).to_be_focused()
    expect(again).to_be_enabled()

    error = {"error": {"message": "broken", "code": "x"}}
    page.unroute(STREAM)
    page.route(STREAM, lambda route: route.fulfill(status=500, json=error))
    again.click()
    expect(page.locator(f"{REPLIES} [role=alert]")).to_have_text(re.compile("broken"))
    page.locator(REPLIES).get_by_title(words("chat.version_before"), exact=True).click()
    expect(page.locator(f"{REPLIES} .body")).to_have_text("Fine.")
    expect(page.locator(f"{REPLIES} .versions button:focus, #draft:focus")).to_have_count(1)

    is_saved(page)
    rename(page, "First?")
    page.keyboard.type("Renamed")
    page.keyboard.press("Enter")
    renamed = page.locator(ENTRIES, has_text="Renamed").locator(".open")
    expect(renamed).to_be_focused()
    rename(page, "Renamed")
    page.keyboard.press("Escape")
    expect(renamed).to_be_focused()
    page.get_by_role("button", name=words("chat.new")).click()
    page.unroute(STREAM)
    answer(page, "Fine.")
    ask(page, "Second?")
    entry = page.locator(ENTRIES, has_text="Renamed")
    entry.hover()
    entry.get_by_title(words("chat.delete"), exact=True).click()
    page.locator("#confirm-yes").click()
    expect(entry).to_have_count(0)
    expect(page.locator(f"{ENTRIES} .open:focus")).to_have_count(1)


def test_a_title_is_typed_to_its_end_while_another_conversation_goes_on(visit: Visit, server: Server) -> None:
    def say(number: int, version: int, turn: str, **more: Any) -> None:
        turns = [{"id": turn, "parent": "", "role": "user", "content": "Hello."}]
        server.call("POST", f"{ALL}/{number}/turns", {"version": version, "turns": turns, **more})

    say(71, 0, "a", begin={"title": "Older"})
    say(72, 0, "b", begin={"title": "Newer"})
    page = visit.open("/admin/chat")
    titles = page.locator(".conversations .title")
    expect(titles.first).to_have_text("Newer")
    rename(page, "Newer")
    page.keyboard.type("Half a tit")
    with page.expect_response("**/admin/api/conversations?search=*"):
        say(71, 1, "c")
    expect(page.get_by_label(words("chat.title"), exact=True)).to_be_focused()
    page.keyboard.type("le")
    page.keyboard.press("Enter")
    expect(page.locator(".conversations .title", has_text="Half a title")).to_be_visible()
    expect(titles.first).to_have_text("Older")


def test_a_second_window_waits_for_the_reply_that_the_first_one_gets(visit: Visit) -> None:
    visit.witness.expects(409)
    page = visit.open("/admin/chat")
    page.get_by_label("Speculative decoding", exact=True).select_option("off")  # so it takes seconds on any machine
    page.locator("#draft").fill("Count from 1 to 400.")
    page.locator("#draft").press("Enter")
    expect(page.locator(f"{REPLIES} .body")).to_contain_text("1, 2")
    other = visit.open(page.url.removeprefix(page.url.partition("/admin")[0]))
    expect(other.get_by_text(words("chat.elsewhere"))).to_be_visible()
    expect(other.get_by_role("button", name=words("chat.answer"))).to_be_hidden()
    page.bring_to_front()
    page.keyboard.press("Escape")
    is_saved(page)
    other.bring_to_front()
    expect(other.locator(f"{REPLIES} .body")).to_contain_text("1, 2")
    expect(other.get_by_text(words("chat.elsewhere"))).to_be_hidden()


def test_on_a_phone_return_starts_a_new_line_and_the_button_sends(visit: Visit, server: Server) -> None:
    page = visit.context.browser.new_context(  # type: ignore[union-attr]
        base_url=server.address, has_touch=True, is_mobile=True, storage_state=visit.context.storage_state()
    ).new_page()
    page.goto("/admin/chat")
    is_settled(page)
    answer(page, "Fine.")
    page.locator("#draft").tap()
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    expect(page.locator("#draft")).to_have_value("one\ntwo")
    page.get_by_role("button", name=words("reply.send"), exact=True).tap()
    expect(page.locator(f"{MINE} .body")).to_have_text(re.compile(r"one\s*two"))
    page.context.close()


def test_files_that_come_together_are_all_attached_and_no_text_is_cut_silently(visit: Visit) -> None:
    page = visit.open("/admin/chat")
    answer(page, "Fine.")
    page.locator("#draft").evaluate(PASTE, ["", ["a.txt", "b.txt"]])
    expect(page.locator(".composer .files li")).to_have_count(2)
    ask(page, "Read them.")
    page.locator(MINE).get_by_title(words("chat.edit"), exact=True).click()
    edited = page.locator(".editing textarea")
    edited.evaluate(PASTE, ["a" * 400_001, []])
    expect(page.locator(".toast")).to_have_text(words("chat.paste_large", count="400,000"))
    page.locator(".toast").click()
    draft = page.locator("#draft")
    draft.evaluate("(field) => { field.value = 'a'.repeat(300_000); field.select(); }")
    draft.evaluate(PASTE, ["b" * 300_000, []])
    expect(page.locator(".toast")).to_have_count(0)  # it replaces what is selected


def test_the_loaded_model_answers_first_and_a_waiting_reply_names_its_own(visit: Visit, server: Server) -> None:
    other = "demo-hybrid"

    def only_other_is_loaded(route: Route) -> None:
        listing = route.fetch().json()
        for model in listing["models"]:
            model["state"] = "loaded" if model["id"] == other else "available"
        route.fulfill(json=listing)

    state = server.call("GET", "/admin/api/state")["state"]
    loading = [{"id": other, "fraction": 0.2}]
    page = visit.context.new_page()
    page.route("**/admin/api/models", only_other_is_loaded)
    page.route("**/admin/api/live?*", sends(state=state | {"models": [], "loading": loading}))
    page.route(STREAM, lambda _route: None)
    page.goto("/admin/chat")
    is_settled(page)
    expect(page.locator("#option-model")).to_have_value(other)
    page.locator("#draft").fill("Are you there?")
    page.locator("#draft").press("Enter")
    waiting = page.locator(f"{REPLIES} .waiting")
    expect(waiting).to_have_text(re.compile(re.escape(words("reply.loading", model=other, percent="20%"))))
    page.locator("#option-model").select_option(MODEL)
    expect(waiting).to_have_text(re.compile(re.escape(words("reply.loading", model=other, percent="20%"))))
