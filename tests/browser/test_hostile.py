"""Sixty hostile strings as chat texts of people and models: no script runs, no request leaves, the text is readable.

The witness of each visit fails a test that opened a dialog, contacted another host or violated the policy.
"""

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from app.admin.chat_routes import MAX_TURNS
from tests.admin.hostile import HOSTILE
from tests.browser.conftest import Visitor
from tests.browser.server import Server, serving

ALL = "/admin/api/conversations"
STREAM = "**/admin/api/v1/chat/completions"
# fmt: off
ELEMENTS = {
    "a", "bdi", "blockquote", "br", "button", "code", "del", "details", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6",
    "hr", "li", "mark", "ol", "p", "pre", "span", "strong", "summary", "table", "tbody", "td", "th", "thead", "tr",
    "ul",
}
ATTRIBUTES = {
    "align", "class", "data-method", "href", "open", "rel", "start", "tabindex", "target", "title", "type",
}
# fmt: on
LOOK = """() => [...document.querySelectorAll('.message .body *')].map((node) => ({
  tag: node.localName,
  attributes: [...node.attributes].map((each) => each.name),
  href: node.getAttribute('href'),
  rel: node.getAttribute('rel'),
}))"""
ROLES = ("user", "assistant")
PROBLEM = ".message[data-role=assistant] .notice.bad span"
BODIES = "() => [...document.querySelectorAll('.message .body')].map((node) => node.textContent)"
SCROLLED_TO_START = """(count) => {
  document.getElementById("chat-thread").scrollTop = 0;
  return document.querySelectorAll(".message").length >= count;
}"""
WIDTHS = "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server without earlier conversations."""
    with serving(tmp_path_factory.mktemp("hostile")) as server:
        yield server


@contextmanager
def kept(server: Server, title: str, messages: list[dict[str, Any]]) -> Iterator[int]:
    """Store a conversation during the block; yield its id."""
    number = 1 + secrets.randbits(40)
    turns = [{"id": f"t{at}", "parent": f"t{at - 1}" if at else "", **message} for at, message in enumerate(messages)]
    begin = {"title": title[:200], "options": {"system": title}}
    server.call("POST", f"{ALL}/{number}/turns", {"version": 0, "turns": turns, "begin": begin})
    yield number
    server.call("DELETE", f"{ALL}/{number}")


def exported(folder: Path, title: str, messages: list[dict[str, Any]]) -> Path:
    """Write a conversation file as the page exports it; return its path."""
    turns = [{"id": f"t{at}", "parent": f"t{at - 1}" if at else "", **message} for at, message in enumerate(messages)]
    whole = {
        "format": "paceline.conversation",
        "form": 1,
        "title": title[:200],
        "model": "",
        "options": {},
        "turns": turns,
    }
    file = folder / "conversation.json"
    file.write_text(json.dumps(whole), encoding="utf-8")
    return file


def check_nodes(page: Page) -> None:
    """Assert that messages have only harmless elements and attributes, and links only to the web, with `noopener`."""
    for node in page.evaluate(LOOK):
        assert node["tag"] in ELEMENTS, node
        assert set(node["attributes"]) <= ATTRIBUTES, node
        if node["href"] is not None:
            assert node["href"].startswith(("http://", "https://")), node
            assert "noopener" in node["rel"], node


@pytest.mark.parametrize("phone", [False, True], ids=["wide", "phone"])
def test_texts_that_are_kept_stay_texts(server: Server, visitor: Visitor, *, phone: bool) -> None:
    said = [
        message
        for text in HOSTILE.values()
        for message in (
            {"role": "user", "content": text},
            {
                "role": "assistant",
                "content": text,
                "reasoning": text,
                "spans": [[0, 5, "ngram"], [7, 9, text[:60]]],
                "calls": [{"id": text[:200], "name": text[:200], "arguments": json.dumps({text: text})}],
            },
            {"role": "tool", "content": text},
        )
    ]
    with kept(server, "Hostile", said) as number:
        page = visitor(server, phone=phone).open(f"/admin/chat#{number}")
        page.wait_for_function(SCROLLED_TO_START, arg=len(said))
        check_nodes(page)
        width, room = page.evaluate(WIDTHS)
        assert width <= room
        page.get_by_role("button", name="Accepted tokens", exact=True).click()
        expect(page.locator("mark[data-method=ngram]").first).to_be_attached()
        check_nodes(page)
        bodies = page.evaluate(BODIES)
        for index, text in enumerate(HOSTILE.values()):
            assert bodies[3 * index] == text
            assert text in bodies[3 * index + 1]
            assert text in bodies[3 * index + 2]


def test_an_imported_file_of_hostile_texts_is_texts(server: Server, visitor: Visitor, tmp_path: Path) -> None:
    texts = list(HOSTILE.values())
    file = exported(
        tmp_path, texts[0] or "x", [{"role": ROLES[at % 2], "content": text} for at, text in enumerate(texts)]
    )
    page = visitor(server).open("/admin/chat")
    page.locator("#chat-import").set_input_files(file)
    expect(page.locator(".toast").last).to_have_text("Conversation imported")
    page.wait_for_function(SCROLLED_TO_START, arg=len(texts))
    check_nodes(page)
    bodies = page.evaluate(BODIES)
    assert bodies[::2] == texts[::2]
    page.goto("about:blank")  # else the page would request conversations while they are deleted
    server.call("DELETE", ALL)


def test_the_largest_conversation_that_may_be_imported_can_be_read_and_answered(
    server: Server, visitor: Visitor, tmp_path: Path
) -> None:
    table = "| a | b |\n|---|---|\n" + "| **bold** | `code` [link](https://example.org) |\n" * 20
    turns = [{"role": ROLES[at % 2], "content": f"{at}\n\n{table}"} for at in range(MAX_TURNS - 2)]
    file = exported(tmp_path, "Large", turns)
    visit = visitor(server)
    visit.witness.expects(400)  # the conversation exceeds the model's context
    page = visit.open("/admin/chat")
    page.locator("#chat-import").set_input_files(file)
    expect(page.locator(".toast").last).to_have_text("Conversation imported", timeout=60_000)
    page.locator("#draft").fill("one more")
    page.locator("#draft").press("Enter")
    expect(page.locator(".message .notice.bad span").last).to_be_visible()
    count = page.locator(".message").count()
    page.wait_for_function(SCROLLED_TO_START, arg=count + 1)
    page.goto("about:blank")
    server.call("DELETE", ALL)


def test_titles_stay_texts_in_the_list_the_head_and_the_fields(server: Server, visitor: Visitor) -> None:
    with ExitStack() as stack:
        numbers = {stack.enter_context(kept(server, text, [])): text for text in HOSTILE.values()}
        page = visitor(server).open("/admin/chat")
        for number, text in numbers.items():
            page.goto(f"/admin/chat#{number}")
            expect(page.locator("#chat-title")).to_have_text(text[:200].strip(), use_inner_text=False)
            expect(page.locator("#option-system")).to_have_value(text.replace("\r\n", "\n").replace("\r", "\n"))
            entry = page.locator(".conversations li[data-current=true]")
            entry.hover()
            entry.get_by_title("Rename").click()
            expect(page.locator(f"#title-{number}")).to_be_focused()
            page.keyboard.press("Escape")
            expect(page.locator(f"#title-{number}")).to_have_count(0)
        page.goto("about:blank")  # else the page would request conversations while they are deleted


def test_replies_and_errors_stay_texts_while_they_stream(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/chat")
    texts = iter(HOSTILE.values())

    def answer(route: Route) -> None:
        text = next(texts)
        choice = {"index": 0, "delta": {"content": text}, "accepted_spans": [[0, 3]], "method": text[:60]}
        call = {"index": 0, "delta": {"reasoning_content": text, "tool_calls": [{"function": {"name": text}}]}}
        frames = [{"model": text, "choices": [part]} for part in (choice, call)]
        events = [*frames, {"error": {"message": text, "code": text}}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route(STREAM, answer)
    for text in HOSTILE.values():
        page.get_by_role("button", name="New chat").click()
        page.locator("#draft").fill(text)
        page.locator("#draft").press("Enter")
        expect(page.locator(PROBLEM)).to_be_visible()
        assert page.locator(PROBLEM).text_content() == text
        check_nodes(page)
        expect(page).to_have_url(re.compile(r"#\d+$"))


def test_what_is_typed_stays_text_after_a_reload(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/chat")
    for text in ("</textarea><script>alert(1)</script>", "{{7*7}}", "<img src=x onerror=alert(1)>"):
        page.locator("#draft").fill(text)
        page.reload()
        expect(page.locator("#draft")).to_have_value(text)
