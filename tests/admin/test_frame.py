"""The frame of every page: security policy, theme, language and texts; no model name becomes markup."""

import json
import re
from typing import Any, get_args

import httpx2
import pytest

from app.admin.templating import POLICY, THEMES
from app.core.messages import Snapshot
from app.core.reason import Reason
from app.i18n.catalogs import read_words
from app.settings import Settings
from tests.admin.pseudo import OPEN, write_pseudo_locale
from tests.api.fakes import Site, make_site, model
from tests.loaded import loaded

pytestmark = pytest.mark.anyio

OWN = {"authorization": "Bearer k"}
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "a'b\"c`$(id)\\",
    "{{ 7 * 7 }}{% raw %}",
    "x\ny",
    "--data @secret",
)


async def get(site: Site, path: str = "/admin/", **headers: str) -> httpx2.Response:
    response = await site.client.get(path, headers=OWN | headers)
    assert response.status_code == 200, response.text
    return response


def script_data(page: str, name: str = "data") -> Any:
    match = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match.group(1))


async def test_the_address_of_the_server_leads_to_the_dashboard() -> None:
    response = await make_site(api_key="k").client.get("/")
    assert (response.status_code, response.headers["location"]) == (303, "/admin/")


async def test_the_policy_lets_in_only_files_of_this_server_and_nobody_keeps_a_page() -> None:
    response = await get(make_site(api_key="k"))
    assert response.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("theme", ["system", "light", "dark"])
async def test_the_page_comes_in_the_chosen_colours(theme: Any) -> None:
    page = (await get(make_site(api_key="k", theme=theme))).text
    assert f'data-theme="{theme}"' in page


async def test_the_language_is_the_chosen_one_else_the_browsers_else_english(tmp_path: Any) -> None:
    code = write_pseudo_locale(tmp_path)
    site = make_site(api_key="k", home=tmp_path)
    assert 'lang="en"' in (await get(site)).text
    page = (await get(site, **{"accept-language": f"tlh, {code};q=0.5"})).text
    assert f'<html lang="{code}"' in page
    assert OPEN in page
    words = script_data(page, "words")
    assert all(text.startswith(OPEN) for text in words.values())
    chosen = make_site(api_key="k", home=tmp_path, language="en")
    assert '<html lang="en"' in (await get(chosen, **{"accept-language": code})).text


async def test_what_a_browser_chose_goes_before_the_setting_of_the_server() -> None:
    site = make_site(api_key="k", language="ko", theme="dark")
    page = (await get(site, cookie="paceline_language=ja; paceline_theme=light")).text
    assert '<html lang="ja" data-theme="light"' in page
    for nonsense in ("paceline_language=../x; paceline_theme=pink", ""):
        assert '<html lang="ko" data-theme="dark"' in (await get(site, cookie=nonsense)).text


async def test_an_address_that_is_no_page_is_a_page_that_says_so_and_leads_on() -> None:
    client = make_site(api_key="k").client
    for path in ("/admin/nothing", "/nothing", "/admin/requests/a/b"):
        response = await client.get(path, headers={"accept": "text/html,*/*;q=0.8", "accept-language": "ko"})
        assert response.status_code == 404
        assert read_words("ko")("problem.missing") in response.text
        assert 'href="/admin/"' in response.text
    for path in ("/v1/nothing", "/admin/api/nothing", "/nothing"):
        response = await client.get(path, headers=OWN)
        assert response.json()["error"]["code"] == "unknown_url", path


async def test_a_script_gets_the_words_that_scripts_name_and_no_others() -> None:
    words = script_data((await get(make_site(api_key="k"))).text, "words")
    catalog = read_words().entries
    assert words.items() <= catalog.items()
    assert words["core.offline"]
    assert {"overview.restart_busy.one", "overview.restart_busy.other"} <= set(words)
    assert "navigation.models" not in words


async def test_navigation_says_where_one_is() -> None:
    site = make_site(api_key="k")
    for path in ("/admin/", "/admin/connect"):
        page = (await get(site, path)).text
        assert re.findall(r'<a href="([^"]+)" aria-current="page"', page) == [path]


@pytest.mark.parametrize("path", ["/admin/", "/admin/connect"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_names_of_models_are_text_everywhere(path: str, name: str) -> None:
    async def page_of(name: str) -> str:
        site = make_site(api_key="k", models=(model(name),))
        held = loaded(name, unavailable={"mtp": Reason("cannot_draft", {"detail": name})})
        site.worker.book.snapshot = Snapshot(models=(held,))
        site.worker.quarantined = {name: Reason("drafters", {"detail": name})}
        return (await get(site, path)).text

    page = await page_of(name)
    assert re.findall(r"</?\w+", page) == re.findall(r"</?\w+", await page_of("plain"))
    assert ">49<" not in page


async def test_pages_have_no_inline_script_style_or_handler() -> None:
    site = make_site(api_key="k", models=(model("a"),))
    for path in ("/admin/", "/admin/connect"):
        page = (await get(site, path)).text
        assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", page) == []
        inline = [tag for tag in re.findall(r"<script[^>]*>", page) if "src=" not in tag]
        assert inline == [f'<script type="application/json" id="{name}">' for name in ("data", "words")]


async def test_what_labels_and_descriptions_point_to_is_on_the_page() -> None:
    site = make_site(api_key="k")
    for path in ("/admin/", "/admin/connect"):
        page = (await get(site, path)).text
        wanted = set(re.findall(r'(?:\sfor|aria-labelledby|aria-describedby|aria-controls)="([\w-]+)"', page))
        assert wanted - set(re.findall(r'\sid="([\w-]+)"', page)) == set()


def test_the_themes_are_those_of_the_setting() -> None:
    assert get_args(Settings.model_fields["theme"].annotation) == THEMES


async def test_every_template_compiles_when_the_server_starts() -> None:
    app = make_site(api_key="k").app
    async with app.router.lifespan_context(app):
        pass
