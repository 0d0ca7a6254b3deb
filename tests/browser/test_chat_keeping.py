"""The chat loses no text: a server that is killed, two windows, a session that ends, branches, export and import.

Most tests also read the store at the end, since a page can show text that was never saved.
"""

import contextlib
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Locator, Page, Response, Route, expect

from tests.browser.conftest import Visitor
from tests.browser.server import PASSWORD, Server, serving
from tests.browser.test_pages import LAYOUT_CALLS, axe, check, look
from tests.browser.visit import Visit
from tests.browser.witness import is_settled

ALL = "/admin/api/conversations"
COMPLETIONS = "**/v1/chat/completions"
TURNS = re.compile(r"/admin/api/conversations/\d+/turns")
REPLIES = '.message[data-role="assistant"]'
QUESTIONS = '.message[data-role="user"]'
WRITING = ".message[aria-busy=true]"
NOTHING_WAITS = "() => !Object.keys(localStorage).some((name) => name.startsWith('paceline.chat.unsaved'))"
PATIENCE_MS = 90_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("keeping")) as server:
        yield server


@pytest.fixture
def visit(server: Server, visitor: Visitor) -> Visit:
    """Return a visit in which lost connections and answers of 401, 404 and 409 are no problems."""
    server.call("POST", "/admin/api/login", {"password": PASSWORD})  # an earlier test may have signed out everybody
    server.call("DELETE", ALL)
    visit = visitor(server)
    visit.witness.expects(401, 404, 409)
    visit.witness.is_offline = True
    return visit


@pytest.fixture
def chat(visit: Visit) -> Page:
    return opened(visit)


def opened(visit: Visit, path: str = "/admin/chat") -> Page:
    page = visit.open(path)
    page.get_by_label("Temperature").fill("0")
    return page


@contextlib.contextmanager
def stopped(worker: int) -> Iterator[None]:
    """Suspend the worker process during the block."""
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def begin(page: Page) -> None:
    """Send a question whose answer takes seconds on any machine, as drafting is off, and wait for its first words."""
    page.get_by_label("Speculative decoding").select_option(label="No drafting")
    send(page, "Count from 1 to 400.")
    expect(page.locator(f"{REPLIES} .body")).to_contain_text("1, 2, 3")


def send(page: Page, text: str) -> None:
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")


def ask(page: Page, text: str) -> None:
    """Send a question and wait for the end of the reply."""
    count = page.locator(REPLIES).count()
    send(page, text)
    expect(page.locator(REPLIES)).to_have_count(count + 1)
    expect(page.locator(REPLIES).last.locator("footer dl")).to_be_visible()


def texts(page: Page, which: str = ".message") -> list[str]:
    return [text.strip() for text in page.locator(f"{which} .body").all_text_contents()]


def number_of(page: Page) -> str:
    return page.url.partition("#")[2]


def kept(server: Server, number: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = server.call("GET", f"{ALL}/{number}")["turns"]
    return turns


def is_saved(page: Page) -> None:
    """Wait until no turn in the browser is unsaved."""
    page.wait_for_function(NOTHING_WAITS, timeout=PATIENCE_MS)
    expect(page.locator(".unsaved:visible")).to_have_count(0)


def button(page: Page | Locator, name: str) -> Locator:
    return page.get_by_role("button", name=name).and_(page.locator(":visible"))


def test_a_message_sent_while_the_server_is_down_is_there_after_its_restart(server: Server, chat: Page) -> None:
    begin(chat)
    server.kill()
    expect(chat.locator(f"{REPLIES} [role=alert]")).to_contain_text("connection was cut")
    send(chat, "And one more question.")
    expect(chat.locator(".message")).to_have_count(4)
    expect(chat.locator(REPLIES).last.get_by_role("alert")).to_contain_text("does not answer")
    expect(chat.locator(QUESTIONS).last.locator(".unsaved")).to_contain_text("Not saved yet")
    shown = texts(chat)
    server.restart()
    chat.reload()
    expect(chat.locator(".message")).to_have_count(4)
    is_saved(chat)
    assert texts(chat) == shown
    turns = kept(server, number_of(chat))
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
    assert [turn["content"].strip() for turn in turns] == shown
    chat.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    chat.reload()
    expect(chat.locator(".message")).to_have_count(4)
    assert texts(chat) == shown
    button(chat, "Try again").last.click()
    expect(chat.locator(WRITING)).to_have_count(0)
    expect(chat.locator(REPLIES).last.locator("footer dl")).to_be_visible()


STORES_NOTHING = {
    "full": "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); };",
    "closed": "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name,"
    " { get() { throw new DOMException('closed', 'SecurityError'); } });",
}


@pytest.mark.parametrize("storage", STORES_NOTHING)
def test_where_a_browser_stores_nothing_conversations_are_had_and_opened_all_the_same(
    server: Server, visit: Visit, storage: str
) -> None:
    visit.context.add_init_script(STORES_NOTHING[storage])
    chat = opened(visit)
    ask(chat, "Count from 1 to 5.")
    button(chat, "New chat").first.click()
    ask(chat, "Count from 1 to 6.")
    shown = texts(chat)
    page = visit.open(f"/admin/chat#{number_of(chat)}")
    expect(page.locator(".message")).to_have_count(2)
    assert texts(page) == shown
    assert len(server.call("GET", ALL)["conversations"]) == 2


def test_a_reply_goes_on_while_the_page_is_reloaded(server: Server, chat: Page) -> None:
    before = server.call("GET", "/admin/api/requests")["total"]
    begin(chat)
    with stopped(server.worker):
        chat.reload()
        expect(chat.locator(WRITING)).to_contain_text("1, 2, 3")
    expect(chat.locator(f"{REPLIES} footer dl")).to_be_visible(timeout=PATIENCE_MS)
    expect(chat.locator(REPLIES)).to_have_count(1)
    expect(chat.get_by_text("Stopped.")).to_have_count(0)
    is_saved(chat)
    turns = kept(server, number_of(chat))
    assert [turn["content"].strip() for turn in turns] == texts(chat)
    assert (turns[1]["figures"]["finish"], turns[1]["figures"].get("stopped")) == ("stop", None)
    assert server.call("GET", "/admin/api/requests")["total"] == before + 1, "it was asked for once"


def test_a_page_that_is_reloaded_before_its_reply_began_offers_to_ask_again(server: Server, chat: Page) -> None:
    ask(chat, "Count from 1 to 3.")
    with stopped(server.worker):
        send(chat, "Count from 1 to 4.")
        expect(chat.locator(WRITING)).to_have_count(1)
        chat.reload()
        expect(chat.locator(QUESTIONS).last.locator(".body")).to_have_text("Count from 1 to 4.")
    button(chat, "Get a reply").click()
    expect(chat.locator(REPLIES).last.locator("footer dl")).to_be_visible()
    is_saved(chat)
    assert [turn["content"].strip() for turn in kept(server, number_of(chat))] == texts(chat)


def test_a_page_that_stays_open_saves_by_itself_when_the_server_is_back(server: Server, visit: Visit) -> None:
    chat = opened(visit)
    ask(chat, "Count from 1 to 5.")
    is_saved(chat)
    other = opened(visit, f"/admin/chat#{number_of(chat)}")
    server.kill()
    send(chat, "Are you there?")
    expect(chat.locator(".unsaved:visible").first).to_be_visible()
    expect(chat.get_by_text("Paceline does not answer. This page shows")).to_be_visible()
    for part in ("#draft", "#draft-help", f"{REPLIES} >> nth=-1 >> [role=alert]"):
        expect(chat.locator(part)).to_be_in_viewport(ratio=1)
    server.restart()
    for page in (chat, other):  # either page may have sent it
        expect(page.locator(QUESTIONS)).to_have_count(2)
        is_saved(page)
    assert [turn["content"] for turn in kept(server, number_of(chat))][2] == "Are you there?"


def test_a_conversation_that_could_not_be_read_is_opened_when_the_server_answers(visit: Visit) -> None:
    chat = opened(visit)
    ask(chat, "Count from 1 to 3.")
    is_saved(chat)
    address = f"/admin/chat#{number_of(chat)}"
    other = visit.context.new_page()
    other.route(f"**{ALL}/{number_of(chat)}", lambda route: route.abort())
    other.goto(address)
    expect(other.locator("#toasts")).to_contain_text("Paceline does not answer.")
    expect(other.locator(QUESTIONS)).to_have_count(0)
    other.unroute(f"**{ALL}/{number_of(chat)}")
    ask(chat, "Count from 1 to 4.")  # the other page gets news, as when a server comes back
    expect(other.locator(QUESTIONS)).to_have_count(2)
    assert other.url.endswith(address)


def test_a_browser_that_ends_while_the_server_is_down_loses_nothing(server: Server, chat: Page) -> None:
    ask(chat, "Count from 1 to 5.")
    number = number_of(chat)
    is_saved(chat)
    server.kill()
    send(chat, "Are you there?")
    expect(chat.locator(".unsaved:visible").first).to_be_visible()
    context = chat.context
    chat.close()
    server.restart()
    page = context.new_page()
    page.goto("/admin/chat")
    is_settled(page)
    is_saved(page)
    assert [turn["content"] for turn in kept(server, number)][2] == "Are you there?"


def test_two_windows_of_one_conversation_lose_nothing_of_each_other(server: Server, visit: Visit) -> None:
    first = opened(visit)
    ask(first, "Count from 1 to 3.")
    is_saved(first)
    number = number_of(first)
    second = visit.context.new_page()
    second.route("**/admin/api/live?*", lambda route: route.abort())  # this window gets no news of changes
    second.goto(f"/admin/chat#{number}")
    expect(second.locator(".message")).to_have_count(2)
    ask(first, "Spell the word river.")
    is_saved(first)
    ask(second, "Count from 4 to 6.")
    is_saved(second)
    turns = kept(server, number)
    assert sorted(turn["content"] for turn in turns if turn["role"] == "user") == [
        "Count from 1 to 3.", "Count from 4 to 6.", "Spell the word river.",
    ]  # fmt: skip
    assert len(turns) == 6
    expect(second.locator(QUESTIONS).last.locator(".body")).to_have_text("Count from 4 to 6.")
    for page, words in ((first, "1/2"), (second, "2/2")):
        expect(page.locator(QUESTIONS).last.get_by_text(words)).to_be_in_viewport(ratio=1)
    expect(first.locator(QUESTIONS).last.locator(".body")).to_have_text("Spell the word river.")


def test_a_window_follows_what_another_one_writes_and_deletes(visit: Visit) -> None:
    first = opened(visit)
    ask(first, "Count from 1 to 3.")
    second = opened(visit, f"/admin/chat#{number_of(first)}")
    expect(second.locator(".message")).to_have_count(2)
    ask(first, "Spell the word river.")
    expect(second.locator(".message")).to_have_count(4)
    assert texts(second) == texts(first)
    first.locator(".conversations li").first.hover()
    first.locator(".conversations li").first.get_by_title("Delete").click()
    first.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(second.locator("#chat-title")).to_have_text("New chat")
    expect(second.locator(".conversations li")).to_have_count(0)


def test_what_is_written_after_another_window_deleted_it_is_a_conversation_of_its_own(
    server: Server, visit: Visit
) -> None:
    page = visit.context.new_page()
    page.route("**/admin/api/live?*", lambda route: route.abort())
    page.goto("/admin/chat")
    is_settled(page)
    ask(page, "Count from 1 to 3.")
    is_saved(page)
    server.call("DELETE", f"{ALL}/{number_of(page)}")
    ask(page, "Spell the word river.")
    expect(page.locator(".toast")).to_contain_text("deleted in another window")
    is_saved(page)
    assert [turn["content"] for turn in kept(server, number_of(page))] == texts(page)
    assert len(texts(page)) == 4


def test_a_conversation_that_is_deleted_while_a_turn_is_on_its_way_stays_deleted(
    server: Server, visitor: Visitor
) -> None:
    server.call("DELETE", ALL)
    visit = visitor(server)
    visit.witness.expects(409)  # the reply may end as it is cancelled
    page = opened(visit)
    ask(page, "Count from 1 to 3.")
    is_saved(page)
    on_their_way: list[Route] = []

    def hold(route: Route) -> None:
        on_their_way.append(route)

    page.route(TURNS, hold, times=1)
    with page.expect_request(TURNS):
        send(page, "Spell the word river.")
    button(page.locator(".conversations"), "Delete").click()
    button(page.get_by_role("dialog"), "Delete").click()
    page.evaluate("fetch('/admin/api/models').then((response) => response.text())")
    on_their_way.pop().continue_()
    expect(page.locator(".conversations li")).to_have_count(0)
    expect(page.locator(".message")).to_have_count(0)
    page.reload()
    is_settled(page)
    assert server.call("GET", ALL)["conversations"] == []
    expect(page.locator(".conversations li")).to_have_count(0)


def is_change(number: str = "") -> Callable[[Response], bool]:
    """Return a predicate for answers to a PATCH whose address ends with `number`, the conversation's id."""
    return lambda answer: answer.request.method == "PATCH" and answer.url.endswith(number)


def top_p(server: Server, number: str) -> Any:
    return server.call("GET", f"{ALL}/{number}")["options"].get("top_p")


def test_options_are_kept_when_those_of_another_conversation_follow_at_once(server: Server, chat: Page) -> None:
    ask(chat, "Count from 1 to 3.")
    is_saved(chat)
    first = number_of(chat)
    button(chat, "New chat").click()
    ask(chat, "Count from 1 to 4.")
    is_saved(chat)
    second = number_of(chat)
    with chat.expect_response(is_change(second)), chat.expect_response(is_change(first)):
        chat.locator("#option-top_p").fill("0.5")
        chat.locator(".conversations li", has_text="1 to 3").locator(".open").click()
        expect(chat.locator("#chat-title")).to_have_text("Count from 1 to 3.")
        chat.locator("#option-top_p").fill("0.25")
    assert (top_p(server, first), top_p(server, second)) == (0.25, 0.5)


def test_options_that_are_changed_right_before_the_page_is_left_are_kept(server: Server, chat: Page) -> None:
    ask(chat, "Count from 1 to 3.")
    is_saved(chat)
    number = number_of(chat)
    chat.locator("#option-top_p").fill("0.5")
    chat.goto("/admin/")
    server.until("conversations", lambda _: top_p(server, number) == 0.5)


def test_options_that_are_changed_while_the_first_message_is_on_its_way_are_kept(server: Server, chat: Page) -> None:
    on_their_way: list[Route] = []

    def hold(route: Route) -> None:
        on_their_way.append(route)

    chat.route(TURNS, hold, times=1)
    with chat.expect_request(TURNS):
        send(chat, "Count from 1 to 3.")
    chat.locator("#option-top_p").fill("0.5")
    with chat.expect_response(is_change()):
        on_their_way.pop().continue_()
    is_saved(chat)
    assert top_p(server, number_of(chat)) == 0.5
    expect(chat.locator("#option-top_p")).to_have_value("0.5")


def test_options_that_are_changed_while_the_server_is_away_are_kept_when_it_is_back(server: Server, chat: Page) -> None:
    ask(chat, "Count from 1 to 3.")
    is_saved(chat)
    number = number_of(chat)
    chat.route(re.compile(number + "$"), lambda route: route.abort(), times=1)
    with chat.expect_event("requestfailed", lambda request: request.method == "PATCH"):
        chat.locator("#option-top_p").fill("0.5")
    with chat.expect_response(is_change(number)):
        ask(chat, "Count from 1 to 4.")
    assert top_p(server, number) == 0.5
    expect(chat.locator("#option-top_p")).to_have_value("0.5")


def test_an_early_reply_that_is_made_anew_leaves_every_later_turn(server: Server, chat: Page) -> None:
    for limit in range(3, 7):
        ask(chat, f"Count from 1 to {limit}.")
    before = texts(chat)
    button(chat, "Regenerate").first.click()
    expect(chat.locator(".message")).to_have_count(2)
    expect(chat.locator(REPLIES).first).to_contain_text("2/2")
    expect(chat.locator(WRITING)).to_have_count(0)
    is_saved(chat)
    assert len(kept(server, number_of(chat))) == 9
    chat.reload()
    expect(chat.locator(REPLIES).first).to_contain_text("2/2")
    expect(chat.locator(".message")).to_have_count(2)
    previous = button(chat, "Previous version")
    previous.focus()
    chat.keyboard.press("Enter")
    expect(chat.locator(".message")).to_have_count(8)
    assert texts(chat) == before
    expect(button(chat, "Next version")).to_be_focused()
    chat.keyboard.press("ArrowRight")
    expect(chat.locator(".message")).to_have_count(2)
    expect(button(chat, "Previous version")).to_be_focused()
    chat.keyboard.press("ArrowLeft")
    expect(chat.locator(".message")).to_have_count(8)
    expect(chat.locator("p[role=status]").filter(has_text="1/2")).to_have_count(1)


def test_a_chat_with_branches_is_usable_by_everybody_at_every_width(server: Server, visitor: Visitor) -> None:
    chat = opened(visitor(server))
    ask(chat, "Count from 1 to 9.")
    button(chat, "Edit this message").click()
    button(chat, "Save and resend").click()
    expect(chat.locator(QUESTIONS)).to_contain_text("2/2")
    expect(chat.locator(f"{REPLIES} footer dl")).to_be_visible()
    is_saved(chat)
    expect(chat.locator("#chat-options")).to_be_visible()
    phone = visitor(server, phone=True).open(f"/admin/chat#{number_of(chat)}")
    for page, width in ((chat, 1024), (phone, 390), (chat, 1440)):  # narrow windows hide the options
        if page is chat:
            page.set_viewport_size({"width": width, "height": 800})
        expect(page.locator(QUESTIONS).get_by_text("2/2")).to_be_in_viewport(ratio=1)
        expect(page.locator("#option-model")).to_be_in_viewport(ratio=1)
        expect(page.locator("#chat-options")).to_be_visible(visible=width >= 1440)
        figures = page.locator(f"{REPLIES} dl > div:visible")
        if width < 1440:
            assert len({box["y"] for figure in figures.all() if (box := figure.bounding_box())}) == 1, "one line"
        check([*look(page, *LAYOUT_CALLS), *axe(page)])


def test_an_edited_question_is_a_branch_and_the_earlier_one_stays(server: Server, chat: Page) -> None:
    ask(chat, "Count from 1 to 3.")
    ask(chat, "Count from 1 to 4.")
    before = texts(chat)
    button(chat, "Edit this message").first.click()
    expect(chat.locator(".editing:visible")).to_contain_text("The earlier version stays")
    chat.locator(".editing textarea:visible").fill("Count from 2 to 6.")
    button(chat, "Save and resend").click()
    expect(chat.locator(".message")).to_have_count(2)
    expect(chat.locator(f"{REPLIES} .body")).to_contain_text("2, 3, 4")
    expect(chat.locator(f"{REPLIES} footer dl")).to_be_visible()
    is_saved(chat)
    assert len(kept(server, number_of(chat))) == 6
    button(chat, "Previous version").click()
    expect(chat.locator(".message")).to_have_count(4)
    assert texts(chat) == before


def sign_in(page: Page) -> None:
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()


@pytest.mark.parametrize("refusal", ["in time", "too late"])
def test_a_session_that_ended_leads_to_the_sign_in_once_and_back_with_all_that_was_written(
    server: Server, visit: Visit, refusal: str
) -> None:
    page = visit.context.new_page()
    page.route("**/admin/api/live**", lambda route: route.abort())  # or the live feed would notice first
    page.goto("/admin/chat")
    is_settled(page)
    ask(page, "Count from 1 to 3.")
    is_saved(page)
    number = number_of(page)
    sign_ins: list[str] = []
    page.on("framenavigated", lambda frame: sign_ins.append(frame.url) if "/admin/login" in frame.url else None)
    if refusal == "too late":  # the refusal to save comes first; the page leaves while it still waits for the reply
        page.route(COMPLETIONS, lambda _route: None)
    server.call("DELETE", "/admin/api/sessions")
    send(page, "Do not lose me.")
    page.wait_for_url("**/admin/login?*")
    expect(page.get_by_text("Your session has expired.")).to_be_visible()
    assert len(sign_ins) == 1
    sign_in(page)
    page.wait_for_url(f"**/admin/chat#{number}")
    expect(page.locator(QUESTIONS).last.locator(".body")).to_have_text("Do not lose me.")
    is_saved(page)
    contents = [turn["content"] for turn in session_of(server, page, f"{ALL}/{number}")["turns"]]
    assert contents == texts(page)[: len(contents)]
    assert "Do not lose me." in contents
    page.unroute(COMPLETIONS)
    button(page, "Get a reply").click()
    expect(page.locator(REPLIES)).to_have_count(2)
    expect(page.locator(REPLIES).last.locator("footer dl")).to_be_visible()


def test_what_is_typed_survives_a_session_that_ends(server: Server, visit: Visit) -> None:
    page = opened(visit)
    page.locator("#draft").fill("Half a thought")
    server.call("DELETE", "/admin/api/sessions")
    page.wait_for_url("**/admin/login?*")
    sign_in(page)
    page.wait_for_url("**/admin/chat")
    expect(page.locator("#draft")).to_have_value("Half a thought")


def session_of(server: Server, page: Page, path: str) -> Any:
    """Return the JSON at `path` as the page's session reads it."""
    cookies = {cookie["name"]: cookie["value"] for cookie in page.context.cookies([f"{server.address}/admin/"])}
    return httpx2.get(server.url(path), cookies=cookies).json()


def test_a_stopped_reply_is_announced_as_such_and_has_its_figures(server: Server, chat: Page) -> None:
    chat.get_by_label("Speculative decoding", exact=True).select_option("dflash")  # the governor might not draft
    chat.get_by_label("Draft length").fill("1")
    send(chat, "Count from 1 to 400.")
    expect(chat.locator(f"{REPLIES} .body")).to_contain_text("1, 2, 3, 4, 5, 6, 7, 8, 9, 10")
    chat.keyboard.press("Escape")
    expect(chat.locator("p[role=status]").filter(has_text="Stopped.")).to_have_count(1)
    expect(chat.get_by_text("The reply is complete.")).to_have_count(0)
    figures = chat.locator(f"{REPLIES} footer dl")
    for words in ("tokens/s", "accepted", "tokens per step"):
        expect(figures).to_contain_text(words)
    is_saved(chat)
    reply = kept(server, number_of(chat))[1]
    assert reply["figures"]["stopped"]
    assert reply["figures"]["timings"]["predicted_per_second"] > 0


def test_a_store_that_cannot_write_is_told_and_tried_again(server: Server, chat: Page, visit: Visit) -> None:
    visit.witness.expects(503)
    error = json.dumps({"error": {"message": "The disk is full.", "code": "store_unavailable"}})
    refuse = True

    def answer(route: Route) -> None:
        if refuse:
            route.fulfill(status=503, content_type="application/json", body=error)
        else:
            route.continue_()

    chat.route(TURNS, answer)
    send(chat, "Count from 1 to 3.")
    expect(chat.locator(QUESTIONS).locator(".unsaved")).to_have_text("Not saved yet: The disk is full.")
    refuse = False
    is_saved(chat)
    assert [turn["role"] for turn in kept(server, number_of(chat))] == ["user", "assistant"]


def test_a_conversation_is_exported_with_all_its_branches_and_imported_again(
    server: Server, chat: Page, tmp_path: Path
) -> None:
    ask(chat, "Count from 1 to 3.")
    button(chat, "Regenerate").click()
    expect(chat.locator(REPLIES)).to_contain_text("2/2")
    expect(chat.locator(WRITING)).to_have_count(0)
    is_saved(chat)
    with chat.expect_download() as markdown:
        button(chat, "Markdown").click()
    assert markdown.value.suggested_filename == "Count-from-1-to-3.md"
    question, reply = texts(chat)
    assert markdown.value.path().read_text("utf-8") == (
        f"# Count from 1 to 3.\n\n## You\n\n{question}\n\n## Model\n\n{reply}\n"
    )
    with chat.expect_download() as whole:
        button(chat, "JSON").click()
    path = tmp_path / whole.value.suggested_filename
    whole.value.save_as(path)
    turns = kept(server, number_of(chat))
    server.call("DELETE", ALL)
    expect(chat.locator("#chat-title")).to_have_text("New chat")
    chat.locator("#chat-import").set_input_files(path)
    expect(chat.locator(".toast").last).to_have_text("Conversation imported")
    expect(chat.locator(REPLIES)).to_contain_text("2/2")
    assert texts(chat) == [question, reply]
    assert [turn["content"] for turn in kept(server, number_of(chat))] == [turn["content"] for turn in turns]


FOREIGN = {
    "no JSON": "<html>",
    "another program's": json.dumps({"messages": [{"role": "user", "content": "x"}]}),
    "null": "null",
    "a later form": json.dumps({"format": "paceline.conversation", "form": 2}),
}
TURN = {"id": "a", "parent": "", "role": "user", "content": "x"}
WHOLE = {"format": "paceline.conversation", "form": 1, "title": "x", "model": "", "options": {}, "turns": [TURN]}
REFUSED = {
    "no turns": {"turns": None},
    "a turn that follows itself": {"turns": [{**TURN, "parent": "a"}]},
    "markup in an id": {"turns": [{**TURN, "id": "<img src=x onerror=alert(1)>"}]},
    "an unknown role": {"turns": [{**TURN, "role": "system"}]},
    "figures that are none": {"turns": [{**TURN, "figures": {"timings": "fast"}}]},
    "no title": {"title": ""},
    "options out of range": {"options": {"temperature": 99}},
}


def test_a_file_that_is_no_conversation_of_ours_is_refused_in_words(
    server: Server, chat: Page, visit: Visit, tmp_path: Path
) -> None:
    visit.witness.expects(400)
    files = {name: (text, "not a conversation exported from Paceline") for name, text in FOREIGN.items()}
    files |= {name: (json.dumps(WHOLE | wrong), "cannot be imported:") for name, wrong in REFUSED.items()}
    for name, (text, words) in files.items():
        path = tmp_path / "file.json"
        path.write_text(text, encoding="utf-8")
        chat.locator("#chat-import").set_input_files(path)
        expect(chat.locator(".toast").last, name).to_contain_text(words)
        chat.locator(".toast").last.click()
    assert server.call("GET", ALL) == {"conversations": []}


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(2400)])])
def test_no_word_is_lost_when_server_and_worker_are_killed_again_and_again(
    server: Server, chat: Page, visit: Visit, kills: int
) -> None:
    """Kill server or worker once per chat, at a random moment; at the end, the store has all that each chat showed."""
    visit.witness.expects(503)  # while the worker restarts
    dice = random.Random(4)
    said: dict[str, list[str]] = {}
    for at in range(kills):
        button(chat, "New chat").click()
        sent = [f"{at}: count from 1 to {dice.choice((20, 100, 200))}."]
        send(chat, sent[0])
        chat.wait_for_timeout(dice.choice((0, 30, 200, 800, 2000)))
        victim = dice.choice(("server", "worker"))
        if victim == "server":
            server.kill()
        else:
            kill_worker(server)
        if dice.random() < 0.5:
            is_written(chat)
            sent.append(f"{at}: and what now?")
            send(chat, sent[1])
        if dice.random() < 0.3:
            is_written(chat)
        if victim == "server":
            server.restart()
        if dice.random() < 0.3:
            chat.reload()
            is_settled(chat)
        is_written(chat)
        is_saved(chat)
        expect(chat.locator(f"{QUESTIONS} .body")).to_have_text(sent)  # a reloaded page first opens the chat
        said[number_of(chat)] = texts(chat)
    assert len(said) == kills
    for number, shown in said.items():
        written = [turn["content"] for turn in kept(server, number)]
        assert list(map(spaceless, written)) == list(map(spaceless, shown))


def spaceless(text: str) -> str:
    """Return a text without its white space, some of which becomes line breaks on the page."""
    return "".join(text.split())


def is_written(page: Page) -> None:
    """Wait until no reply is under way, which takes long on a busy machine while the worker restarts."""
    expect(page.locator(WRITING)).to_have_count(0, timeout=PATIENCE_MS)


def kill_worker(server: Server) -> None:
    with contextlib.suppress(ProcessLookupError, ValueError):  # it may be restarting just now
        os.kill(server.worker, signal.SIGKILL)
