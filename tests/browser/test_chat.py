"""Chatting in a real browser with the embedded model: replies, drafts, stopping, editing, asking again, reloading."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from app.i18n.catalogs import read_words
from tests.browser.conftest import Visitor
from tests.browser.server import MODEL, Server, serving
from tests.browser.test_chat_keeping import ALL, is_saved, kept, number_of
from tests.browser.test_pages import axe, check
from tests.browser.witness import is_settled

words = read_words()
STREAM = "**/admin/api/v1/chat/completions"
REPLIES = '.message[data-role="assistant"]'
WRITING = ".message[aria-busy=true]"
COUNTED = re.compile(r"1, 2, 3, 4, 5")
LONG = 1_000
MARKED = (
    "Some **bold** text with `code`.\n\n- one\n- two\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"
)
IDLE = "() => new Promise((done) => requestIdleCallback(() => requestIdleCallback(done)))"
SHORT = 40
"""Messages of a conversation whose messages are all on the page when it opens."""
MOST_CPU_RATIO = 2.0
"""Highest ratio of processor time for opening a long conversation, and for sending in it, to that of a short one."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("chat")) as server:
        yield server


@pytest.fixture
def chat(server: Server, visitor: Visitor) -> Page:
    """Return the chat page without conversations, at temperature 0, so that replies are the same each time."""
    server.call("DELETE", "/admin/api/conversations")
    page = visitor(server).open("/admin/chat")
    page.get_by_label("Temperature").fill("0")
    return page


def ask(page: Page, text: str = "Count from 1 to 20.") -> None:
    """Send a question and wait for the end of the reply."""
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")
    expect(page.locator(REPLIES).last.locator("footer dl")).to_be_visible()


def answer(page: Page, said: str | dict[str, Any]) -> None:
    """Make every reply this text, or this chunk."""
    chunk = said if isinstance(said, dict) else {"choices": [{"index": 0, "delta": {"content": said}}]}
    events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route(STREAM, lambda route: route.fulfill(status=200, content_type="text/event-stream", body=events))


def body(page: Page, at: int = -1) -> str:
    return page.locator(f"{REPLIES} .body").nth(at).text_content() or ""


def test_a_reply_shows_who_drafted_it_and_what_it_cost_and_is_there_after_a_reload(server: Server, chat: Page) -> None:
    chat.get_by_label("Speculative decoding", exact=True).select_option("dflash")
    chat.get_by_label("Draft length").fill("4")
    ask(chat)
    assert COUNTED.search(body(chat))
    figures = chat.locator(f"{REPLIES} dl")
    for label in ("tokens/s", "accepted", "tokens per step", "to first token", "DFlash"):
        expect(figures).to_contain_text(label)
    expect(chat.locator("mark[data-method]:visible")).to_have_count(1)  # only the drafter in the panel
    chat.get_by_role("button", name="Accepted tokens", exact=True).click()
    expect(chat.locator(f"{REPLIES} mark[data-method=dflash]").first).to_be_visible()
    expect(chat.locator(".legend")).to_contain_text("DFlash")
    text = figures.text_content()
    is_saved(chat)
    question, reply = kept(server, number_of(chat))
    assert (question["role"], reply["role"]) == ("user", "assistant")
    assert reply["spans"]
    chat.reload()
    expect(chat.locator(f"{REPLIES} mark[data-method=dflash]").first).to_be_visible()
    assert chat.locator(f"{REPLIES} dl").text_content() == text
    expect(chat.get_by_label("Temperature")).to_have_value("0")
    expect(chat.get_by_label("Speculative decoding", exact=True)).to_have_value("dflash")


@pytest.mark.parametrize("is_composing", ["true", "false"], ids=["Chrome", "Safari"])
def test_enter_that_ends_a_conversion_sends_and_saves_nothing(chat: Page, is_composing: str) -> None:
    """Safari marks an Enter that ends a Japanese conversion only by key code 229 (WebKit 165004)."""
    key = f"{{ key: 'Enter', keyCode: 229, isComposing: {is_composing}, bubbles: true, cancelable: true }}"
    convert = f"(field) => field.dispatchEvent(new KeyboardEvent('keydown', {key}))"
    ask(chat)
    chat.locator("#draft").fill("日本")
    chat.locator("#draft").evaluate(convert)
    expect(chat.locator("#draft")).to_have_value("日本")
    expect(chat.locator(REPLIES)).to_have_count(1)
    entry = chat.locator(".conversations .entry")
    entry.hover()
    entry.get_by_role("button", name=re.compile("^Rename")).click()
    title = chat.locator("#chat-list li input")
    title.fill("日本")
    title.evaluate(convert)
    title.evaluate(convert.replace("Enter", "Escape"))
    expect(title).to_be_focused()
    title.press("Escape")
    expect(title).to_have_count(0)
    chat.locator('.message[data-role="user"]').get_by_title("Edit this message").click()
    edited = chat.locator(".editing textarea").first
    edited.fill("日本")
    edited.evaluate(convert.replace("Enter", "Escape"))
    expect(edited).to_have_value("日本")
    edited.press("Escape")
    expect(edited).to_be_hidden()


def test_a_paste_that_is_too_long_is_refused_in_words(chat: Page) -> None:
    chat.locator("#draft").evaluate(
        """(field) => {
          const clipboardData = new DataTransfer();
          clipboardData.setData("text", "a".repeat(400_001));
          field.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
        }"""
    )
    expect(chat.locator(".toast")).to_have_text(words("chat.paste_large", count="400,000"))
    expect(chat.locator("#draft")).to_have_value("")
    notice, field = chat.locator(".toast").bounding_box(), chat.locator("#draft").bounding_box()
    assert notice is not None
    assert field is not None
    assert notice["y"] + notice["height"] < field["y"], "a notice must not cover what is typed and sent next"


def test_the_model_that_was_asked_last_is_chosen_again(server: Server, visitor: Visitor) -> None:
    server.call("DELETE", "/admin/api/conversations")
    server.call("POST", "/admin/api/models/load", {"model": "demo-hybrid"})
    page = visitor(server).open("/admin/chat")
    page.locator("#option-model").select_option("demo-hybrid")
    ask(page)
    page.goto("/admin/chat")
    expect(page.locator("#option-model")).to_have_value("demo-hybrid")


def test_a_reply_is_stopped_by_escape_and_what_was_written_is_kept(chat: Page) -> None:
    chat.get_by_label("Speculative decoding", exact=True).select_option("off")  # so it takes seconds on any machine
    chat.locator("#draft").fill("Count from 1 to 400.")
    chat.locator("#draft").press("Enter")
    expect(chat.locator(f"{REPLIES} .body")).to_contain_text("1, 2")
    chat.keyboard.press("Escape")
    expect(chat.locator(WRITING)).to_have_count(0)
    expect(chat.locator(REPLIES)).to_contain_text("Stopped.")
    expect(chat.locator("#draft")).to_be_focused()
    expect(chat.locator(".conversations li")).to_have_count(1)
    written = body(chat)
    expect(chat.locator(".conversations .when")).to_be_visible()
    chat.reload()
    expect(chat.locator(f"{REPLIES} .body")).to_have_text(written)
    expect(chat.locator(REPLIES)).to_contain_text("Stopped.")


def test_what_is_sent_before_the_page_knows_its_models_goes_out_then(chat: Page) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    chat.route("**/admin/api/models", hold, times=1)
    chat.reload()
    chat.locator("#draft").fill("Count from 1 to 20.")
    chat.locator("#draft").press("Enter")
    expect(chat.locator("#draft")).to_have_value("Count from 1 to 20.")
    held[0].continue_()
    expect(chat.locator(REPLIES).locator("footer dl")).to_be_visible()
    expect(chat.locator("#draft")).to_have_value("")


def test_a_page_that_is_left_keeps_what_was_written(server: Server, chat: Page) -> None:
    chat.locator("#draft").fill("Count from 1 to 400.")
    with chat.expect_response(lambda answer: answer.request.method != "GET" and "/conversations" in answer.url):
        chat.locator("#draft").press("Enter")
    expect(chat.locator(f"{REPLIES} .body")).to_contain_text("1, 2")
    chat.wait_for_function("() => location.hash.length > 1")
    number = chat.url.partition("#")[2]
    chat.locator(".brand").click()
    expect(chat.get_by_role("heading", name="Overview")).to_be_visible()
    expect(chat.locator(".status[data-tone=good]")).to_be_visible()
    chat.goto(f"/admin/chat#{number}")
    expect(chat.locator(f"{REPLIES} .body")).to_contain_text("1, 2")


def test_a_list_that_cannot_be_read_says_so_and_can_be_read_again(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    page = visit.open("/admin/")
    visit.witness.expects(503)
    error = json.dumps({"error": {"message": "The disk is full.", "code": "store_unavailable"}})
    page.route(
        "**/admin/api/conversations*",
        lambda route: route.fulfill(status=503, content_type="application/json", body=error),
        times=1,
    )
    page.goto("/admin/chat")
    expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("The disk is full.")
    page.get_by_role("button", name="Try again").filter(visible=True).click()
    expect(page.get_by_role("alert").filter(visible=True)).to_have_count(0)
    expect(page.locator(".conversations .skeleton").first).to_be_hidden()


def test_a_reply_that_breaks_off_says_why_keeps_its_beginning_and_can_be_tried_again(chat: Page) -> None:
    def break_off(route: Route) -> None:
        begun = {"choices": [{"index": 0, "delta": {"content": "One, "}}]}
        error = {"error": {"message": "The worker ended.", "code": "worker_restarted"}}
        events = "".join(f"data: {json.dumps(event)}\n\n" for event in (begun, error))
        route.fulfill(status=200, content_type="text/event-stream", body=events)

    chat.route(STREAM, break_off, times=1)
    chat.locator("#draft").fill("Count from 1 to 20.")
    chat.locator("#draft").press("Enter")
    expect(chat.locator(f"{REPLIES} [role=alert]")).to_contain_text("model process stopped")
    assert body(chat).strip() == "One,"
    chat.get_by_role("button", name="Try again").click()
    expect(chat.locator(f"{REPLIES} .body")).to_contain_text(COUNTED)
    expect(chat.locator(REPLIES)).to_have_count(1)


def test_escape_in_the_search_of_conversations_stops_no_reply(chat: Page) -> None:
    chat.get_by_label("Speculative decoding", exact=True).select_option("off")
    chat.locator("#draft").fill("Count from 1 to 400.")
    chat.locator("#draft").press("Enter")
    expect(chat.locator(f"{REPLIES} .body")).to_contain_text("1, 2")
    chat.locator("#chat-search").fill("x")
    chat.locator("#chat-search").press("Escape")
    expect(chat.locator(WRITING)).to_have_count(1)
    chat.locator("#chat-search").press("Escape")
    expect(chat.locator(WRITING)).to_have_count(0)


def test_a_new_chat_has_no_options_of_the_one_before(chat: Page) -> None:
    chat.get_by_label("Seed").fill("7")
    ask(chat)
    chat.get_by_role("button", name="New chat").click()
    expect(chat.get_by_label("Seed")).to_have_value("")
    chat.locator(".conversations li .open").click()
    expect(chat.get_by_label("Seed")).to_have_value("7")


def test_a_screen_reader_is_told_of_every_reply(chat: Page) -> None:
    watch = """() => {
      const status = document.querySelector(".talk > [role=status]");
      globalThis.announced = [];
      new MutationObserver(() => announced.push(status.textContent)).observe(status, { childList: true });
    }"""
    chat.evaluate(watch)
    for count in (1, 2):
        ask(chat)
        chat.wait_for_function("(count) => announced.filter(Boolean).length === count", arg=count)


def test_the_field_grows_with_its_text_in_a_browser_that_does_not_grow_fields(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    visit.context.add_init_script(
        "const has = CSS.supports.bind(CSS);"
        "CSS.supports = (name, ...values) => name !== 'field-sizing' && has(name, ...values);"
    )
    page = visit.open("/admin/chat")
    draft = page.locator("#draft")
    draft.evaluate("(field) => { field.style.fieldSizing = 'fixed'; }")
    low = draft.evaluate("(field) => field.offsetHeight")
    draft.fill("one\ntwo\nthree\nfour")
    page.wait_for_function("(low) => document.querySelector('#draft').offsetHeight > 2 * low - 20", arg=low)
    draft.fill("one")
    page.wait_for_function("(low) => document.querySelector('#draft').offsetHeight === low", arg=low)


def test_conversations_are_found_renamed_and_deleted(chat: Page) -> None:
    entries = chat.locator(".conversations li")
    for question in ("Count from 1 to 5.", "Spell the word river."):
        chat.get_by_role("button", name="New chat").click()
        ask(chat, question)
    expect(entries).to_have_count(2)
    chat.get_by_label("Search conversations").fill("RIVER")
    expect(entries).to_have_count(1)
    entries.first.hover()
    entries.first.get_by_title("Rename").click()
    expect(chat.get_by_label("Title", exact=True)).to_be_focused()
    chat.keyboard.type("Water")
    chat.keyboard.press("Enter")
    expect(entries.first).to_contain_text("Water")
    expect(chat.locator("#chat-title")).to_have_text("Water")
    chat.get_by_label("Search conversations").fill("")
    expect(entries).to_have_count(2)
    entries.first.hover()
    entries.first.get_by_title("Delete").click()
    chat.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(entries).to_have_count(1)
    expect(chat.locator("#chat-title")).to_have_text("New chat")


@pytest.fixture
def long_chat(server: Server) -> Iterator[str]:
    """Yield the address of a conversation of 1,000 messages."""
    with conversation(server, LONG) as address:
        yield address


@contextmanager
def conversation(server: Server, count: int) -> Iterator[str]:
    """Store a conversation of `count` messages, yield the address of its page, and delete it."""
    address = f"{ALL}/{count}"
    roles = ("user", "assistant")
    turns = [
        {"id": f"t{at}", "parent": f"t{at - 1}" if at else "", "role": roles[at % 2], "content": f"{MARKED}\n\n({at})"}
        for at in range(count)
    ]
    for at in range(0, count, 100):
        version = server.call("GET", address)["version"] if at else 0
        body = {"version": version, "turns": turns[at : at + 100], "begin": None if at else {"title": "Long"}}
        server.call("POST", f"{address}/turns", body)
    yield f"/admin/chat#{count}"
    server.call("DELETE", address)


def processor_seconds(page: Page) -> Callable[[], float]:
    """Return a function: CPU seconds of the page's main thread since the last call, without waits for a CPU."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = 0.0

    def since() -> float:
        nonlocal before
        page.evaluate(IDLE)
        metrics = session.send("Performance.getMetrics")["metrics"]
        last, before = before, next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
        return float(before - last)

    return since


def test_a_chat_of_a_thousand_messages_opens_and_sends_almost_as_one_of_forty(server: Server, visitor: Visitor) -> None:
    opened, sent = [], []
    for count in (SHORT, LONG):
        page = visitor(server).context.new_page()
        answer(page, "Fine.")
        seconds = processor_seconds(page)
        with conversation(server, count) as address:
            page.goto(address)
            is_settled(page)
            expect(page.locator(".message").last).to_contain_text(f"({count - 1})")
            opened.append(seconds())
            page.locator("#draft").fill("Are you well?")
            page.locator("#draft").press("Enter")
            expect(page.locator(REPLIES).last).to_contain_text("Fine.")
            is_saved(page)
            sent.append(seconds())
            page.close()
    assert opened[1] < MOST_CPU_RATIO * opened[0]
    assert sent[1] < MOST_CPU_RATIO * sent[0]


def test_earlier_messages_come_as_one_scrolls_to_them_and_leave_what_is_on_screen(
    server: Server, visitor: Visitor, long_chat: str
) -> None:
    page = visitor(server).open(long_chat)
    messages = page.locator(".message")
    expect(messages.last).to_contain_text(f"({LONG - 1})")
    count = messages.count()
    assert count < LONG / 10
    first = messages.first.element_handle()
    place = first.evaluate(
        "(message) => (message.closest('.thread').scrollTop = 0, message.getBoundingClientRect().top)"
    )
    expect(messages).to_have_count(2 * count)
    page.wait_for_function(
        "([message, place]) => Math.abs(message.getBoundingClientRect().top - place) < 2", arg=[first, place]
    )


def test_two_conversations_are_answered_at_the_same_time(chat: Page) -> None:
    chat.locator("#draft").fill("Count from 1 to 300.")
    chat.locator("#draft").press("Enter")
    expect(chat.locator(f"{REPLIES} .body")).to_contain_text("1, 2")
    chat.get_by_role("button", name="New chat").click()
    ask(chat, "Count from 1 to 5.")
    chat.locator(".conversations li", has_text="300").locator(".open").click()
    expect(chat.locator(f"{REPLIES} .body")).to_contain_text("1, 2")
    expect(chat.locator(WRITING)).to_have_count(0)


def test_thoughts_are_folded_and_code_can_be_copied(chat: Page) -> None:
    delta = {"reasoning_content": "Hm.", "content": "See:\n```python\nprint(1)\n```\n"}
    chunk = {"choices": [{"index": 0, "delta": delta}]}
    events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    chat.route(STREAM, lambda route: route.fulfill(status=200, content_type="text/event-stream", body=events))
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(chat)
    expect(chat.get_by_text("Hm.")).to_be_hidden()
    chat.get_by_text("Thoughts").click()
    expect(chat.get_by_text("Hm.")).to_be_visible()
    chat.locator(".code-head", has_text="python").get_by_role("button", name="Copy").click()
    expect(chat.locator(".toast")).to_have_text("Copied")
    assert chat.evaluate("() => navigator.clipboard.readText()") == "print(1)"


CODE = """```python
def area(radius: float) -> str:  # of a circle
    return f"{3.14 * radius ** 2}"
```

```html
<img src="x" onerror="alert(1)"><script>alert(1)</script>
```

```brainfuck
def ++>
```
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_is_coloured_by_its_language_and_stays_the_same_text(
    server: Server, visitor: Visitor, scheme: str
) -> None:
    page = visitor(server, color_scheme=scheme).open("/admin/chat")
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url.rpartition("/")[2]))
    answer(page, CODE)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page)
    python, html, unknown = page.locator(f"{REPLIES} .code-block code").all()
    expect(python.locator(".code-keyword").first).to_have_text("def")
    expect(python.locator(".code-comment")).to_have_text("# of a circle")
    expect(html.locator(".code-name").first).to_have_text("img")
    expect(unknown).to_have_text("def ++>")
    expect(unknown.locator("span")).to_have_count(0)
    sources = [block.partition("\n")[2] for block in CODE.split("```")[1::2]]
    assert [block.text_content() for block in (python, html, unknown)] == [source[:-1] for source in sources]
    assert page.locator(f"{REPLIES} img, {REPLIES} script").count() == 0
    assert loaded.count("highlight.js") == 1
    page.locator(".code-head", has_text="python").get_by_role("button", name="Copy").click()
    assert page.evaluate("() => navigator.clipboard.readText()") == sources[0][:-1]
    check(axe(page))


def test_code_without_a_language_that_is_known_loads_no_colours(chat: Page) -> None:
    loaded: list[str] = []
    chat.on("request", lambda request: loaded.append(request.url.rpartition("/")[2]))
    answer(chat, "```brainfuck\n+\n```\n\n```\nplain\n```\n")
    ask(chat)
    expect(chat.locator(".code-block code")).to_have_text(["+", "plain"])
    chat.evaluate(IDLE)
    assert not {"highlight.js", "chat_code_worker.js"} & set(loaded)


def test_code_whose_colours_take_too_long_stays_as_it_is(chat: Page) -> None:
    script = "onmessage = () => { for (;;); };"
    chat.route(
        "**/chat_code_worker.js", lambda route: route.fulfill(content_type="text/javascript", body=script), times=1
    )
    chat.clock.install()
    answer(chat, "```python\nfirst = 1\n```\n\n```python\nsecond = 2\n```\n")
    with chat.expect_worker():
        ask(chat)
    first, second = chat.locator(f"{REPLIES} .code-block code").all()
    with chat.expect_worker():
        chat.clock.fast_forward(60_000)
    expect(second.locator(".code-number")).to_have_text("2")
    expect(first).to_have_text("first = 1")
    expect(first.locator("span")).to_have_count(0)


def test_formulas_are_drawn_and_one_that_is_none_stays_as_it_is_written(chat: Page) -> None:
    text = "Since \\( a^2 + b^2 = c^2 \\):\n\n\\[\n\\frac{1}{2}\n\\]\n\nbut $$\\nosuchcommand{$$."
    answer(chat, text)
    ask(chat)
    reply = chat.locator(f"{REPLIES} .body")
    expect(reply.locator("math")).to_have_count(2)
    expect(reply.locator("math msup").first).to_be_visible()
    expect(reply.locator(".formula.display mfrac")).to_be_visible()
    expect(reply.locator("code.formula")).to_have_text("\\nosuchcommand{")


def test_the_model_loads_while_the_first_reply_waits(server: Server, chat: Page) -> None:
    server.call("POST", "/admin/api/models/unload", {"model": MODEL})
    expect(chat.locator(".talk-head span.badge")).to_have_text(words("model.available"))
    ask(chat)
    expect(chat.locator(".talk-head span.badge")).to_have_text(words("model.loaded"))


def test_the_time_to_load_the_model_is_not_told_as_time_to_the_first_token(server: Server, chat: Page) -> None:
    chat.locator("#option-model").select_option(MODEL)
    server.call("POST", "/admin/api/models/unload", {"model": MODEL})
    expect(chat.locator(".talk-head span.badge")).to_have_text(words("model.available"))
    timings = {"first_token_ms": 12_040, "predicted_n": 1, "predicted_per_second": 5}
    figures = {"timings": timings, "speculation": {"method": "off"}}
    chunk = {"id": "r1", "choices": [{"index": 0, "delta": {"content": "Fine."}, "finish_reason": "stop"}], **figures}
    answer(chat, chunk)
    request = {"request": {"phase": "done", "figures": {**figures, "seconds": {"load": 11.9}}}}
    chat.route("**/admin/api/requests/r1", lambda route: route.fulfill(json=request))
    ask(chat)
    line = chat.locator(f"{REPLIES} dl")
    expect(line).to_contain_text("12 secto load the model140 msto first token")
    is_saved(chat)
    chat.reload()
    expect(line).to_contain_text("12 secto load the model140 msto first token")


def test_a_chosen_drafter_that_is_gone_is_named_and_not_taken_for_a_lack_of_drafts(chat: Page) -> None:
    missing = {"reason_code": "missing_some", "reason_values": {"names": "real/sym-draft"}}
    speculation = {"method": "eagle3", **missing}
    answer(chat, {"choices": [{"index": 0, "delta": {"content": "Fine."}}], "timings": {}, "speculation": speculation})
    ask(chat)
    notice = chat.get_by_text("real/sym-draft")
    expect(notice).to_have_text("real/sym-draft is missing; the other drafters were used.")


def test_an_early_reply_made_anew_says_where_the_later_messages_are(chat: Page) -> None:
    answer(chat, "Fine.")
    ask(chat, "First?")
    ask(chat, "Second?")
    later = chat.get_by_text(words("chat.later", at="1"))
    expect(later.filter(visible=True)).to_have_count(0)
    chat.get_by_role("button", name="Regenerate").first.click()
    expect(chat.locator(REPLIES)).to_have_count(1)
    expect(later).to_be_visible()
    chat.get_by_role("button", name="Previous version").click()
    expect(chat.locator(REPLIES)).to_have_count(2)
    expect(later.filter(visible=True)).to_have_count(0)


def test_on_a_phone_list_and_options_are_drawers(server: Server, visitor: Visitor) -> None:
    page = visitor(server, phone=True).open("/admin/chat")
    expect(page.locator("#chat-list")).to_be_hidden()
    page.get_by_role("button", name="Conversations").click()
    expect(page.get_by_label("Search conversations")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#chat-list")).to_be_hidden()
    expect(page.get_by_role("button", name="Conversations")).to_be_focused()
    page.get_by_role("button", name="Model, sampling and tools").click()
    expect(page.get_by_label("Speculative decoding", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#chat-options")).to_be_hidden()
