"""Reading of a request's bytes: chunked bodies, forms that are refused, and no parsing once a caller is refused."""

import asyncio
from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.serving.connection import FREE_SMALL_READS, GATHER_SECONDS, READ_BYTES, DeadlineProtocol
from app.serving.errors import Rejected
from app.serving.wire import FREE_FRAMING_BYTES, MAX_HEADER_COUNT, MAX_INCOMPLETE_BYTES, Connection
from tests.api.fakes import Site, make_site, served
from tests.api.test_wire import exchange, post

pytestmark = pytest.mark.anyio

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
NEXT = b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(payload: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(payload), extension, payload)


def chunks_of(size: int, count: int) -> bytes:
    return chunk(b" " * size) * count


def read(connection: h11.Connection, *parts: bytes) -> list[h11.Event]:
    """Return every event that the connection yields as these parts arrive."""
    events: list[h11.Event] = []
    for part in parts:
        connection.receive_data(part)
        while (event := connection.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
            events.append(event)  # type: ignore[arg-type]
    return events


def server(kind: type[h11.Connection] = Connection) -> h11.Connection:
    return kind(h11.SERVER, MAX_INCOMPLETE_BYTES)


def body_of(events: list[h11.Event]) -> bytes:
    return b"".join(bytes(event.data) for event in events if isinstance(event, h11.Data))


def cut(wire: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted({place % len(wire) for place in places} - {0}), len(wire)]
    return [wire[start:end] for start, end in pairwise(bounds)]


EXTENSIONS = st.sampled_from([b"", b";", b";a", b';a="b;c"', b"  ", b";a\t"])
PIECES = st.lists(st.tuples(st.binary(min_size=1, max_size=40), EXTENSIONS), max_size=8)


@given(PIECES, st.sampled_from([b"", b"a: b\r\n", b"a: b\r\nc:\r\n"]), st.lists(st.integers(0, 9999), max_size=9))
def test_chunks_cut_anywhere_are_the_body_that_h11_reads(
    pieces: list[tuple[bytes, bytes]], trailers: bytes, places: list[int]
) -> None:
    wire = CHUNKED + b"".join(chunk(*piece) for piece in pieces) + b"0\r\n" + trailers + b"\r\n" + NEXT
    ours, theirs = server(), server(h11.Connection)
    events, expected = read(ours, *cut(wire, places)), read(theirs, wire)
    assert body_of(events) == body_of(expected) == b"".join(payload for payload, _ in pieces)
    assert isinstance(events[-1], h11.EndOfMessage)
    assert ours.trailing_data == theirs.trailing_data == (NEXT, False)


def test_all_chunks_that_are_here_are_one_event() -> None:
    events = read(server(), CHUNKED + chunks_of(1, 2000) + END)
    assert [type(event) for event in events] == [h11.Request, h11.Data, h11.EndOfMessage]


TINY = {
    "one byte": chunk(b"a"),
    "twenty bytes": chunk(b"a" * 20),
    "a size with zeros": b"0000000000000001\r\na\r\n",
    "extensions": chunk(b"a" * 64, b";" + b"x" * 1000),
    "extensions of large chunks": chunk(b"a" * 1000, b";x=" + b"y" * 200),
}


@pytest.mark.parametrize("unit", TINY.values(), ids=list(TINY))
def test_a_body_of_much_framing_and_little_payload_is_refused(unit: bytes) -> None:
    with pytest.raises(Rejected, match="too small") as refused:
        read(server(), CHUNKED, *[unit] * (20 * FREE_FRAMING_BYTES // len(unit)))
    assert (refused.value.status, refused.value.close) == (400, True)


@pytest.mark.parametrize(("size", "count"), [(1, 3000), (48, 20_000), (64, 20_000), (8192, 200)])
def test_a_body_of_honest_chunks_is_read(size: int, count: int) -> None:
    wire = CHUNKED + chunks_of(size, count) + END
    events = read(server(), *(wire[start : start + READ_BYTES] for start in range(0, len(wire), READ_BYTES)))
    assert len(body_of(events)) == size * count
    assert isinstance(events[-1], h11.EndOfMessage)


@pytest.mark.parametrize(
    "body",
    [
        b"\r\n",
        b"zz\r\n",
        b"-1\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"1_0\r\n",
        b" 5\r\nhello\r\n",
        b"5 ;a\r\nhello\r\n",
        b"5\nhello\r\n",
        b"5\rhello\r\n",
        b"5;a\nb\r\nhello\r\n",
        b"5;a\rb\r\nhello\r\n",
        b"1" * 17 + b"\r\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello!\r\n0\r\n\r\n",
    ],
)
def test_a_chunk_whose_size_or_end_two_readers_could_see_elsewhere_is_refused(body: bytes) -> None:
    with pytest.raises(Rejected, match="no valid size or end"):
        read(server(), CHUNKED + body)


@pytest.mark.parametrize("trailers", [b"\n", b"a: b\n\n", b"a: b\n\r\n", b"a\rb\r\n\r\n"])
def test_a_body_does_not_end_at_a_line_end_that_only_some_would_see(trailers: bytes) -> None:
    events = read(server(), CHUNKED + chunk(b"a") + b"0\r\n" + trailers + NEXT)
    assert [type(event) for event in events] == [h11.Request, h11.Data]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\nhost: a\n\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\nx: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nhost: a", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding:\r\n chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\t0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: a\rb\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx:" + b" " * 60_000 + b"\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx:" + b"\t" * 60_000 + b"\x0c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx:" + b" " * 60_000 + b"\x7f\r\n\r\n", 400),
        (b"GET /?" + b"a&" * 5_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 414),
        (b"GET /?" + b"%41" * 20_000, 414),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x:\r\n" * MAX_HEADER_COUNT + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x:\r\n" * 10_000, 431),
    ],
)
def test_a_head_of_too_many_lines_or_of_doubtful_ones_is_refused_unparsed(head: bytes, status: int) -> None:
    with pytest.raises(Rejected) as refused:
        read(server(), head)
    assert refused.value.status == status


def test_a_head_may_have_as_many_lines_as_it_may_and_a_body_any_line_ends() -> None:
    start = HEAD.replace(b" HTTP", b"?" + b"a" * 8000 + b" HTTP")
    head = start + b"content-length: 3\r\n" + b"x:\r\n" * (MAX_HEADER_COUNT - 2)
    assert body_of(read(server(), head + b"\r\n\n a")) == b"\n a"


class Watched(DeadlineProtocol):
    """Protocol that notes the size of each read, and the bytes left whenever it parses after an early answer."""

    read_bytes: list[int]
    parsed_in_vain: list[bytes]

    def data_received(self, data: bytes) -> None:
        self.read_bytes.append(len(data))
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.is_answered_early:
            self.parsed_in_vain.append(self.conn.trailing_data[0])


@pytest.fixture
def watched() -> type[Watched]:
    return type("Watched", (Watched,), {"read_bytes": [], "parsed_in_vain": []})


ATTACKS = {
    "one-byte chunks": (401, post(b"", content_length="absent", transfer_encoding="chunked") + chunks_of(1, 200_000)),
    "small chunks": (401, post(b"", content_length="absent", transfer_encoding="chunked") + chunks_of(64, 40_000)),
    "a length": (401, post(b" " * 4_000_000)),
    "nowhere": (
        404,
        post(b"", "/nothing", content_length="absent", transfer_encoding="chunked") + chunks_of(1, 200_000),
    ),
}


@pytest.mark.parametrize(("status", "wire"), ATTACKS.values(), ids=list(ATTACKS))
async def test_nothing_is_parsed_for_callers_who_are_refused(status: int, wire: bytes, watched: type[Watched]) -> None:
    async with served(make_site(api_key="sk-of-this-test"), protocol=watched) as (port, _):
        got, answer = await exchange(port, wire)
    assert got == status
    assert answer.lower().count(b"connection: close") == 1
    assert watched.parsed_in_vain == []
    assert max(watched.read_bytes) <= READ_BYTES


async def test_a_body_that_comes_byte_by_byte_is_gathered(site: Site, watched: type[Watched]) -> None:
    async with served(site, protocol=watched) as (port, _):
        began = asyncio.get_running_loop().time()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", content_length="5000", connection="close"))
        for _ in range(5000):
            writer.write(b" ")
            await asyncio.sleep(0)
        answer = await reader.read()
        took = asyncio.get_running_loop().time() - began
        writer.close()
    assert answer.startswith(b"HTTP/1.1 40")
    assert len(watched.read_bytes) <= 2 + FREE_SMALL_READS + took / GATHER_SECONDS


@pytest.mark.parametrize("half_closes", [False, True])
async def test_a_body_in_one_byte_chunks_is_told_why_it_is_refused(
    site: Site, watched: type[Watched], *, half_closes: bool
) -> None:
    head = post(b"", content_length="absent", transfer_encoding="chunked")
    async with served(site, protocol=watched) as (port, _):
        status, answer = await exchange(port, head + chunks_of(1, 100_000), end=half_closes)
    assert status == 400
    assert b"chunks of the body are too small" in answer
    assert b"connection: close" in answer.lower()
    assert site.worker.commands == []


async def test_a_refused_body_has_the_shape_of_its_endpoint(site: Site) -> None:
    head = post(b"", "/v1/messages", content_length="absent", transfer_encoding="chunked")
    async with served(site) as (port, _):
        status, answer = await exchange(port, head + b"zz\r\n")
    assert (status, b'"type":"error"' in answer) == (400, True)


FORMS = {
    "a length and chunks": (400, HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + END),
    "chunks of HTTP/1.0": (400, CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + END),
    "encoded twice": (400, HEAD + b"transfer-encoding: chunked, chunked\r\n\r\n" + END),
    "HTTP/3.0": (505, NEXT.replace(b"HTTP/1.1", b"HTTP/3.0")),
    "HTTP/2.0": (505, NEXT.replace(b"HTTP/1.1", b"HTTP/2.0")),
    "HTTP/0.9": (505, NEXT.replace(b"HTTP/1.1", b"HTTP/0.9")),
    "line feeds alone": (400, NEXT.replace(b"\r\n", b"\n")),
    "a folded line": (400, NEXT.replace(b"127.0.0.1\r\n", b"127.0.0.1\r\n x\r\n")),
    "a body for a page": (200, NEXT.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")),
}


@pytest.mark.parametrize(("status", "wire"), FORMS.values(), ids=list(FORMS))
async def test_what_two_readers_could_read_differently_gets_one_answer_and_the_connection_closes(
    site: Site, status: int, wire: bytes
) -> None:
    async with served(site) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(wire + NEXT)
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.lower().count(b"content-length:") == 1
    assert b"connection: close" in answer.lower()
