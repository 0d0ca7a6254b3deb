"""A download from the stand-in hub: found, cut, resumed, paused, finished, and then a model among the others."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from app.i18n.catalogs import read_words
from tests.browser.conftest import Visitor
from tests.browser.server import Server, serving
from tests.browser.test_pages import check_shifts
from tests.browser.witness import is_settled
from tests.hub.queue import model_files
from tests.hub.stand_in import StandInHub, stand_in_hub

words = read_words()
REPOSITORY = "mlx-community/Tiny-1B-4bit"
FILES = model_files(100_000)
CUT_BYTES = 200_000
SLICE_BYTES, PAUSE_SECONDS = 16_384, 0.25
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def hub() -> Iterator[StandInHub]:
    with stand_in_hub() as hub:
        hub.add(REPOSITORY, FILES, config={"model_type": "qwen3"})
        yield hub


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, hub: StandInHub) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("downloading"), PACELINE_HUB_ENDPOINT=hub.address) as running:
        yield running


def test_a_cut_download_goes_on_where_it_was_and_becomes_a_model(
    own: Server, hub: StandInHub, visitor: Visitor
) -> None:
    page = visitor(own).open("/admin/downloads")
    expect(page.get_by_text(words("downloads.none"))).to_be_visible()
    page.locator("#query").fill("tiny")
    page.keyboard.press("Enter")
    page.get_by_role("button", name=words("downloads.look_named", repository=REPOSITORY)).click()
    expect(page.get_by_text(words("downloads.size"), exact=True)).to_be_visible()

    hub.faults.cuts.extend([CUT_BYTES] * len(FILES))  # smaller files come whole
    hub.faults.slices, hub.faults.pause_seconds = SLICE_BYTES, PAUSE_SECONDS
    page.get_by_role("button", name=re.compile(r"^Download [\d.,]+ kB$")).click()
    row = page.locator("[aria-labelledby=queue-title] ul > li", has=page.get_by_text(REPOSITORY, exact=True))
    bar = row.locator("progress")
    expect(bar).to_be_visible()
    pause = row.get_by_role("button", name=words("downloads.pause"), exact=True)
    page.wait_for_function("(bar) => bar.value > 0.3", arg=bar.element_handle())
    assert [seen for seen in hub.gets("model.safetensors") if seen.range], "nothing was resumed after the cut"

    pause.click()
    expect(row.get_by_text(words("downloads.state_paused"), exact=True)).to_be_visible()
    incomplete = visitor(own).open("/admin/models")
    expect(incomplete.get_by_text(re.compile("Tiny-1B"))).to_have_count(0)
    hub.release.set()
    resumed = len(hub.gets("model.safetensors"))
    row.get_by_role("button", name=words("downloads.resume"), exact=True).click()
    expect(row.get_by_text(words("downloads.state_done"), exact=True)).to_be_visible()
    assert all(seen.range for seen in hub.gets("model.safetensors")[resumed:])

    folder = own.home / "models"
    (weights,) = folder.rglob("model.safetensors")
    assert weights.read_bytes() == FILES["model.safetensors"]
    row.get_by_role("link", name=words("downloads.open")).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(REPOSITORY)
    page.goto("/admin/models")
    expect(page.get_by_role("rowheader").filter(has_text=REPOSITORY)).to_be_visible()


def test_a_failed_download_goes_only_when_asked_twice_and_a_double_click_resumes_once(
    own: Server, visitor: Visitor
) -> None:
    visit = visitor(own)
    visit.witness.expects(400, 404, 409)
    page = visit.context.new_page()
    asked: list[str] = []
    own.until("worker", lambda worker: worker["ready"])
    view = own.call("GET", "/admin/api/downloads")
    row = {
        "id": 7, "repository": REPOSITORY, "state": "failed", "phase": "", "problem": "offline", "problem_text": "",
        "done_bytes": 30_000_000_000, "total_bytes": 40_000_000_000, "bytes_per_second": 0, "seconds_left": None,
        "silent_seconds": 0, "reconnect_seconds": 0, "drafts_for": "", "changed_at": time.time(), "position": 1,
    }  # fmt: skip

    def queue(route: Route) -> None:
        if route.request.method != "GET":
            asked.append(f"{route.request.method} {route.request.url.rpartition('/')[2]}")
            time.sleep(0.3)
        route.fulfill(json=view | {"downloads": [row]})

    page.route("**/admin/api/live?*", lambda route: route.abort())
    page.route(re.compile(r"/admin/api/downloads"), queue)
    visit.witness.is_offline = True
    page.goto("/admin/downloads")
    is_settled(page)
    forget = page.get_by_role("button", name=words("downloads.forget"), exact=True)
    forget.click()
    expect(page.locator("#confirm-text")).to_contain_text("30 GB")
    page.keyboard.press("Escape")
    expect(forget).to_be_focused()
    assert asked == []
    forget.click()
    page.locator("#confirm-yes").click()
    page.wait_for_function("() => !document.querySelector('#confirm').open")
    row |= {"state": "paused", "problem": ""}
    resume = page.get_by_role("button", name=words("downloads.resume"), exact=True)
    page.reload()
    is_settled(page)
    expect(resume).to_be_visible()
    row |= {"state": "running", "phase": "downloading"}
    resume.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name=words("downloads.pause"), exact=True)).to_be_focused()
    assert asked == ["DELETE 7", "POST resume"]


def test_a_silent_download_says_so_and_reconnects_when_asked(tmp_path: Path, visitor: Visitor) -> None:
    with stand_in_hub() as hub, serving(tmp_path, PACELINE_HUB_ENDPOINT=hub.address) as own:
        hub.add(REPOSITORY, FILES, config={"model_type": "qwen3"})
        hub.faults.stalls.extend([CUT_BYTES] * len(FILES))
        page = visitor(own).open("/admin/downloads")
        own.call("POST", "/admin/api/downloads", {"repository": REPOSITORY})
        row = page.locator("[aria-labelledby=queue-title] ul > li", has=page.get_by_text(REPOSITORY, exact=True))
        said = re.escape(words("downloads.silent", silence="S", time="T")).replace("S", ".+").replace("T", ".+")
        expect(row.get_by_text(re.compile(said))).to_be_visible()
        row.get_by_role("button", name=words("downloads.reconnect"), exact=True).click()
        expect(row.get_by_text(words("downloads.state_done"), exact=True)).to_be_visible()
        assert hub.gets("model.safetensors")[-1].range == f"bytes={CUT_BYTES}-"


def test_offline_is_said_before_anybody_searches(tmp_path: Path, visitor: Visitor) -> None:
    with serving(tmp_path, PACELINE_HUB_ENDPOINT="http://127.0.0.1:9") as offline:
        page = visitor(offline).open("/admin/downloads")
        expect(page.get_by_role("status").filter(has_text=words("downloads.problem_offline"))).to_be_in_viewport(
            ratio=1
        )
        check_shifts(page)
        page.close()


def test_offline_is_said_in_words_with_a_next_action(
    tmp_path: Path, own: Server, hub: StandInHub, visitor: Visitor
) -> None:
    hub.faults.api.extend([503] * 8)
    visit = visitor(own)
    visit.witness.expects(502, 503)
    page = visit.open("/admin/downloads")
    said = page.locator("section", has=page.locator("#search-title")).get_by_role("status")
    expect(said).to_have_text(words("downloads.problem_hub_error"))
    page.locator("#query").fill("tiny")
    page.keyboard.press("Enter")
    problem = page.locator("section", has=page.locator("#search-title")).get_by_role("alert").first
    expect(problem).to_have_text(re.compile(r"\w+ \w+"))
    hub.faults.api.clear()
    page.get_by_role("button", name=words("downloads.again")).click()
    expect(page.get_by_text(words.n("downloads.found", 1))).to_be_visible()
