"""Languages and colours, chosen per browser; a pseudo-locale finds text that is not translated or does not fit."""

import re

import pytest
from playwright.sync_api import Page, expect

from app.admin.connect import AGENT_SNIPPETS, SNIPPETS
from app.engine.memory import device_name
from app.i18n.catalogs import languages, read_words
from tests.admin.pseudo import CLOSE, CODE, OPEN
from tests.browser.conftest import Visitor
from tests.browser.folders import HUGE
from tests.browser.places import PLACES, Place
from tests.browser.scene import QUESTION, REPOSITORY
from tests.browser.server import MODEL, Server
from tests.browser.test_pages import LAYOUT_CALLS, NEXT_FRAMES, check, look
from tests.browser.visit import PHONE, TABLET
from tests.browser.witness import is_settled

UNITS = (
    "byte|bytes|kB|MB|GB|TB|ms|sec|min|hr|day|days|hour|hours|minute|minutes|second|seconds|ago|now|yesterday|in|AM|PM|"
    "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|[KMB]"
)
FROM_INTL = re.compile(rf"(?:[\d.,:;%×–·/+()\s~≈−-]|(?<![A-Za-z])(?:{UNITS})(?![A-Za-z]))*")
NAMES = re.compile(
    rf"{re.escape(REPOSITORY)}|{re.escape(QUESTION)}|(?:~/)?[\w.-]*/[\w./-]+|demo-[\w-]+|{HUGE}|Pseudo|Paceline|MLX|mlx-lm|mlx|"
    r"Ctrl K|Chrome, Linux|DFlash|EAGLE-?3|MTP|auto|min_p|top_[pk]|seed|temperature|\w+_penalty|"
    + "|".join(
        map(
            re.escape,
            (
                device_name(),
                *(snippet.name for snippet in SNIPPETS),
                *(snippet.agent.title for snippet in AGENT_SNIPPETS),
            ),
        )
    )
)
MARKED = re.compile(rf"{re.escape(OPEN)}(?:(?!{re.escape(OPEN)}).)*?{re.escape(CLOSE)}", re.DOTALL)
BARE = """(marks) => {
  const strip = () => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      for (const mark of marks) if (node.data.includes(mark)) node.data = node.data.replaceAll(mark, "");
    }
  };
  strip();
  // What the page refreshes comes with its marks again.
  new MutationObserver(strip).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_nothing_is_untranslated_and_longer_words_find_room(server: Server, visitor: Visitor, place: Place) -> None:
    page = visitor(server, signed_in=place.signed_in, locale=CODE).open(place.address(server))
    check_words(page)


def test_a_model_at_rest_finds_room_for_longer_words(server: Server, visitor: Visitor) -> None:
    server.call("POST", "/admin/api/models/unload", {"model": MODEL})
    try:
        check_words(visitor(server, locale=CODE).open(f"/admin/models/{MODEL}"))
    finally:
        server.call("POST", "/admin/api/models/load", {"model": MODEL})


def test_the_chats_head_finds_room_for_a_gain_in_longer_words(server: Server, visitor: Visitor) -> None:
    page = visitor(server, locale=CODE).open("/admin/chat")
    gain = page.locator(".picker a.badge")
    gain.locator("span").last.evaluate(
        "(span, words) => { span.textContent = words; }", f"{OPEN}åƀöûţ 12.8×~~~~{CLOSE}"
    )
    check_words(page)


def check_words(page: Page) -> None:
    """Assert that a page in the pseudo-locale is translated and fits windows of three sizes."""
    expect(page.locator("html")).to_have_attribute("lang", CODE)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    check([text for text in look(page, "texts") if not is_translated(text)])
    page.evaluate(BARE, [OPEN, CLOSE])  # without the marks, text is 40 % longer than English, not more
    check(look(page, *LAYOUT_CALLS, "overflowing"))
    for size in (TABLET, PHONE):
        page.set_viewport_size(size)
        page.evaluate(NEXT_FRAMES)
        check(look(page, *LAYOUT_CALLS, "overflowing"))


def is_translated(text: str) -> bool:
    """Return whether a text comes from the catalog, or is only a number, a date or a name."""
    while (unmarked := MARKED.sub("", text)) != text:
        text = unmarked
    return FROM_INTL.fullmatch(NAMES.sub("", unmarked)) is not None


def test_a_browser_chooses_its_language_for_itself(server: Server, visitor: Visitor) -> None:
    desk, phone = visitor(server), visitor(server)
    page, away = desk.open("/admin/models"), phone.open("/admin/")
    for language in (*languages(), CODE):
        page.locator("#language").select_option(language)
        expect(page.locator("html")).to_have_attribute("lang", language)
        is_settled(page)
        other = desk.open("/admin/")
        expect(other.locator("html")).to_have_attribute("lang", language)
        away.reload()
        expect(away.locator("html")).to_have_attribute("lang", "en")
        if language != CODE:
            words = read_words(language)
            expect(other.get_by_role("heading", level=1)).to_have_text(words("navigation.overview"))
            expect(page.get_by_role("heading", level=1)).to_have_text(words("navigation.models"))
        other.close()


def test_the_first_click_on_the_colours_is_seen_and_stays_with_this_browser(server: Server, visitor: Visitor) -> None:
    for scheme in ("light", "dark"):
        visit = visitor(server, color_scheme=scheme)
        page = visit.open("/admin/")
        background = "() => getComputedStyle(document.documentElement).backgroundColor"
        before = page.evaluate(background)
        page.locator('.personal button[x-on\\:click="paint"]').click()
        assert (after := page.evaluate(background)) != before
        page.reload()
        assert page.evaluate(background) == after
        assert visitor(server, color_scheme=scheme).open("/admin/").evaluate(background) == before
