"""The log page: live lines, filters and the download; no line becomes markup."""

import json
import logging
from collections.abc import Iterator

import pytest

from app.serving.logs import LogRing
from tests.admin.test_frame import HOSTILE, OWN, get, script_data
from tests.api.fakes import Site, make_site

pytestmark = pytest.mark.anyio


@pytest.fixture
def site() -> Site:
    return make_site(api_key="k")


@pytest.fixture
def logger(site: Site) -> Iterator[logging.Logger]:
    made = logging.getLogger("paceline.page")
    made.propagate = False
    made.setLevel(logging.DEBUG)
    ring: LogRing = site.app.state.admin.logs
    made.addHandler(ring)
    yield made
    made.removeHandler(ring)
    made.propagate = True


async def test_lines_come_with_numbers_and_can_be_narrowed(site: Site, logger: logging.Logger) -> None:
    for number in range(5):
        logger.log(logging.WARNING if number % 2 else logging.INFO, "line %d", number)

    async def lines(**wanted: object) -> list[int]:
        response = await site.client.get("/admin/api/logs", params=wanted, headers=OWN)  # type: ignore[arg-type]
        assert response.status_code == 200
        assert response.json()["last"] == 5
        return [line["number"] for line in response.json()["lines"]]

    assert await lines() == [1, 2, 3, 4, 5]
    assert await lines(after=3) == [4, 5]
    assert await lines(level="warning") == [2, 4]
    assert await lines(text="LINE 4") == [5]
    assert await lines(logger="nobody") == []
    assert await lines(count=1) == [5]
    for wrong in ({"level": "loud"}, {"after": -1}, {"count": 0}, {"text": "x" * 501}):
        assert (await site.client.get("/admin/api/logs", params=wrong, headers=OWN)).status_code == 400  # type: ignore[arg-type]


async def test_the_file_has_what_the_filter_leaves(site: Site, logger: logging.Logger) -> None:
    logger.info("one")
    logger.error("two of chatcmpl-%s", "a" * 24)
    response = await site.client.get("/admin/api/logs/download", params={"level": "error"}, headers=OWN)
    assert "attachment" in response.headers["content-disposition"]
    (line,) = [json.loads(text) for text in response.text.splitlines()]
    assert (line["level"], line["request"]) == ("error", f"chatcmpl-{'a' * 24}")


@pytest.mark.parametrize("text", [*HOSTILE, "\x1b[2J", "\u202e"])
async def test_no_line_becomes_markup(site: Site, logger: logging.Logger, text: str) -> None:
    logger.warning("plain")
    tags = (await get(site, "/admin/logs")).text.count("<")
    logger.warning("%s", text)
    page = (await get(site, "/admin/logs")).text
    assert page.count("<") == tags
    said = script_data(page)["lines"][-1]["text"]
    assert said.isprintable()


async def test_the_live_topic_tells_the_last_lines(site: Site, logger: logging.Logger) -> None:
    feed = site.app.state.admin.feed
    tab = feed.join(["logs"])
    for number in range(150):
        logger.info("line %d", number)
    await feed.tick()
    logs = dict((topic, json.loads(value)) for topic, value in tab.take_pending())["logs"]  # noqa: C402
    assert logs["last"] == 150
    assert [line["number"] for line in logs["lines"]] == list(range(51, 151))
    feed.leave(tab)
