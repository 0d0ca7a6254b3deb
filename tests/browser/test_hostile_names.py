"""Sixty hostile strings as names of models, keys and repositories, as settings and in the log: all of them stay text.

The witness of each visit fails a test that opened a dialog, contacted another host or violated the policy. Titles and
texts of the chat are in `test_hostile.py`.
"""

import json
import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.admin.hostile import HOSTILE
from tests.browser.conftest import Visitor
from tests.browser.folders import EMBEDDED
from tests.browser.server import Server, serving
from tests.hub.queue import model_files
from tests.hub.stand_in import stand_in_hub
from tests.models.folders import write_model

NAME_BYTES = 200
FOREIGN = """() => [...document.querySelectorAll(
  "iframe, object, embed, base, form[action^=http], [onerror], [onload], [onfocus], [onmouseover], [style*=url], img"
)].filter((each) => each.localName !== "img" || !each.src.startsWith(location.origin)).map((each) => each.outerHTML)"""
ALERT = "alert(document.domain)"
WORKING = f"<img src=x onerror={ALERT}>"
"""The name of a model that can answer."""


def as_folder(text: str) -> str:
    """Return the nearest name that a folder may have: without `/`, control characters and surrogates, not too long."""
    named = "".join(character for character in text.replace("/", "\N{FRACTION SLASH}") if character.isprintable())
    return named.encode("utf-8", "ignore")[:NAME_BYTES].decode("utf-8", "ignore").strip(" .")


NAMES = sorted({name for text in HOSTILE.values() if (name := as_folder(text))})
ALL = "\n".join(HOSTILE.values())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server whose models, hub, keys and requests have hostile names."""
    folder = tmp_path_factory.mktemp("names")
    for name in NAMES:
        if name == WORKING:
            shutil.copytree(EMBEDDED / "demo-draft", folder / "models" / name)
        else:
            write_model(folder / "models" / name)
    with stand_in_hub() as hub:
        for place, name in enumerate(NAMES):
            for repository in (name, f"model-{place}"):
                hub.add(f"evil/{repository}", model_files(8), tags=["mlx", f"license:{name}", name], library=name)
        environment = {"PACELINE_MODEL_DIRS": str(folder / "models"), "PACELINE_HUB_ENDPOINT": hub.address}
        with serving(folder, **environment) as running:
            say_everything(running)
            yield running


def say_everything(server: Server) -> None:
    """Send the hostile strings to other routes that take text; a refusal is fine, status 500 is not."""
    for text in HOSTILE.values():
        printable = text.encode("utf-8", "ignore").decode()
        for path, body in (
            ("/admin/api/keys", {"name": printable[:80], "scope": "inference"}),
            ("/admin/api/v1/chat/completions", {"model": printable[:300], "messages": [], "user": printable}),
            ("/admin/api/downloads", {"repository": printable[:300], "drafts_for": printable[:300]}),
            ("/admin/api/models/load", {"model": printable[:300]}),
        ):
            response = server.client.post(path, json=body)
            assert response.status_code != 500, (path, text, response.text)
        response = server.client.patch("/admin/api/settings", json={"default_model": printable[:300]})
        assert response.status_code != 500, response.text


def check(page: Page) -> None:
    assert page.evaluate(FOREIGN) == []
    assert "49" not in page.locator("h1").first.inner_text()


def test_names_of_models_stay_text_on_every_page_that_lists_them(server: Server, visitor: Visitor) -> None:
    visit = visitor(server)
    page = visit.open("/admin/models")
    page.locator("#kind").select_option("all")
    ids = {model["id"] for model in server.call("GET", "/admin/api/models")["models"]}
    assert len(ids & set(NAMES)) > 50, "most hostile names are names of folders, too"
    expect(page.locator("tbody tr")).to_have_count(len(ids))
    listed = {label.strip() for label in page.locator("tbody th > a").all_text_contents()}
    assert ids <= listed
    check(page)
    for path in ("/admin/", "/admin/chat", "/admin/connect", "/admin/requests"):
        check(visit.open(path))


@pytest.mark.parametrize("kind", ["drafts", "pays", "models"])
def test_a_page_about_a_hostile_name_is_about_nothing_else(server: Server, visitor: Visitor, kind: str) -> None:
    visit = visitor(server)
    page = visit.open("/admin/models")
    chosen = [name for name in NAMES if ALERT in name][:: len(NAMES) // 5]
    for name in chosen:
        row = page.get_by_role("link", name=name, exact=True).first
        address = row.get_attribute("href") or ""
        opened = visit.open(address.replace("/admin/models/", f"/admin/{kind}/"))
        expect(opened.locator("h1")).to_have_text(name)
        check(opened)
        opened.close()


def test_settings_and_keys_stay_text(server: Server, visitor: Visitor) -> None:
    server.call("PATCH", "/admin/api/models/demo-assistant/settings", {"system_prompt": ALL})
    visit = visitor(server)
    page = visit.open("/admin/models/demo-assistant")
    expect(page.locator("#setting-system_prompt")).to_have_value(ALL.replace("\r\n", "\n").replace("\r", "\n"))
    check(page)
    page = visit.open("/admin/settings")
    keys = server.call("GET", "/admin/api/keys")["keys"]
    assert len(keys) > 50
    expect(page.locator("#keys .list > li")).to_have_count(len(keys))
    assert page.locator("#keys .list b").all_text_contents() == [key["name"] for key in keys]
    check(page)


def test_the_log_of_a_model_with_a_hostile_name_stays_text(server: Server, visitor: Visitor) -> None:
    server.reply("Hello", model=WORKING, max_tokens=4)
    visit = visitor(server)
    for path, place in (("/admin/logs", ".lines"), ("/admin/requests", "tbody"), ("/admin/", "main")):
        page = visit.open(path)
        expect(page.locator(place).first).to_contain_text(WORKING)
        check(page)


def test_lines_of_the_log_stay_text_as_they_come(server: Server, visitor: Visitor) -> None:
    first = 1_000_000
    lines = [
        {
            "number": first + at,
            "at": 1.8e9,
            "level": "error",
            "logger": text,
            "text": text,
            "trace": text,
            "request": text,
        }
        for at, text in enumerate(HOSTILE.values())
    ]
    body = json.dumps({"last": first + len(lines), "lines": lines})
    page = visitor(server).open("/admin/connect")
    page.route(
        re.compile("/admin/api/live[?]"),
        lambda route: route.fulfill(content_type="text/event-stream", body=f"event: logs\ndata: {body}\n\n"),
    )
    page.route(
        re.compile("/admin/api/logs[?]"), lambda route: route.fulfill(content_type="application/json", body=body)
    )
    page.goto("/admin/logs")
    page.locator("#level").select_option("error")
    expect(page.locator(".lines .line.error")).to_have_count(len(lines))
    shown = page.locator(".lines .line.error .said").all_text_contents()
    assert [line.strip() for line in shown] == [text.strip() for text in HOSTILE.values()]
    check(page)


def test_what_the_hub_says_stays_text_and_what_is_no_name_is_not_offered(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/downloads")
    page.locator("#query").fill("evil")
    page.keyboard.press("Enter")
    entries = page.locator("#search-title ~ ul > li")
    expect(entries.first).to_be_visible()
    assert ALERT in " ".join(entries.all_text_contents())
    results = server.call("GET", "/admin/api/hub/search?q=evil")["results"]
    assert results
    assert all(re.fullmatch(r"evil/model-\d+", result["repository"]) for result in results)
    check(page)
