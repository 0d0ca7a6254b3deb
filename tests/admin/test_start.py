"""The start page: what it shows, what it keeps to itself, and that no name of a model can become markup or code."""

import ast
import json
import re
import shlex

import pytest

from app.admin.assets import FOLDER
from app.admin.examples import curl_example, python_example
from app.core.messages import LoadedModel, Snapshot
from app.i18n import read_words
from tests.api.fakes import make_site, model

pytestmark = pytest.mark.anyio

POLICY = "default-src 'self'; object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "a'b\"c`$(id)\\",
    "{{ 7 * 7 }}{% raw %}",
    "x\ny",
    "--data @secret",
)
BASE = "http://127.0.0.1:8710/v1"


async def page_of(*names: str, **settings: object) -> str:
    site = make_site(models=tuple(model(name) for name in names), **settings)
    response = await site.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    return response.text


async def test_the_policy_lets_nothing_in_from_elsewhere() -> None:
    for settings in ({}, {"api_key": "k"}):
        response = await make_site(**settings).client.get("/")
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"


async def test_the_page_renders_without_a_model() -> None:
    page = await page_of()
    assert f'<code id="address">{BASE}</code>' in page
    assert "&#34;model&#34;: &#34;MODEL&#34;" in page


async def test_the_page_renders_with_many_models() -> None:
    page = await page_of(*(f"model-{number:04}" for number in range(2000)))
    assert "&#34;model&#34;: &#34;model-0000&#34;" in page
    assert len(page) < 20_000, "models come from /v1/models, not with the page"


@pytest.mark.parametrize("name", HOSTILE)
async def test_names_are_escaped(name: str) -> None:
    page = await page_of(name)
    plain = await page_of("plain")
    assert re.findall(r"</?\w+", page) == re.findall(r"</?\w+", plain)
    assert "49" not in page.replace("127.0.0.1", "")[page.index("<pre") :]


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_quoted_in_the_examples(name: str, *, has_key: bool) -> None:
    words = shlex.split(curl_example(BASE, name, has_key=has_key))
    assert json.loads(words[words.index("-d") + 1])["model"] == name
    assert ("Authorization: Bearer $PACELINE_API_KEY" in words) == has_key
    program = ast.parse(python_example(BASE, name, has_key=has_key))
    given = {each.arg: each.value for each in ast.walk(program) if isinstance(each, ast.keyword)}
    assert ast.literal_eval(given["model"]) == name
    assert ast.literal_eval(given["base_url"]) == BASE


async def test_a_model_in_memory_comes_first_and_drafters_and_broken_ones_never() -> None:
    models = (model("a"), model("b"), model("c", kind="drafter"), model("d", problem="no weights"))
    site = make_site(models=models)
    site.worker.snapshot = Snapshot(models=tuple(LoadedModel(id=name, state="ready") for name in ("b", "c", "d")))
    page = (await site.client.get("/")).text
    assert "&#34;model&#34;: &#34;b&#34;" in page


async def test_with_a_key_the_page_tells_no_model_and_asks_for_nothing() -> None:
    page = await page_of("secret-model", api_key="sk-1234")
    assert "secret-model" not in page
    assert "sk-1234" not in page
    assert "An API key is set" in page
    assert "PACELINE_API_KEY" in page
    assert script_data(page)["live"] is False
    for part in ("ask", "loaded", "disk", "status"):
        assert f'id="{part}"' not in page


async def test_what_the_scripts_look_for_is_on_the_page() -> None:
    page = await page_of("a")
    wanted = {name for path in FOLDER.glob("*.js") for name in re.findall(r'byId\("([\w-]+)"\)', path.read_text())}
    wanted |= set(re.findall(r'(?:data-copy|for|aria-labelledby)="([\w-]+)"', page))
    assert wanted - set(re.findall(r' id="([\w-]+)"', page)) == set()


async def test_the_page_has_no_inline_script_style_or_handler() -> None:
    page = await page_of("a")
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", page) == []
    scripts = re.findall(r"<script[^>]*>", page)
    assert [each for each in scripts if "src=" not in each] == ['<script type="application/json" id="data">']


async def test_the_scripts_get_the_whole_catalog() -> None:
    data = script_data(await page_of("a"))
    assert data == {"language": "en", "words": dict(read_words().entries), "live": True}


def script_data(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, object] = json.loads(found.group(1))
    return data
