"""Stored responses: the owner with the most bytes makes room, and the counted bytes match the memory in use."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

from app.api.commands import MAX_KEY_CHARACTERS, MAX_PAIRS, MAX_VALUE_CHARACTERS
from app.api.response_store import MAX_AGE_SECONDS, ResponseStore
from app.serving.errors import Rejected
from tests.api.fakes import Site, make_site

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
ROOM = 20_000
LARGE = "x" * 1000
OUTPUT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}


class Now:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def keep(kept: ResponseStore, owner: str, name: str, text: str = LARGE) -> None:
    kept.save(owner, {"id": name, "output": [{"id": f"msg_{name}", "text": text}]}, [{"text": text}], [{"text": text}])


def names(kept: ResponseStore, owner: str, *wanted: str) -> list[str]:
    """Return those of the wanted responses that are still stored."""

    def is_kept(name: str) -> bool:
        try:
            kept.find(owner, name)
        except Rejected:
            return False
        return True

    return [name for name in wanted if is_kept(name)]


def test_who_fills_the_room_loses_the_own_oldest_and_nobody_elses() -> None:
    kept = ResponseStore(max_bytes=ROOM)
    keep(kept, "one", "mine")
    for number in range(50):
        keep(kept, "two", str(number))
    assert names(kept, "one", "mine") == ["mine"]
    left = names(kept, "two", *map(str, range(50)))
    assert left == [str(number) for number in range(50 - len(left), 50)]
    assert 2 < len(left) < 50


def test_who_keeps_one_more_in_equal_shares_loses_the_own() -> None:
    kept = ResponseStore(max_bytes=ROOM)
    for number in range(50):
        keep(kept, "one", f"a{number:02}")
    for number in range(50):
        keep(kept, "two", f"b{number:02}")
    first = names(kept, "one", *(f"a{number:02}" for number in range(50)))
    second = names(kept, "two", *(f"b{number:02}" for number in range(50)))
    assert len(first) == len(second)
    keep(kept, "two", "b50")
    assert names(kept, "one", *first) == first
    assert names(kept, "two", *second, "b50") == [*second[1:], "b50"]


def test_of_three_who_has_most_gives_way() -> None:
    kept = ResponseStore(max_bytes=26 * len(LARGE))
    keep(kept, "small", "s")
    for number in range(4):
        keep(kept, "large", f"l{number}")
    keep(kept, "third", "t", LARGE * 2)
    assert names(kept, "small", "s") == ["s"]
    assert names(kept, "third", "t") == ["t"]
    assert names(kept, "large", "l0", "l1", "l2", "l3") == ["l1", "l2", "l3"]


def test_old_ones_of_every_owner_go_and_with_them_their_items() -> None:
    now = Now()
    kept = ResponseStore(now)
    keep(kept, "one", "a")
    now.seconds = MAX_AGE_SECONDS / 2
    keep(kept, "one", "b")
    assert kept.item("one", "msg_a") == {"id": "msg_a", "text": LARGE}
    assert kept.item("two", "msg_a") is None
    now.seconds = MAX_AGE_SECONDS + 1
    keep(kept, "two", "c")
    assert names(kept, "one", "a", "b") == ["b"]
    assert (kept.item("one", "msg_a"), kept.item("one", "msg_b")) == (None, {"id": "msg_b", "text": LARGE})
    kept.delete("one", "b")
    assert kept.item("one", "msg_b") is None


def test_an_item_is_no_longer_found_once_its_response_is_too_old() -> None:
    now = Now()
    kept = ResponseStore(now)
    keep(kept, "one", "a")
    now.seconds = MAX_AGE_SECONDS + 1
    assert names(kept, "one", "a") == []
    assert kept.item("one", "msg_a") is None


VALUES: dict[str, list[Any]] = {
    "lists": [[]] * 50_000,
    "objects": [{"a": 1}] * 20_000,
    "wide letters": ["\N{FOX FACE}" + "x" * 200_000],
}


@pytest.mark.parametrize("kind", VALUES)
def test_what_is_counted_is_what_they_take(kind: str) -> None:
    kept = ResponseStore()
    body = msgspec.json.encode([{"tools": VALUES[kind]}])
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(3):
        given = msgspec.json.decode(body)
        kept.save("one", {"id": str(number), "output": []}, given, given)
        del given
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken < 2 * sum(kept.find("one", str(number)).size_bytes for number in range(3))


# --- over HTTP ----------------------------------------------------------------------------------------------------


@pytest.fixture
def caller() -> Callable[[Site, str], httpx2.AsyncClient]:
    def call(site: Site, name: str) -> httpx2.AsyncClient:
        _, text = site.app.state.access_policy.accounts.keys.create(name, "inference")
        return site.connect(headers={"authorization": f"Bearer {text}"})

    return call


async def respond(client: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"model": "demo-main", "input": "Hi"} | fields)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


async def test_another_key_pushes_no_response_out(caller: Callable[[Site, str], httpx2.AsyncClient]) -> None:
    site = make_site(require_key=True)
    site.app.state.responses = ResponseStore(max_bytes=200_000)
    first, second = caller(site, "one"), caller(site, "two")
    mine = (await respond(first))["id"]
    theirs = [(await respond(second, instructions="x" * 20_000))["id"] for _ in range(20)]
    assert (await first.get(f"{PATH}/{mine}")).json()["id"] == mine
    assert (await second.get(f"{PATH}/{theirs[0]}")).status_code == 404
    assert (await second.get(f"{PATH}/{theirs[-1]}")).status_code == 200
    assert (await second.get(f"{PATH}/{mine}")).status_code == 404
    went_on = await respond(first, previous_response_id=mine)
    assert went_on["previous_response_id"] == mine
    assert [message["role"] for message in site.worker.commands[-1].messages or ()] == ["user", "assistant", "user"]


LARGEST = {f"{number:0{MAX_KEY_CHARACTERS}}": "x" * MAX_VALUE_CHARACTERS for number in range(MAX_PAIRS)}


@pytest.mark.parametrize(
    "metadata",
    [
        LARGEST | {"one": "more"},
        {"k" * (MAX_KEY_CHARACTERS + 1): "v"},
        {"k": "v" * (MAX_VALUE_CHARACTERS + 1)},
        {"k": 1},
        {"k": {"a": "b"}},
        {"k": None},
        ["k"],
        "k",
    ],
    ids=["pairs", "key", "value", "number", "object", "null", "list", "text"],
)
async def test_metadata_beyond_openais_bounds_is_refused(site: Site, metadata: Any) -> None:
    answer = await site.client.post(PATH, json={"model": "demo-main", "input": "Hi", "metadata": metadata})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "metadata", "invalid_request")
    assert site.worker.commands == []


async def test_metadata_within_them_is_kept_and_told(site: Site) -> None:
    response = await respond(site.client, metadata=LARGEST)
    assert response["metadata"] == LARGEST
    assert (await site.client.get(f"{PATH}/{response['id']}")).json() == response
    assert (await site.chat(metadata=LARGEST)).status_code == 200
    assert (await respond(site.client, metadata=None))["metadata"] == {}


async def test_an_item_is_named_once_lest_a_short_body_becomes_a_long_prompt(site: Site) -> None:
    first = await respond(site.client)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    question = {"role": "user", "content": "And?"}
    await respond(site.client, input=[reference, question])
    for twice in (reference, {"id": reference["id"]}):
        body = {"model": "demo-main", "input": [reference, question, twice]}
        answer = await site.client.post(PATH, json=body)
        assert answer.status_code == 400
        assert "referenced twice" in answer.json()["error"]["message"]
