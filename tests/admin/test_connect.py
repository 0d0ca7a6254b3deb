"""The connect page: its code is right for the address, the key and any model, whatever characters its name has."""

import ast
import dataclasses
import json
import re
import shlex
from typing import Any

import pytest

from app.admin.connect import AGENT_SNIPPETS, KEY_VARIABLE, SNIPPETS, ClientTarget
from app.core.messages import Snapshot
from tests.admin.test_frame import HOSTILE, OWN, get
from tests.api.fakes import make_site, model
from tests.loaded import loaded

pytestmark = pytest.mark.anyio

BASE = "http://127.0.0.1:8710/v1"
SHELL = ("curl", "environment", "open-webui")
PYTHON = ("python", "langchain")
YAML = ("continue", "llm")
NAMES = (*HOSTILE, "org/plain-model", "모델 ¥", "a: b # c", "- x", "${HOME}")


def code(id: str, name: str, *, has_key: bool) -> str:  # noqa: A002
    target = ClientTarget(base_url=BASE, model=name, has_key=has_key, context_tokens=4096)
    return next(snippet.write(target) for snippet in SNIPPETS if snippet.id == id)


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("name", NAMES)
class TestQuoting:
    def test_shell(self, name: str, *, has_key: bool) -> None:
        for id in SHELL:  # noqa: A001
            text = code(id, name, has_key=has_key)
            words = shlex.split(text)
            if id == "curl":
                assert json.loads(words[words.index("-d") + 1])["model"] == name
                assert words[1] == f"{BASE}/chat/completions"
            assert (f"${KEY_VARIABLE}" in text) == has_key

    def test_agents(self, name: str, *, has_key: bool) -> None:
        target = ClientTarget(base_url=BASE, model=name, has_key=has_key)
        for snippet in AGENT_SNIPPETS:
            assert shlex.split(snippet.write(target)) == ["paceline", "launch", snippet.id, "--model", name]
            by_hand = snippet.by_hand(target)
            assert BASE.removesuffix("/v1") in by_hand
            assert target.literal_key in by_hand
            words = shlex.split(by_hand[by_hand.index("export ") :])
            assert snippet.agent.program in words
            if "--model" in words:
                assert words[words.index("--model") + 1].removeprefix("openai/") == name

    def test_python(self, name: str, *, has_key: bool) -> None:
        for id in PYTHON:  # noqa: A001
            text = code(id, name, has_key=has_key)
            given = {node.arg: node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword)}
            assert ast.literal_eval(given["model"]) == name
            assert ast.literal_eval(given["base_url"]) == BASE
            assert (f'os.environ["{KEY_VARIABLE}"]' in text) == has_key

    def test_javascript(self, name: str, *, has_key: bool) -> None:
        text = code("javascript", name, has_key=has_key)
        (line,) = (code_line for code_line in text.splitlines() if code_line.startswith("  model: "))
        assert json.loads(line.removeprefix("  model: ").removesuffix(",")) == name
        assert (f"process.env.{KEY_VARIABLE}" in text) == has_key

    def test_json(self, name: str, *, has_key: bool) -> None:
        settings = json.loads(code("zed", name, has_key=has_key))
        provider = settings["language_models"]["openai_compatible"]["Paceline"]
        assert provider["api_url"] == BASE
        assert provider["available_models"] == [{"name": name, "display_name": name, "max_tokens": 4096}]

    def test_yaml(self, name: str, *, has_key: bool) -> None:
        """Read the value as JSON, since every JSON string is a YAML string."""
        for id, field in zip(YAML, ("model", "model_name"), strict=True):  # noqa: A001
            (value,) = re.findall(rf"^ +{field}: (.*)$", code(id, name, has_key=has_key), re.MULTILINE)
            assert json.loads(value) == name


def test_every_snippet_is_looked_at() -> None:
    assert {snippet.id for snippet in SNIPPETS} == {*SHELL, *PYTHON, *YAML, "javascript", "zed", "apps"}
    assert "YOUR-KEY" in code("apps", "m", has_key=True)
    assert f"Model     {NAMES[0]}" in code("apps", NAMES[0], has_key=False)


async def connection(wanted: str = "", **site: Any) -> tuple[str, list[str]]:
    """Return the page and the models that it offers, the selected one first."""
    made = make_site(**site)
    made.worker.book.snapshot = Snapshot(models=tuple(loaded(name) for name in ("b", "c", "d")))
    page = (await made.client.get("/admin/connect", params={"model": wanted}, headers=OWN)).text
    options = re.findall(r"<option( selected)?>([^<]*)", page)
    return page, [name for _, name in sorted(options, key=lambda option: not option[0])]


MODELS = (model("a"), model("b"), model("c", drafter="dflash"), model("d", reason="no weights"))


async def test_a_model_in_memory_comes_first_and_drafters_and_broken_ones_never() -> None:
    page, models = await connection(api_key="k", models=MODELS)
    assert (models, "paceline launch claude --model b" in page) == (["b", "a"], True)
    assert (await connection(api_key="k", models=MODELS, default_model="a"))[1] == ["a", "b"]
    assert (await connection("a", api_key="k", models=MODELS))[1] == ["a", "b"]


async def test_a_model_that_is_not_here_is_never_written() -> None:
    assert "evil" not in (await connection("<b>evil", api_key="k", models=MODELS))[0]
    assert "paceline launch claude --model MODEL" in (await connection(api_key="k", models=()))[0]


async def test_the_code_is_for_the_address_that_the_browser_used_and_holds_no_key() -> None:
    site = make_site(api_key="k-very-secret", models=MODELS, allowed_hosts=("studio.local",))
    own = {"authorization": "Bearer k-very-secret", "host": "studio.local:99"}
    page = (await site.client.get("/admin/connect", headers=own)).text
    code = dict(re.findall(r'<code id="([\w-]+)">([^<]*)</code>', page))
    assert {*code} == {"address", *(snippet.id for snippet in (*SNIPPETS, *AGENT_SNIPPETS))}
    for name in ("address", *(snippet.id for snippet in SNIPPETS)):
        assert "http://studio.local:99/v1" in code[name], name
    assert "k-very-secret" not in page


async def test_an_agent_that_needs_a_longer_context_says_so() -> None:
    for context, count in ((4096, len(AGENT_SNIPPETS)), (32_768, 1), (1 << 17, 0)):
        site = make_site(api_key="k", models=(dataclasses.replace(model("a"), context=context),))
        page = (await get(site, "/admin/connect")).text
        assert page.count("choose a model with a longer context") == page.count(f"holds {context:,} tokens") == count


async def test_what_is_copied_is_on_the_page() -> None:
    page = (await get(make_site(api_key="k"), "/admin/connect")).text
    assert set(re.findall(r'data-copy="([\w-]+)"', page)) <= set(re.findall(r'\sid="([\w-]+)"', page))
