"""The main story: pick a drafter, measure it, apply a measured setting, chat, and see what was accepted."""

import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Route, expect

from app.i18n.catalogs import read_words
from tests.browser.conftest import Visitor
from tests.browser.folders import HUGE
from tests.browser.scene import QUESTION
from tests.browser.server import MODEL, Server, serving
from tests.browser.witness import is_settled

words = read_words()
DRAFT = "demo-draft"
MEASURING_MS = 60_000
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server whose settings only this module's tests change."""
    with serving(tmp_path_factory.mktemp("drafting")) as running:
        yield running


def in_a_hurry(route: Route) -> None:
    """Pass the page's call on, but with a measurement budget that suits a test."""
    if route.request.method != "POST":
        route.continue_()
        return
    body = json.loads(route.request.post_data or "{}")
    route.continue_(post_data=json.dumps(body | {"minutes": 0.05, "rounds": 1}))


def test_pick_measure_apply_chat_and_see_it_again(own: Server, visitor: Visitor) -> None:
    page = visitor(own).open(f"/admin/drafts/{MODEL}")
    card = page.locator("article.candidate").filter(has=page.get_by_role("heading", name=DRAFT, exact=True))
    expect(card.get_by_role("checkbox")).to_be_hidden()
    page.get_by_role("radio", name=words("drafts.who_chosen")).check()
    card.get_by_role("checkbox").check()
    page.get_by_role("button", name=words("drafts.save"), exact=True).click()
    expect(page.locator(".toast.good")).to_be_visible()
    expect(card.get_by_text(words("drafts.is_planned"), exact=True)).to_be_visible()

    page.locator("nav.tabs").get_by_role("link", name=words("model.tab_pays")).click()
    is_settled(page)
    expect(page.get_by_text(words("pays.empty"))).to_be_visible()
    page.route("**/admin/api/measurements", in_a_hurry)
    page.locator("#minutes").select_option("0.5")
    page.get_by_role("checkbox", name=words("pays.several")).uncheck()
    page.get_by_role("button", name=words("pays.begin"), exact=True).click()
    expect(page.get_by_role("button", name=words("pays.stop"))).to_be_visible()
    expect(page.locator("p.answer")).to_have_text(re.compile(r"\d|fastest"), timeout=MEASURING_MS)
    expect(page.get_by_text(words("pays.one_round"))).to_be_visible()
    expect(page.locator(".plot svg").first).to_be_visible()
    assert page.locator("tbody tr").count() > 2
    # the recommendation varies with the load on the machine, so apply the drafter that was picked
    chosen = (
        page.locator("tbody tr").filter(has_text=re.compile(re.escape(words("method.draft_model")) + r", .*\d")).first
    )
    chosen.hover()
    chosen.get_by_role("button").click()
    expect(page.locator("#confirm-text")).to_contain_text(f"{words('model_settings.num_draft_tokens')}: ")
    page.locator("#confirm-yes").click()
    expect(page.locator(".toast.good").last).to_be_visible()
    expect(chosen.get_by_text(words("pays.in_use"), exact=True)).to_be_visible()
    expect(chosen.get_by_role("button")).to_be_hidden()
    is_settled(page)
    assert own.call("GET", f"/admin/api/models/{MODEL}/settings")["settings"]

    page.goto("/admin/chat")
    is_settled(page)
    page.locator("#option-method").select_option("draft_model")
    page.locator("#draft").fill(QUESTION)
    page.keyboard.press("Enter")
    reply = page.locator('article[data-role="assistant"]').last
    acceptance = reply.locator("dl div", has=page.get_by_text(words("figure.acceptance"), exact=True)).locator("dd")
    expect(acceptance).to_have_text(re.compile(r"^[1-9]\d?\d?%$"))
    text = acceptance.inner_text()
    page.get_by_role("button", name=words("chat.tokens"), exact=True).click()
    expect(reply.locator('mark[data-method="draft_model"]').first).to_be_visible()
    expect(page.locator(".legend mark")).to_have_text(words("method.draft_model"))

    page.reload()
    is_settled(page)
    expect(acceptance).to_have_text(text)
    expect(reply.locator('mark[data-method="draft_model"]').first).to_be_visible()

    page.goto(f"/admin/drafts/{MODEL}")
    is_settled(page)
    live = card.locator("dl div", has=page.get_by_text(words("drafts.live"), exact=True)).locator("dd")
    expect(live).to_have_text(re.compile(r"\d+%"))
    expect(card.locator(".gain")).to_have_text(re.compile(rf"\d|{words('drafts.no_difference')}"))


def test_every_page_says_the_same_of_the_latest_benchmark(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open(f"/admin/pays/{MODEL}")
    answer = page.locator("p.answer").inner_text()
    page.goto(f"/admin/drafts/{MODEL}")
    expect(page.locator("p.notice b")).to_have_text(answer)
    page.goto("/admin/")
    chip = page.locator("#loaded-title").locator("xpath=ancestor::section").locator("a.badge")
    expect(chip).to_have_attribute("title", answer)
    text = chip.inner_text().strip()
    page.goto("/admin/chat")
    expect(page.locator(".talk-head a.badge")).to_have_attribute("title", answer)
    if re.search(r"\d", text):
        assert text.endswith(page.locator(".talk-head a.badge").inner_text().strip())
    page.locator(".talk-head a.badge").click()
    expect(page).to_have_url(re.compile(f"/admin/drafts/{MODEL}$"))


def test_a_model_without_a_benchmark_offers_one_for_all_its_drafters(own: Server, visitor: Visitor) -> None:
    page = visitor(own).open("/admin/drafts/demo-hybrid")
    expect(page.locator("article.candidate .gain:visible")).to_have_count(0)
    page.route("**/admin/api/measurements", in_a_hurry)
    page.get_by_role("button", name=words("drafts.measure_all")).click()
    expect(page.get_by_role("button", name=words("drafts.measure_all"))).to_be_hidden()
    expect(page.locator("p.notice b")).to_have_text(
        re.compile(words("pays.first_impression", verdict="")), timeout=MEASURING_MS
    )
    expect(page.locator("article.candidate .gain:visible").first).to_be_visible()


def test_a_recommendation_says_what_its_drafters_take(server: Server, visitor: Visitor) -> None:
    def recommending(route: Route) -> None:
        view = route.fetch().json()
        view["measurements"][0]["report"]["advice"]["changes"] = [{"name": "drafts", "old": None, "new": [DRAFT]}]
        route.fulfill(json=view)

    page = visitor(server).open("/admin/")
    page.route("**/admin/api/measurements?model=*", recommending)
    page.goto(f"/admin/pays/{MODEL}")
    extra = page.locator("dl.changes div", has=page.get_by_text(words("drafts.extra"), exact=True))
    expect(extra.locator("dd")).to_have_text(re.compile(r"^\d+(\.\d)? MB$"))


def test_figures_of_another_benchmark_are_not_ranked_with_the_latest(server: Server, visitor: Visitor) -> None:
    def two_runs(route: Route) -> None:
        view = route.fetch().json()
        dated = [candidate for candidate in view["candidates"] if candidate["measured"]]
        for at, candidate in enumerate(dated):
            measured = {"ratio": 1.1 + at, "standing": "faster", "is_latest": at != len(dated) - 1, "rounds": 3}
            candidate["measured"] |= measured | {"low": 1.05, "high": 1.2 + at}
        route.fulfill(json=view)

    person = visitor(server)
    page = person.open("/admin/")
    page.route(re.compile(f"/admin/api/drafts/{MODEL}$"), two_runs)
    page.goto(f"/admin/drafts/{MODEL}")
    gains = page.locator("article.candidate .gain:visible")
    expect(gains.first).to_be_visible()
    shown = [float(re.search(r"[\d.]+", text).group()) for text in gains.all_inner_texts()]  # type: ignore[union-attr]
    assert len(shown) > 2
    assert shown[:-1] == sorted(shown[:-1], reverse=True)
    assert shown[-1] > shown[0], "the fastest of all was measured earlier"
    expect(page.locator("article.candidate .gain.good")).to_have_count(len(shown) - 1)
    expect(page.get_by_text(re.compile("not comparable"))).to_be_visible()


def test_a_benchmark_with_short_and_long_prompts_shows_the_figures_of_the_chosen_one(
    server: Server, visitor: Visitor
) -> None:
    def with_long_prompts(route: Route) -> None:
        answer = route.fetch().json()
        for row in answer["measurements"]:
            cells = row["report"]["cells"]
            cells.append(json.loads(json.dumps(cells[0])) | {"context": 1024})
            for setting in cells[-1]["settings"]:
                setting["tokens_per_second"] *= 3
        route.fulfill(json=answer)

    page = visitor(server).open("/admin/")
    page.route("**/admin/api/measurements?model=*", with_long_prompts)
    page.goto(f"/admin/pays/{MODEL}")
    is_settled(page)
    radios = page.get_by_role("radiogroup", name=words("pays.rows")).get_by_role("radio")
    expect(radios).to_have_count(2)
    expect(radios.first).to_be_checked()
    speed = page.locator("tbody tr td").first
    short = speed.inner_text()
    radios.last.check()
    expect(speed).not_to_have_text(short)
    expect(radios.first).not_to_be_checked()
    radios.first.check()
    expect(speed).to_have_text(short)


def test_a_benchmark_that_a_killed_server_took_along_is_not_called_measured(own: Server, visitor: Visitor) -> None:
    visit = visitor(own)
    visit.witness.is_offline = True
    visit.witness.expects(500, 503)
    page = visit.open(f"/admin/pays/{MODEL}")
    own.call("POST", "/admin/api/measurements", {"model": MODEL, "minutes": 2, "rounds": 3, "grid": "several"})
    expect(page.locator("#result-title")).to_have_text(words("pays.so_far"))
    expect(page.locator("button[aria-pressed]:enabled")).to_have_count(0)  # the figures so far are on screen
    own.kill()
    own.restart()
    expect(page.get_by_role("alert").filter(has_text=words("pays.lost"))).to_be_visible(timeout=MEASURING_MS)
    expect(page.locator(".toast")).to_have_count(0)


def test_a_model_that_does_not_fit_says_why_and_cannot_be_loaded(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open("/admin/models")
    row = page.locator("tbody tr", has=page.get_by_role("link", name=HUGE))
    expect(row.get_by_text(words("model.too_large"), exact=True)).to_be_visible()
    expect(row.locator(".problem:visible")).to_contain_text(re.compile(r"\d TB.*\d [GM]B"))
    expect(row.get_by_role("button", name=words("models.load_named", model=HUGE))).to_be_hidden()
    row.get_by_role("link", name=HUGE).click()
    is_settled(page)
    expect(page.get_by_role("alert").filter(has_text=re.compile(r"\d TB"))).to_be_visible()
    expect(page.get_by_role("button", name=words("models.load"), exact=True)).to_be_hidden()


def test_a_drafter_that_does_not_fit_says_why(server: Server, visitor: Visitor) -> None:
    page = visitor(server).open(f"/admin/drafts/{MODEL}")
    page.locator("summary").last.click()
    refused = page.locator("article.candidate.no")
    expect(refused.first).to_be_visible()
    for entry in refused.all():
        assert len(entry.locator("p.small").last.inner_text()) > 20


def test_the_save_button_that_stays_on_screen_hides_no_text_of_its_card(server: Server, visitor: Visitor) -> None:
    page = visitor(server, viewport={"width": 1280, "height": 800}).open(f"/admin/drafts/{MODEL}")
    is_scrolled, colours, gap_pixels = page.locator(".follows").evaluate(
        """(card) => {
          const bar = card.querySelector(".sticky");
          const colours = [bar, card].map((part) => getComputedStyle(part).backgroundColor);
          const gap = card.getBoundingClientRect().bottom - bar.getBoundingClientRect().bottom;
          return [card.scrollHeight > card.clientHeight, colours, gap];
        }"""
    )
    assert is_scrolled, "in a window of this height, the card is higher than what shows of it"
    assert colours[0] == colours[1], "text would show through"
    assert gap_pixels <= 2, "text would show below the button"


def test_the_memory_in_the_head_of_a_model_says_that_drafters_are_not_in_it(own: Server, visitor: Visitor) -> None:
    own.call("POST", "/admin/api/models/unload", {"model": MODEL})
    page = visitor(own).open(f"/admin/models/{MODEL}")
    expect(page.locator(".head")).to_contain_text(words("model.memory_alone"))
