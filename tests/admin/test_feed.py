"""The live feed: a value is read once for all tabs, a tab gets only what changed, and streams end with the server."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from app.admin.feed import Listener, LiveFeed, while_authorized
from tests.api.fakes import make_site, served

pytestmark = pytest.mark.anyio


class Source:
    """A topic's value with the number of its reads."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.reads = 0

    def __call__(self) -> object:
        self.reads += 1
        return self.value


def pending(listener: Listener) -> dict[str, object]:
    """Return the values that a tab would be sent next, by topic."""
    return {topic: json.loads(value) for topic, value in listener.take_pending()}


@pytest.fixture
def feed() -> LiveFeed:
    return LiveFeed(period_seconds=3600)


async def test_a_tab_gets_the_present_values_and_then_only_what_changed(feed: LiveFeed) -> None:
    fast, slow = Source(1), Source({"a": "b"})
    feed.topic("fast", fast)
    feed.topic("slow", slow)
    tab = feed.join(["fast", "slow"])
    await feed.tick()
    assert pending(tab) == {"fast": 1, "slow": {"a": "b"}}
    await feed.tick()
    assert pending(tab) == {}
    fast.value = 2
    await feed.tick()
    assert pending(tab) == {"fast": 2}
    feed.leave(tab)


async def test_a_value_is_read_once_for_all_tabs_and_only_for_topics_that_are_listened_to(feed: LiveFeed) -> None:
    wanted, other = Source(1), Source(1)
    feed.topic("wanted", wanted)
    feed.topic("other", other)
    tabs = [feed.join(["wanted"]) for _ in range(3)]
    await feed.tick()
    assert (wanted.reads, other.reads) == (1, 0)
    assert [pending(tab) for tab in tabs] == [{"wanted": 1}] * 3
    late = feed.join(["wanted"])
    assert pending(late) == {"wanted": 1}
    for tab in (*tabs, late):
        feed.leave(tab)
    assert len(feed) == 0


async def test_a_slow_tab_misses_versions_but_never_the_last_one(feed: LiveFeed) -> None:
    source = Source(0)
    feed.topic("n", source)
    tab = feed.join(["n"])
    for source.value in range(1, 6):
        await feed.tick()
    assert pending(tab) == {"n": 5}
    feed.leave(tab)


async def test_nobody_listens_nothing_is_read_and_nothing_old_is_told(feed: LiveFeed) -> None:
    source = Source("old")
    feed.topic("n", source)
    tab = feed.join(["n"])
    await feed.tick()
    feed.leave(tab)
    source.value = "new"
    await feed.tick()
    assert source.reads == 1
    tab = feed.join(["n"])
    assert pending(tab) == {}
    await feed.tick()
    assert pending(tab) == {"n": "new"}
    feed.leave(tab)


async def test_a_topic_may_be_awaited_and_one_that_fails_spoils_no_other(feed: LiveFeed) -> None:
    async def read() -> list[int]:
        return [1]

    def fail() -> object:
        raise RuntimeError("broken")

    feed.topic("broken", fail)
    feed.topic("waits", read)
    tab = feed.join(["broken", "waits"])
    await feed.tick()
    assert pending(tab) == {"waits": [1]}
    feed.leave(tab)


async def test_a_stream_ends_soon_after_its_session() -> None:
    async def frames() -> AsyncGenerator[bytes, None]:
        for number in range(8):
            now[0] = 2.0 * number
            yield str(number).encode()

    async def is_welcome() -> bool:
        return now[0] < 10

    now = [0.0]
    received = [frame async for frame in while_authorized(frames(), is_welcome, lambda: now[0])]
    assert b"".join(received) == b"012345", "asked at 6 seconds, and again when five more had passed, at 12"


def test_a_topic_is_registered_once(feed: LiveFeed) -> None:
    feed.topic("n", int)
    with pytest.raises(ValueError, match="twice"):
        feed.topic("n", int)


async def events(port: int, topics: str, headers: str = "authorization: Bearer k") -> AsyncIterator[str]:
    """Yield the lines of a real stream until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /admin/api/live?topics={topics} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n\r\n".encode())
    try:
        while line := await reader.readline():
            yield line.decode().strip()
    finally:
        writer.close()


async def test_the_stream_tells_the_worker_and_ends_with_the_server() -> None:
    site = make_site(api_key="k")
    async with asyncio.timeout(60), served(site) as (port, server):
        seen = []
        async for line in events(port, "worker,state"):
            seen.append(line)
            if line.startswith("data: ") and sum(seen_line.startswith("data: ") for seen_line in seen) == 2:
                assert {"event: worker", "event: state"} <= set(seen)
                server.stop()
        assert len(site.app.state.admin.feed) == 0


async def test_a_tab_that_leaves_is_forgotten_and_the_reading_ends() -> None:
    site = make_site(api_key="k")
    feed = site.app.state.admin.feed
    feed.topic("elsewhere", lambda: asyncio.to_thread(int))
    async with asyncio.timeout(60), served(site) as (port, _):
        stream = events(port, "elsewhere")
        async for line in stream:
            if line.startswith("data: "):
                break
        assert len(feed) == 1
        await stream.aclose()  # type: ignore[attr-defined]
        while len(feed):
            await feed.tick()


async def test_topics_must_be_known_and_the_stream_needs_a_session() -> None:
    site = make_site(api_key="k")
    own = {"authorization": "Bearer k"}
    for topics in ("", ",", "nothing", "worker,nothing"):
        response = await site.client.get(f"/admin/api/live?topics={topics}", headers=own)
        assert response.status_code == 400
        assert "worker" in response.json()["error"]["message"]
    assert (await site.client.get("/admin/api/live?topics=worker")).status_code == 401
    listed = await site.client.get("/admin/api/live/topics", headers=own)
    assert set(listed.json()["topics"]) >= {"worker", "state", "pace"}


async def test_a_topic_that_does_not_answer_delays_no_other_and_is_read_once() -> None:
    feed, answers, quick = LiveFeed(period_seconds=0.01), asyncio.Event(), Source(1)
    reads = []

    async def slow() -> str:
        reads.append(1)
        await answers.wait()
        return "late"

    feed.topic("slow", slow)
    feed.topic("quick", quick)
    tab = feed.join(["slow", "quick"])
    for quick.value in range(1, 4):
        await feed.tick()
        assert pending(tab) == {"quick": quick.value}
    assert reads == [1]
    answers.set()
    await feed.tick()
    assert pending(tab) == {"slow": "late"}
    feed.leave(tab)
