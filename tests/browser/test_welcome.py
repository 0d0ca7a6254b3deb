"""The first run after the password: by keyboard alone, in every language, with steps that are skipped and resumed."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from app.admin.overview import STARTER
from app.hub.hub_search import PAIRS
from app.i18n.catalogs import Catalogs, Words, read_words
from tests.browser.conftest import Visitor
from tests.browser.server import PASSWORD, Server, serving
from tests.browser.test_pages import LAYOUT_CALLS, axe, check, check_shifts, look
from tests.browser.visit import PHONE, WIDE
from tests.browser.witness import is_settled
from tests.hub.queue import model_files
from tests.hub.stand_in import StandInHub, stand_in_hub
from tests.models.folders import write_model

STEPS = ("language", "folders", "models")


@pytest.fixture(scope="module")
def hub() -> Iterator[StandInHub]:
    with stand_in_hub() as hub:
        for repository in {name for main, _, drafters in PAIRS for name in (main, *(name for name, _ in drafters))}:
            hub.add(repository, model_files(2000), config={"model_type": "qwen3"})
        yield hub


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, hub: StandInHub) -> Iterator[Server]:
    """Yield a server with only a password set up, where LM Studio has a model."""
    folder = tmp_path_factory.mktemp("welcome")
    write_model(folder / ".lmstudio" / "models" / "someone" / "tiny")
    with serving(folder, account=False, PACELINE_HUB_ENDPOINT=hub.address) as running:
        running.set_up()
        yield running


def press(page: Page, name: str, role: str = "button") -> None:
    """Reach a control by Tab from where the page put the focus, and press it."""
    control = page.locator("main").get_by_role(role, name=name, exact=True)  # type: ignore[arg-type]
    expect(control).to_be_visible()
    expect(page.locator("h1")).to_be_focused()
    reach(page, control)
    page.keyboard.press("Enter")


def reach(page: Page, control: Locator) -> None:
    """Press Tab until the control has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if control.evaluate("(node) => node === document.activeElement"):
            return
    raise AssertionError(f"Tab never reached {control}")


def at(page: Page, step: str) -> None:
    expect(page).to_have_url(re.compile(rf"/admin/welcome\?step={step}$"))
    is_settled(page)


def left(server: Server) -> list[str]:
    steps: list[str] = server.call("GET", "/admin/api/welcome")["left"]
    return steps


def fits(page: Page) -> None:
    """Assert that the page does not shift, that axe finds nothing, and that it fits both widths."""
    check_shifts(page)
    check(axe(page))
    own = page.viewport_size
    assert own is not None
    for width in (PHONE, WIDE):
        page.set_viewport_size(width)  # type: ignore[arg-type]
        check(look(page, *LAYOUT_CALLS))
    page.set_viewport_size(own)


@pytest.mark.parametrize(
    ("language", "phone"),
    [
        ("en", False),
        ("ko", True),
        pytest.param("ja", False, marks=pytest.mark.soak),
        pytest.param("zh-Hans", True, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_the_whole_way_by_keyboard(
    tmp_path: Path, hub: StandInHub, visitor: Visitor, language: str, phone: bool
) -> None:
    """On a wide screen a pair is downloaded, on a narrow one the embedded models are tried."""
    words = read_words(language)
    write_model(tmp_path / ".lmstudio" / "models" / "someone" / "tiny")
    with serving(tmp_path, account=False, PACELINE_HUB_ENDPOINT=hub.address) as fresh:
        page = visitor(fresh, signed_in=False, phone=phone, locale=language).context.new_page()
        set_up(page, fresh, language)
        choose_language(page, language)
        press(page, words("welcome.next"))
        at(page, "folders")
        entry = page.locator("main li:visible", has=page.get_by_text(words("welcome.lm_studio"), exact=True))
        expect(entry).to_contain_text(re.compile(rf"{re.escape(words.n('welcome.models_found', 1))} · \d"))
        fits(page)
        press(page, words("welcome.skip"), "link")
        at(page, "models")
        assert left(fresh) == ["folders", "models"]
        if phone:
            fits(page)
            press(page, words("welcome.use_embedded"))
            ask_by_keyboard(page, words, phone=phone)
            assert left(fresh) == ["folders"]
            page.goto("/admin/")
            expect(page.locator("#recent-title")).to_be_visible()
            expect(page.get_by_text(words("welcome.unfinished"))).to_have_count(0)
        else:
            download_a_pair(page, words)
            fits(page)
            page.locator("h1").focus()
            press(page, words("welcome.chat"))
            expect(page).to_have_url(re.compile("/admin/chat"))
            assert left(fresh) == ["folders"]
            go_on_where_it_was_left(page, words)
            assert left(fresh) == []
        page.close()


def set_up(page: Page, fresh: Server, language: str) -> None:
    """Choose the first password, on a page in the language that the browser asks for."""
    page.goto(fresh.setup)
    expect(page.locator("html")).to_have_attribute("lang", language)
    expect(page.locator("h1")).to_have_text(read_words(language)("setup.welcome"))
    expect(page.locator("#password")).to_be_focused()
    fits(page)
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")
    expect(page).to_have_url(fresh.url("/admin/welcome"))
    fresh.client.post("/admin/api/login", json={"password": PASSWORD})
    assert left(fresh) == list(STEPS)


def choose_language(page: Page, language: str) -> None:
    """Switch to another language and back."""
    names = Catalogs().names
    other = "ko" if language == "en" else "en"
    fits(page)
    for code in (other, language):
        press(page, names[code])
        expect(page.locator("html")).to_have_attribute("lang", code)
        is_settled(page)


def download_a_pair(page: Page, words: Words) -> None:
    download = page.get_by_role("button", name=re.compile(words("downloads.pair_get_named", name=".*")))
    main = page.locator(".tiles > .card", has=download).first.get_by_role("heading").inner_text()
    reach(page, download.first)
    page.keyboard.press("Enter")
    reach(page, page.locator("#confirm-yes"))
    page.keyboard.press("Enter")
    queue = page.locator("section[aria-labelledby=queue-title]")
    expect(queue.get_by_text(words("downloads.state_done"), exact=True)).to_have_count(2)
    card = page.locator(".tiles > .card", has=page.get_by_role("heading", name=main))
    expect(card.get_by_text(words("downloads.here"))).to_be_visible()
    expect(card.get_by_role("button")).to_have_count(0)


def ask_by_keyboard(page: Page, words: Words, *, phone: bool) -> None:
    expect(page).to_have_url(re.compile(rf"/admin/chat\?model={STARTER}$"))
    is_settled(page)
    reach(page, page.locator("#draft"))
    page.keyboard.type("Count from 1 to 5.")
    if phone:  # there, Return starts a new line
        reach(page, page.get_by_role("button", name=words("reply.send"), exact=True))
    page.keyboard.press("Enter")
    expect(page.locator("#chat-thread")).to_contain_text("4, 5")


def go_on_where_it_was_left(page: Page, words: Words) -> None:
    page.goto("/admin/")
    notice = page.locator(".notice", has=page.get_by_text(words("welcome.unfinished")))
    is_settled(page)
    reach(page, notice.get_by_role("link", name=words("welcome.resume")))
    page.keyboard.press("Enter")
    expect(page.locator("nav [aria-current=step]")).to_contain_text(words("welcome.folders"))
    is_settled(page)
    press(page, words("welcome.next"))
    at(page, "models")
    page.goto("/admin/")
    expect(notice).to_have_count(0)


def test_the_password_is_chosen_in_a_language_that_the_browser_does_not_ask_for(
    tmp_path: Path, visitor: Visitor
) -> None:
    with serving(tmp_path, account=False) as fresh:
        page = visitor(fresh, signed_in=False).context.new_page()
        page.goto(fresh.setup)
        page.locator("#language").select_option("ja")
        expect(page.locator("h1")).to_have_text(read_words("ja")("setup.welcome"))
        expect(page.locator("#password")).to_be_visible()
        page.close()


def test_a_folder_that_is_added_is_counted_at_once(known: Server, visitor: Visitor, tmp_path: Path) -> None:
    words = read_words()
    write_model(tmp_path / "more" / "one")
    visit = visitor(known)
    visit.witness.expects(400, 409, 422)
    page = visit.open("/admin/welcome?step=folders")
    field = page.locator("#setting-model_dirs")
    field.fill(str(tmp_path / "nowhere"))
    page.keyboard.press("Enter")
    expect(page.locator("#setting-model_dirs-problem")).to_have_text(words("invalid.no_folder"))
    field.fill(str(tmp_path / "more"))
    page.keyboard.press("Enter")
    place = page.locator("main li:visible", has=page.get_by_text(str(tmp_path / "more"), exact=True)).first
    expect(place).to_contain_text(words.n("welcome.models_found", 1))
    known.call("PATCH", "/admin/api/settings", {"model_dirs": None})


def test_a_folder_around_one_that_is_listed_says_that_its_models_are_listed_above(
    known: Server, visitor: Visitor, tmp_path: Path
) -> None:
    words = read_words()
    inner = tmp_path / "inner"
    write_model(inner / "one")
    known.call("PATCH", "/admin/api/settings", {"model_dirs": [str(inner), str(tmp_path)]})
    try:
        page = visitor(known).open("/admin/welcome?step=folders")
        for folder, text in ((inner, "welcome.models_found"), (tmp_path, "welcome.listed_above")):
            place = page.locator("main li:visible", has=page.get_by_text(str(folder), exact=True)).first
            expect(place).to_contain_text(words.n(text, 1))
        shutil.rmtree(inner)
        page.reload()
        expect(page.get_by_text(words("models.folder_missing", folder=inner)).first).to_be_visible()
    finally:
        known.call("PATCH", "/admin/api/settings", {"model_dirs": None})


def test_a_pair_that_fails_to_download_is_told_and_the_embedded_models_go_on(
    tmp_path: Path, hub: StandInHub, visitor: Visitor
) -> None:
    words = read_words()
    with serving(tmp_path, PACELINE_HUB_ENDPOINT=hub.address) as own:
        visit = visitor(own)
        visit.witness.expects(502, 503)
        page = visit.open("/admin/welcome?step=models")
        hub.faults.statuses.extend([404] * 40)
        page.get_by_role("button", name=re.compile(words("downloads.pair_get_named", name=".*"))).first.click()
        page.locator("#confirm-yes").click()
        expect(page.get_by_text(words("downloads.state_failed"), exact=True).first).to_be_visible()
        expect(page.get_by_role("button", name=words("downloads.retry"), exact=True).first).to_be_visible()
        hub.faults.statuses.clear()
        page.get_by_role("button", name=words("welcome.use_embedded")).click()
        expect(page).to_have_url(own.url(f"/admin/chat?model={STARTER}"))
        assert left(own) == ["language", "folders"]
        page.goto("/admin/")
        page.get_by_role("button", name=words("welcome.end")).click()
        expect(page.get_by_text(words("welcome.unfinished"))).to_be_hidden()
        assert left(own) == []
        page.close()


def test_a_model_whose_drafter_is_gone_is_downloaded_without_it_and_one_model_has_one_card(
    tmp_path: Path, visitor: Visitor
) -> None:
    words = read_words()
    main, dflash, small = "mlx-community/Qwen3-8B-4bit", "z-lab/Qwen3-8B-DFlash-b16", "mlx-community/Qwen3-0.6B-4bit"
    with (
        stand_in_hub() as hub,
        serving(tmp_path, PACELINE_HUB_ENDPOINT=hub.address, PACELINE_MEMORY_LIMIT="16G") as own,
    ):
        hub.add(main, model_files(), config={"model_type": "qwen3"})
        visit = visitor(own)
        visit.witness.expects(404)
        page = visit.open("/admin/downloads")
        cards = page.locator(".tiles > .card:visible", has=page.get_by_role("heading", name=main))
        expect(cards).to_have_count(1)
        expect(cards).to_contain_text(words("downloads.good_all_round"))
        expect(cards).to_contain_text(re.compile(words("downloads.pair_speed", speed=r"[\d.]+")))
        choice = cards.get_by_role("combobox")
        expect(choice.get_by_role("option")).to_have_text([re.compile(dflash), re.compile(small)])
        expect(cards).to_contain_text(words("downloads.guess_dflash"))
        choice.select_option(index=1)
        expect(cards).to_contain_text(words("downloads.guess_draft_model"))
        choice.select_option(index=0)
        fits(page)
        cards.get_by_role("button").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(words("downloads.pair_gone", name=dflash))
        page.locator("#confirm-yes").click()
        own.until("downloads", lambda value: [row["repository"] for row in value["downloads"]] == [main])
        page.close()


def test_without_a_network_or_memory_it_is_said_and_the_embedded_models_are_offered(
    tmp_path: Path, visitor: Visitor
) -> None:
    words = read_words()
    with serving(tmp_path, PACELINE_HUB_ENDPOINT="http://127.0.0.1:9", PACELINE_MEMORY_LIMIT="500M") as offline:
        page = visitor(offline).open("/admin/welcome?step=models")
        expect(page.get_by_role("status").filter(has_text=words("downloads.problem_offline"))).to_be_visible()
        expect(page.get_by_text(words("downloads.pairs_none"))).to_be_visible()
        expect(page.get_by_role("button", name=words("welcome.use_embedded"))).to_be_visible()
        check_shifts(page)
        page.close()


def test_the_first_steps_are_found_again(known: Server, visitor: Visitor) -> None:
    words = read_words()
    page = visitor(known).open("/admin/models")
    page.keyboard.press("Control+k")
    page.keyboard.type(words("welcome.title"))
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/admin/welcome"))
    page.goto("/admin/settings")
    page.get_by_role("link", name=words("welcome.title")).click()
    expect(page).to_have_url(re.compile("/admin/welcome"))
