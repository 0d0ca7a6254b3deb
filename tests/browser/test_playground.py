"""Requests of the chat page beyond plain text: tools whose results a person types, JSON by a schema, files."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Visitor
from tests.browser.server import Server, serving
from tests.browser.test_chat import REPLIES, STREAM, ask
from tests.browser.test_chat_keeping import is_saved, kept, number_of
from tests.browser.test_pages import LAYOUT_CALLS, axe, check, look

PERSON = "Return a JSON object with the keys name, age and city."
RESULTS = '.message[data-role="tool"]'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("playground")) as server:
        yield server


@pytest.fixture
def chat(server: Server, visitor: Visitor) -> Page:
    server.call("DELETE", "/admin/api/conversations")
    page = visitor(server).open("/admin/chat")
    page.get_by_label("Temperature").fill("0")
    return page


def streamed(*deltas: dict[str, Any], finish: str = "stop") -> str:
    """Return a reply as the server streams it."""
    choices = [{"index": 0, "delta": delta} for delta in deltas] + [{"index": 0, "delta": {}, "finish_reason": finish}]
    return "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + "data: [DONE]\n\n"


def answering(page: Page, *replies: str) -> list[Any]:
    """Answer requests with `replies`, in order, from now on; return the list that collects the requests' bodies."""
    asked: list[Any] = []
    waiting = iter(replies)

    def answer(route: Route) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(status=200, content_type="text/event-stream", body=next(waiting))

    page.route(STREAM, answer)
    return asked


def test_a_call_gets_its_result_from_the_keyboard_and_both_are_there_after_a_reload(server: Server, chat: Page) -> None:
    chat.locator("#option-tools ~ button").click()
    chat.locator("#draft").fill("What is the weather in Oslo?")
    chat.locator("#draft").press("Enter")
    expect(chat.locator("#result")).to_be_focused()
    expect(chat.get_by_label("Result of get_weather")).to_be_visible()
    call = chat.locator(f"{REPLIES} .code-block")
    expect(call).to_contain_text("Tool call: get_weather")
    assert json.loads(call.locator("code").text_content() or "") == {"city": "Oslo"}
    check(axe(chat))
    chat.keyboard.type("rain, 4 degrees")
    chat.keyboard.press("Enter")
    expect(chat.locator(f"{REPLIES} .body").last).to_contain_text("4 degrees")
    expect(chat.locator(f"{REPLIES} footer dl").last).to_be_visible()
    expect(chat.locator("#result")).to_be_hidden()
    is_saved(chat)
    turns = kept(server, number_of(chat))
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "assistant"]
    [call_kept] = turns[1]["calls"]
    assert (call_kept["name"], json.loads(call_kept["arguments"]), turns[2]["content"]) == (
        "get_weather",
        {"city": "Oslo"},
        "rain, 4 degrees",
    )
    chat.reload()
    expect(chat.locator(f"{REPLIES} .code-block")).to_contain_text("Oslo")
    expect(chat.locator(f"{RESULTS} .code-block")).to_contain_text("Result of get_weather")
    assert "get_weather" in chat.locator("#option-tools").input_value()


def test_several_calls_get_their_results_in_turn_and_the_history_says_which(chat: Page) -> None:
    calls = [
        {"index": 0, "id": "call_a", "function": {"name": "look", "arguments": '{"at": 12345678'}},
        {"index": 0, "function": {"arguments": "901234567890}"}},
        {"index": 1, "id": "call_b", "function": {"name": "hear", "arguments": "{}"}},
    ]
    first = streamed({"reasoning_content": "Two."}, *({"tool_calls": [call]} for call in calls), finish="tool_calls")
    asked = answering(chat, first, streamed({"content": "Both are there."}), streamed({"content": "Another."}))
    chat.locator("#option-tools").fill('{"name": "look", "input_schema": {"type": "object"}}')
    chat.locator("#option-tool_choice").select_option("look")
    ask(chat, "Look and hear.")
    expect(chat.locator(f"{REPLIES} code").first).to_have_text('{\n  "at": 12345678901234567890\n}')
    for name in ("look", "hear"):
        expect(chat.get_by_label(f"Result of {name}")).to_be_focused()
        chat.keyboard.type(f"of {name}")
        chat.keyboard.press("Enter")
    expect(chat.locator(REPLIES).last).to_contain_text("Both are there.")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    assert asked[0]["tools"] == [tool]
    assert asked[0]["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    _, reply, *results = asked[1]["messages"]
    assert reply["reasoning_content"] == "Two."
    assert [(call["id"], call["function"]["name"]) for call in reply["tool_calls"]] == [
        ("call_a", "look"),
        ("call_b", "hear"),
    ]
    assert [(result["tool_call_id"], result["content"]) for result in results] == [
        ("call_a", "of look"),
        ("call_b", "of hear"),
    ]
    chat.locator(RESULTS).last.get_by_title("Edit this message").click()
    expect(chat.locator(".editing textarea:visible")).to_be_focused()
    chat.keyboard.press("End")
    chat.keyboard.type(" again")
    chat.get_by_role("button", name="Save and resend").click()
    expect(chat.locator(REPLIES).last).to_contain_text("Another.")
    assert asked[2]["messages"][-1] == {"role": "tool", "tool_call_id": "call_b", "content": "of hear again"}


def test_a_schema_holds_the_answer_and_the_json_is_readable_and_copied_as_it_is(server: Server, chat: Page) -> None:
    chat.locator("#option-format").select_option("json_schema")
    chat.locator("#option-json_schema ~ button").click()
    ask(chat, PERSON)
    block = chat.locator(f"{REPLIES} .code-block")
    expect(block.locator(".code-head")).to_contain_text("JSON")
    said = json.loads(block.locator("code").text_content() or "")
    assert set(said) == {"name", "age", "city"}
    is_saved(chat)
    turns = kept(server, number_of(chat))
    assert json.loads(turns[1]["content"]) == said
    chat.get_by_role("button", name="Accepted tokens", exact=True).click()
    expect(chat.locator(f"{REPLIES} .raw")).to_have_text(turns[1]["content"])


def test_what_is_no_json_is_said_at_the_field_and_in_place_of_a_reply(chat: Page) -> None:
    chat.locator("#option-tools").fill("[{")
    expect(chat.locator("#problem-tools")).to_contain_text("This is not valid JSON")
    expect(chat.locator("#option-tools")).to_have_attribute("aria-invalid", "true")
    chat.locator("#draft").fill("Hi")
    chat.locator("#draft").press("Enter")
    expect(chat.get_by_role("alert").filter(visible=True)).to_contain_text("This is not valid JSON")
    chat.locator("#option-tools").fill("")
    expect(chat.locator("#problem-tools")).to_be_hidden()
    chat.get_by_role("button", name="Try again").filter(visible=True).click()
    expect(chat.locator(f"{REPLIES} dl").last).to_be_visible()


def test_a_number_of_the_options_may_have_a_comma_and_a_wrong_one_is_said_at_the_field_and_in_place_of_a_reply(
    server: Server, chat: Page
) -> None:
    chat.locator("#option-temperature").press_sequentially("0,7")
    chat.locator("#option-top_k").press_sequentially("4,5")
    expect(chat.locator("#problem-temperature")).to_be_hidden()
    expect(chat.locator("#problem-top_k")).to_have_text("Use a whole number.")
    expect(chat.locator("#option-top_k")).to_have_value("4,5")
    chat.locator("#draft").fill("Hi")
    chat.locator("#draft").press("Enter")
    expect(chat.get_by_role("alert").filter(visible=True)).to_contain_text("Top-k: Use a whole number.")
    chat.locator("#option-top_k").fill("2000000")
    expect(chat.locator("#problem-top_k")).to_have_text("Use 1048576 or less.")
    with chat.expect_response(lambda answer: '"top_k":40' in (answer.request.post_data or "")):
        chat.locator("#option-top_k").fill("40")
    chat.get_by_role("button", name="Try again").filter(visible=True).click()
    expect(chat.locator(f"{REPLIES} dl").last).to_be_visible()
    options = server.call("GET", f"/admin/api/conversations/{number_of(chat)}")["options"]
    assert options == {"temperature": 0.7, "top_k": 40}


def test_a_keyword_that_cannot_be_enforced_is_named(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    page = visit.open("/admin/chat")
    visit.witness.expects(400)
    page.locator("#option-format").select_option("json_schema")
    page.locator("#option-json_schema").fill('{"type": "object", "dependentSchemas": {"a": {}}}')
    page.locator("#draft").fill("Hi")
    page.locator("#draft").press("Enter")
    expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("dependentSchemas")


def test_reasoning_is_folded_while_it_comes_and_afterwards(chat: Page) -> None:
    asked = answering(
        chat, streamed({"reasoning_content": "First "}, {"reasoning_content": "this."}, {"content": "Done."})
    )
    chat.locator("#option-thinking").select_option("enabled")
    ask(chat)
    assert asked[0]["thinking"] == {"type": "enabled"}
    expect(chat.get_by_text("First this.")).to_be_hidden()
    chat.locator("summary", has_text="Thoughts").focus()
    chat.keyboard.press("Enter")
    expect(chat.get_by_text("First this.")).to_be_visible()


DROP = """(node, [name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  const told = (type) => new DragEvent(type, { dataTransfer: data, bubbles: true, cancelable: true });
  return ["dragover", "drop"].map((type) => node.dispatchEvent(told(type)));
}"""
PASTE = """(node, [name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  node.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
}"""


def test_files_go_along_as_text_and_stay_with_the_message(server: Server, chat: Page) -> None:
    asked = answering(chat, streamed({"content": "Read."}), streamed({"content": "Again."}))
    odd = 'one\n</file>\n<script>alert("x")</script>\n'
    assert chat.locator(".side").evaluate(DROP, ['a"b<.txt', odd]) == [False, False]  # or the browser would open it
    chips = chat.locator(".files li")
    expect(chips).to_have_text(["a_b_.txt"])
    chat.locator("#chat-files").set_input_files(
        [
            {"name": "second.md", "mimeType": "text/markdown", "buffer": "둘째".encode()},
            {"name": "picture.png", "mimeType": "image/png", "buffer": b"\x89PNG\0\xff"},
        ]
    )
    expect(chat.locator(".toast")).to_contain_text("picture.png is not a text file")
    expect(chips).to_have_text(["a_b_.txt", "second.md"])
    chat.locator("#draft").fill("Read these.")
    chat.reload()
    expect(chips).to_have_text(["a_b_.txt", "second.md"])
    expect(chat.locator("#draft")).to_have_value("Read these.")
    chat.get_by_role("button", name="Remove second.md").click()
    expect(chat.locator("#draft")).to_be_focused()
    ask(chat, "Read this.")
    content = f'Read this.\n\n<file name="a_b_.txt">\n{odd}\n</file>'
    assert asked[0]["messages"][-1]["content"] == content
    expect(chips).to_have_count(0)
    fold = chat.locator(".message details.file")
    expect(fold.locator("summary")).to_contain_text("a_b_.txt")
    expect(fold.locator("pre")).to_be_hidden()
    fold.locator("summary").click()
    assert fold.locator("pre").text_content() == odd
    chat.locator('.message[data-role="user"]').get_by_title("Edit this message").click()
    expect(chat.locator(".editing textarea").first).to_have_value("Read this.")
    chat.locator(".editing textarea").first.fill("Read it once more.")
    chat.get_by_role("button", name="Save and resend").first.click()
    expect(chat.locator(REPLIES).last).to_contain_text("Again.")
    assert asked[1]["messages"][-1]["content"] == content.replace("Read this.", "Read it once more.")


def test_a_text_that_an_office_program_copies_with_a_picture_of_it_is_pasted_as_text(chat: Page) -> None:
    is_left_to_the_browser = chat.locator("#draft").evaluate(
        """(node) => {
          const data = new DataTransfer();
          data.setData("text", "a cell");
          data.items.add(new File(["x"], "image.png", { type: "image/png" }));
          const paste = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
          return node.dispatchEvent(paste);
        }"""
    )
    assert is_left_to_the_browser
    expect(chat.locator(".files li")).to_have_count(0)
    expect(chat.locator(".toast")).to_have_count(0)


def test_a_file_is_pasted_and_belongs_to_its_conversation(chat: Page) -> None:
    chat.locator("#draft").evaluate(PASTE, ["pasted.txt", "one"])
    expect(chat.locator(".files li")).to_have_text(["pasted.txt"])
    answering(chat, streamed({"content": "Read."}))
    ask(chat, "Read this.")
    chat.locator("#draft").evaluate(PASTE, ["later.txt", "two"])
    expect(chat.locator(".files li")).to_have_text(["later.txt"])
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator(".files li")).to_have_count(0)
    chat.locator(".conversations .open").first.click()
    expect(chat.locator(".files li")).to_have_text(["later.txt"])


def test_a_file_that_is_too_large_is_refused_by_its_name(chat: Page) -> None:
    big = {"name": "big.txt", "mimeType": "text/plain", "buffer": b"x" * 400_001}
    chat.locator("#chat-files").set_input_files([big])
    expect(chat.locator(".toast")).to_contain_text("big.txt is too large")
    expect(chat.locator(".files li")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_its_place_on_a_phone(server: Server, visitor: Visitor, scheme: str) -> None:
    page = visitor(server, phone=True, color_scheme=scheme).open("/admin/chat")
    long = "W" * 300
    call = {"index": 0, "id": "c", "function": {"name": long, "arguments": json.dumps({"text": long})}}
    answering(page, streamed({"reasoning_content": long}, {"content": long, "tool_calls": [call]}, finish="tool_calls"))
    file = {"name": f"{long[:150]}.txt", "mimeType": "text/plain", "buffer": long.encode()}
    page.locator("#chat-files").set_input_files([file])
    expect(page.locator(".files li")).to_be_visible()
    page.locator("#draft").fill("Hi")
    check(look(page, *LAYOUT_CALLS))
    page.get_by_role("button", name="Send", exact=True).tap()
    expect(page.locator("#result")).to_be_visible()
    for fold in page.locator(".message summary").all():
        fold.click()
    check(look(page, *LAYOUT_CALLS))
    check(axe(page))
    page.get_by_role("button", name="Model, sampling and tools").click()
    page.locator("#option-format").select_option("json_schema")
    page.locator("#option-json_schema").fill("{")
    page.locator("#option-tools ~ button").click()
    check(look(page, *LAYOUT_CALLS))
    check(axe(page))
