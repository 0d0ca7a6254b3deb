"""Requests over a real socket: body lengths, slow clients, clients that disconnect, draining."""

import asyncio
import contextlib
import json
import logging
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from app.core.messages import Accepted, Delta, Finished, Generate
from app.serving.connection import DeadlineProtocol
from app.serving.server import AddressError, bind
from tests.api.fakes import USAGE, Site, chat_body, make_site, served

pytestmark = pytest.mark.anyio


def post(body: bytes, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    lines = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value != "absent")
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def chat(**fields: object) -> bytes:
    return post(json.dumps(chat_body(**fields)).encode())


async def exchange(port: int, data: bytes, *, end: bool = False) -> tuple[int, bytes]:
    """Send, and return one answer: its status, and its bytes until the body is complete or the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(length[0].split(b":")[1])) if length else await reader.read()
        return int(head.split()[1]), head + body
    finally:
        writer.close()


async def hold(command: Generate) -> AsyncIterator[Accepted | Delta]:
    """Accept the request, emit one word, and then nothing for ever."""
    yield Accepted(id=command.id, prompt_tokens=1)
    yield Delta(id=command.id, index=0, text="one", tokens=1)
    await asyncio.Event().wait()


async def never_accept(command: Generate) -> AsyncIterator[Accepted]:
    await asyncio.Event().wait()
    yield Accepted(id=command.id, prompt_tokens=1)


async def test_addresses_that_people_and_programs_try(site: Site) -> None:
    async with served(site) as (port, _):
        for path in ("/v1/models/", "/v1/models/demo-main/", "/v1", "/v1/", "/health", "/health/ready/", "/api/ps/"):
            assert (await exchange(port, f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()))[0] == 200, path
        for path, status in (("/", 303), ("/v1/models", 200), ("/v1/models/demo-main", 200), ("/v1/nothing", 404)):
            asked = f"HEAD {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked)
            answered = await reader.read()
            writer.close()
            assert answered.startswith(f"HTTP/1.1 {status} ".encode()), path
            assert answered.endswith(b"\r\n\r\n"), "the headers and no body"


async def test_content_lengths(site: Site) -> None:
    cases = {"invalid": 400, "-1": 400, "0": 400, "33554433": 413, "99999999999999999999": 413}
    async with served(site) as (port, _):
        for length, status in cases.items():
            got, answer = await exchange(port, post(b"", content_length=length))
            assert got in {status, 400}, length
            assert b'{"error":' in answer
            assert (await exchange(port, chat()))[0] == 200
        chunked = b"".join(b"100000\r\n" + b" " * 0x100000 + b"\r\n" for _ in range(33))
        got, answer = await exchange(port, post(b"", content_length="absent", transfer_encoding="chunked") + chunked)
        assert got == 413
        assert b"connection: close" in answer.lower()
        assert site.worker.cancelled == []


async def test_broken_http_and_huge_headers_get_an_error_object(site: Site) -> None:
    async with served(site) as (port, _):
        for data in (
            b"NONSENSE\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: 127.0.0.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
        ):
            status, answer = await exchange(port, data)
            assert status in {400, 431}
            assert b'{"error":' in answer
        assert (await exchange(port, chat()))[0] == 200


async def test_a_refused_post_closes_before_its_body_can_be_taken_for_a_request(site: Site) -> None:
    smuggled = b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    async with served(site) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", content_type="text/plain", content_length="100000") + smuggled)
        answer = await reader.read()
        writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 415")
    assert b"connection: close" in answer.lower()


async def test_partial_headers_and_bodies_time_out() -> None:
    class Hasty(DeadlineProtocol):
        header_seconds = 0.05

    site = make_site(context={"body_timeout_seconds": 0.05})
    async with served(site, protocol=Hasty) as (port, _):
        for start in (b"", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n", chat() + b"GET / HTTP/1.1\r\nho"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            async with asyncio.timeout(60):
                await reader.read()  # returns because the server closes
            writer.close()
        status, answer = await exchange(port, post(b"{", content_length="50"))
        assert status == 408
        assert b"connection: close" in answer.lower()


async def test_a_body_that_trickles_for_ever_is_ended_and_the_connection_closed() -> None:
    site = make_site(context={"body_timeout_seconds": 0.3})
    async with served(site) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", content_length="100000"))
        status = asyncio.create_task(reader.readline())
        async with asyncio.timeout(60):
            while not status.done():  # a byte every 50 ms until the server answers
                writer.write(b" ")
                await asyncio.wait([status], timeout=0.05)
            assert status.result().startswith(b"HTTP/1.1 408")
            assert b"connection: close" in (await reader.read()).lower()
        writer.close()


async def test_a_slow_upload_that_goes_on_passes() -> None:
    site = make_site(context={"body_timeout_seconds": 2.0})
    body = json.dumps(chat_body()).encode() + b" " * 200_000
    async with served(site) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", content_length=str(len(body))))
        status = asyncio.create_task(reader.readline())
        for start in range(0, len(body), 20_000):
            writer.write(body[start : start + 20_000])
            await asyncio.wait([status], timeout=0.25)
        assert (await status).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closed_its_half_gets_its_answer(site: Site, *, stream: bool) -> None:
    go_on = asyncio.Event()

    async def slowly(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
        yield Accepted(id=command.id, prompt_tokens=1)
        yield Delta(id=command.id, index=0, text="one", tokens=1)
        await go_on.wait()
        yield Delta(id=command.id, index=0, text=" two", tokens=1)
        yield Finished(id=command.id, index=0, finish_reason="stop", usage=USAGE)

    site.worker.script = slowly
    async with served(site) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(chat(stream=stream))
        await site.worker.wait_asked()
        if stream:
            await reader.readuntil(b"one")
        writer.write_eof()
        early = await reader.readuntil(b"are you there?" if stream else b"HTTP/1.1 100")
        go_on.set()
        async with asyncio.timeout(60):
            answer = early + await reader.read()
        assert b"two" in answer
        assert answer.count(b"[DONE]") == int(stream)
        writer.close()
        assert site.worker.cancelled == []


async def test_a_body_that_is_too_large_hears_so_before_the_connection_is_reset(site: Site) -> None:
    def send_all_then_read(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(post(b" " * 40_000_000))
            return connection.recv(1000)

    async with served(site) as (port, _):
        for _ in range(3):
            answer = await asyncio.to_thread(send_all_then_read, port)
            assert answer.startswith(b"HTTP/1.1 413")
            assert b"larger than 32 MiB" in answer


async def test_clients_that_keep_us_waiting_give_way_when_there_is_no_room(site: Site) -> None:
    site.worker.script = hold
    async with served(site, connections=8) as (port, server):
        _, streaming = await asyncio.open_connection("127.0.0.1", port)
        streaming.write(chat(stream=True))
        await site.worker.wait_asked()
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        for number, (_, writer) in enumerate(held):
            writer.write((b"", b"GET / HT", post(b"{", content_length="50"))[number % 3])
        async with asyncio.timeout(60):
            assert (await exchange(port, post(b"", path="/nothing")))[0] == 404
            ends = [await reader.read() for reader, _ in held[:6]]
        assert {end[:12] for end in ends} == {b"HTTP/1.1 408"}
        assert len(server.server_state.connections) <= 8
        assert site.worker.cancelled == [], "whoever is being answered stays"
        for writer in (streaming, *(writer for _, writer in held)):
            writer.close()


class Told(logging.Handler):
    """Log handler that sets its event at the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


async def test_without_files_to_open_clients_wait_and_the_log_has_one_line(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(site) as (port, _):
        clients = [socket.socket() for _ in range(20)]
        for client in clients:
            client.setblocking(False)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        loop, handler = asyncio.get_running_loop(), Told()
        logging.getLogger("paceline.server").addHandler(handler)
        highest = max(client.fileno() for client in clients)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            for client in clients:
                await loop.sock_connect(client, ("127.0.0.1", port))
                await loop.sock_sendall(client, b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            async with asyncio.timeout(60):
                await handler.event.wait()
        finally:
            logging.getLogger("paceline.server").removeHandler(handler)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with asyncio.timeout(60):
            answers = [await loop.sock_recv(client, 100) for client in clients]
        assert {answer[:15] for answer in answers} == {b"HTTP/1.1 200 OK"}
        assert caplog.text.count("no connection can be accepted (Too many open files)") == 1
        for client in clients:
            client.close()


@pytest.mark.parametrize(("hard", "seen"), [(256, "256 160 128"), (1000, "1000 904 872")])
def test_as_many_files_may_be_opened_as_the_system_allows(hard: int, seen: str) -> None:
    asked = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, {hard}));"
        "from app.machine import descriptors; from app.serving import server; descriptors.raise_limit();"
        "import app.worker.process; print(descriptors.limit(), server.max_connections(), server.max_open_requests())"
    )
    command = [sys.executable, "-c", asked]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == seen


Leave = Callable[[asyncio.StreamWriter], None]


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [hold, never_accept])
async def test_a_client_that_leaves_cancels_its_generation(
    site: Site, leave: Leave, stream: bool, script: Callable[[Generate], AsyncIterator[Accepted | Delta]]
) -> None:
    site.worker.script = script
    async with served(site) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(chat(stream=stream))
        await site.worker.wait_asked()
        if stream and script is hold:
            await reader.readuntil(b"one")
        leave(writer)
        await site.worker.wait_cancelled()
        assert site.worker.cancelled == [site.worker.commands[0].id], "exactly one id"
        site.worker.script = make_site().worker.script
        assert (await exchange(port, chat()))[0] == 200
    assert len(site.context.activity) == 0


SAID = {"messages": [{"role": "user", "content": "Hi"}]}
ENDPOINTS = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": SAID | {"max_tokens": 9},
    "/v1/embeddings": {"input": "Hi"},
    "/api/chat": SAID,
    "/api/generate": {"prompt": "Hi"},
    "/api/embed": {"input": "Hi"},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_endpoint_lets_go_of_a_client_that_left(site: Site, path: str, stream: bool) -> None:
    site.worker.script = hold
    async with served(site) as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(json.dumps({"model": "demo-main", "stream": stream} | ENDPOINTS[path]).encode(), path))
        await site.worker.wait_asked()
        writer.close()
        await site.worker.wait_cancelled()
        assert site.worker.cancelled == [site.worker.commands[0].id]
    assert len(site.context.activity) == 0


FROM_THE_PAGE = {"path": "/admin/api/v1/chat/completions", "authorization": "Bearer sk-of-this-test"}


async def leave_the_page(port: int) -> str:
    """Ask as the chat page does, disconnect after the first word, and return the request's id."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(json.dumps(chat_body(stream=True)).encode(), **FROM_THE_PAGE))
    received = await reader.readuntil(b'"one"')
    writer.close()
    return f"chatcmpl-{received.partition(b'chatcmpl-')[2][:24].decode()}"


async def come_again(port: int, request_id: str) -> tuple[int, bytes]:
    head = f"GET /admin/api/replies/{request_id} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    return await exchange(port, f"{head}authorization: {FROM_THE_PAGE['authorization']}\r\n\r\n".encode())


async def test_a_reply_goes_on_while_the_page_that_asked_is_reloaded() -> None:
    site, is_back = make_site(api_key="sk-of-this-test"), asyncio.Event()

    async def wait_for_the_page(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
        yield Accepted(id=command.id, prompt_tokens=1)
        yield Delta(id=command.id, index=0, text="one", tokens=1)
        await is_back.wait()
        yield Delta(id=command.id, index=0, text=" two", tokens=1)
        yield Finished(id=command.id, index=0, finish_reason="stop", usage=USAGE)

    site.worker.script = wait_for_the_page
    async with served(site) as (port, _):
        request_id = await leave_the_page(port)
        following = [asyncio.create_task(come_again(port, request_id)) for _ in range(2)]
        is_back.set()
        for status, answer in await asyncio.gather(*following):
            assert status == 200
            assert [word in answer for word in (b'"one"', b'" two"', b"data: [DONE]")] == [True] * 3
        assert site.worker.cancelled == []
        assert (await come_again(port, "chatcmpl-none"))[0] == 404
    assert len(site.context.activity) == 0


async def test_a_reply_ends_when_the_page_that_asked_does_not_come_again() -> None:
    site = make_site(api_key="sk-of-this-test", context={"reply_grace_seconds": 0.05})
    site.worker.script = hold
    async with served(site) as (port, _):
        request_id = await leave_the_page(port)
        await site.worker.wait_cancelled()
        assert (await come_again(port, request_id))[0] == 404
    assert len(site.context.activity) == 0


async def test_a_client_that_stops_reading_is_dropped() -> None:
    site = make_site(context={"write_timeout_seconds": 0.1})

    async def flood(command: Generate) -> AsyncIterator[Accepted | Delta]:
        yield Accepted(id=command.id, prompt_tokens=1)
        while True:
            yield Delta(id=command.id, index=0, text="x" * 50_000, tokens=1)
            await asyncio.sleep(0)

    site.worker.script = flood
    async with served(site) as (port, _):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(chat(stream=True))
        await site.worker.wait_cancelled()
        connection.close()


async def test_two_hundred_clients_that_leave_do_not_hold_anything(site: Site) -> None:
    site.worker.script = hold
    async with served(site) as (port, _):
        writers = []
        for _ in range(200):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(chat(stream=True))
            writers.append(writer)
        await site.worker.wait_asked(200)
        for writer in writers:
            writer.close()
        await site.worker.wait_cancelled(200)
        site.worker.script = make_site().worker.script
        async with asyncio.timeout(60):
            assert (await exchange(port, chat()))[0] == 200


async def test_drain_finishes_what_runs_and_refuses_what_is_new(site: Site) -> None:
    finish = asyncio.Event()

    async def wait_then_finish(command: Generate) -> AsyncIterator[Accepted | Finished]:
        yield Accepted(id=command.id, prompt_tokens=1)
        await finish.wait()
        yield Finished(id=command.id, index=0, finish_reason="stop", usage=USAGE)

    site.worker.script = wait_then_finish
    async with served(site, drain_seconds=10) as (port, server):
        running = asyncio.create_task(exchange(port, chat(stream=True)))
        await site.worker.wait_asked()
        server.stop()
        await asyncio.sleep(0)
        status, answer = await exchange(port, chat())
        assert (status, b"shutting_down" in answer) == (503, True)
        assert (await exchange(port, b"GET /health/ready HTTP/1.1\r\nhost: localhost\r\n\r\n"))[0] == 503
        finish.set()
        status, answer = await running
        assert status == 200
        assert b"data: [DONE]" in answer


async def test_drain_ends_the_rest_with_an_error_frame(site: Site) -> None:
    site.worker.script = hold
    async with served(site, drain_seconds=0.01) as (port, server):
        running = asyncio.create_task(exchange(port, chat(stream=True)))
        await site.worker.wait_asked()
        server.stop()
        _, answer = await running
    assert b'"code":"shutting_down"' in answer
    assert b"[DONE]" not in answer
    await site.worker.wait_cancelled()


async def test_a_second_stop_does_not_wait(site: Site) -> None:
    site.worker.script = hold
    async with served(site, drain_seconds=3600) as (port, server):
        running = asyncio.create_task(exchange(port, chat(stream=True)))
        await site.worker.wait_asked()
        server.stop()
        server.stop()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
        await running


def test_a_taken_port_says_who_should_move() -> None:
    taken = bind("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    with taken, pytest.raises(AddressError, match=f"port {port} is taken .*PACELINE_PORT"):
        bind("127.0.0.1", port)
    with pytest.raises(AddressError, match="PACELINE_HOST"):
        bind("203.0.113.1", 0)


async def test_connections_send_small_writes_at_once(site: Site) -> None:
    """Without TCP_NODELAY, a client that reuses its connection waits 40 ms while the kernel gathers small writes."""
    async with served(site) as (port, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
