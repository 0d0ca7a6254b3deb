"""Frames: whole, split, hostile; both ends over a real socketpair."""

import asyncio
import contextlib
import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from app.core.errors import InvalidRequest
from app.core.messages import Accepted, Cancel, Command, Delta, Event, Failed, Generate, Shutdown
from app.core.unit import ModelSpecification
from app.machine import channel as channel_module
from app.machine.channel import (
    FrameDecoder,
    FrameError,
    ServerChannel,
    WorkerChannel,
    pack,
    unpack_command,
    unpack_event,
)

MODEL = ModelSpecification(id="m", path="/models/m")
DEADLINE_SECONDS = 60.0


def event_examples() -> list[Event]:
    return [
        Accepted(id="a", prompt_tokens=3),
        Delta(id="a", index=1, text="Füße 👟", tokens=2, accepted_spans=((0, 2),), method="ngram"),
        Failed(id="a", error="QueueFull", message="full", code="queue_full", retry_after_seconds=3),
    ]


@given(some.lists(some.integers(min_value=1, max_value=40), max_size=30))
def test_frames_survive_any_split(cuts: list[int]) -> None:
    stream = b"".join(pack(event) for event in event_examples())
    decoder = FrameDecoder()
    events: list[Event] = []
    position = 0
    for size in [*cuts, len(stream)]:
        events += [unpack_event(payload) for payload in decoder.feed(stream[position : position + size])]
        position += size
    assert events == event_examples()
    assert list(decoder.feed(pack(event_examples()[0]))) == [pack(event_examples()[0])[4:]], "nothing was left over"


@settings(max_examples=200)
@given(some.binary(max_size=200))
def test_random_bytes_end_in_frames_or_a_frame_error(data: bytes) -> None:
    decoder = FrameDecoder(limit_bytes=64)
    with contextlib.suppress(FrameError):
        for payload in decoder.feed(data):
            for unpack in (unpack_event, unpack_command):
                with contextlib.suppress(FrameError):
                    assert isinstance(unpack(payload), msgspec.Struct)


@given(some.binary(max_size=300))
def test_a_damaged_event_is_a_frame_error_or_an_event(noise: bytes) -> None:
    payload = bytearray(pack(event_examples()[1])[4:])
    for position, byte in enumerate(noise):
        payload[(position * 7 + byte) % len(payload)] ^= byte
    with contextlib.suppress(FrameError):
        assert isinstance(unpack_event(bytes(payload)), msgspec.Struct)


def test_an_oversized_length_is_refused_before_its_bytes_arrive() -> None:
    decoder = FrameDecoder(limit_bytes=10)
    with pytest.raises(FrameError, match="over the limit"):
        list(decoder.feed(struct.pack(">I", 11)))


@pytest.mark.parametrize("text", ["\ud800", "x"])
def test_what_cannot_be_encoded_is_the_sender_s_mistake(text: str) -> None:
    arguments = {"k": text} if text == "\ud800" else {"k": 10**40}
    with pytest.raises(FrameError, match="cannot be encoded"):
        pack(Generate(id="a", model=MODEL, template_arguments=arguments))


def test_a_command_that_is_no_frame_is_an_invalid_request() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        server = await ServerChannel.open(ours, [].append, [].append)
        with pytest.raises(InvalidRequest):
            server.send(Generate(id="a", model=MODEL, text="\udfff"))
        server.close()
        theirs.close()

    asyncio.run(scenario())


class Peer:
    """The worker's end of a channel, with a real reader thread; records the commands received."""

    def __init__(self, end: socket.socket) -> None:
        self.channel = WorkerChannel(end)
        self.commands: list[Command] = []
        self.closed = threading.Event()
        self.heard = threading.Event()
        self.thread = self.channel.start(self.obey, self.closed.set)

    def obey(self, command: Command, nbytes: int) -> None:
        assert nbytes
        self.commands.append(command)
        self.heard.set()


def test_both_ends_speak_and_the_worker_learns_that_the_server_is_gone() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        events: list[Event] = []
        arrived = asyncio.Event()

        def on_event(event: Event) -> None:
            events.append(event)
            if len(events) == 300:
                arrived.set()

        server = await ServerChannel.open(ours, on_event, [].append)
        peer = Peer(theirs)
        commands: list[Command] = [Cancel(id="1"), Generate(id="2", model=MODEL, tokens=[1, 2]), Shutdown()]
        for command in commands:
            server.send(command)

        def speak() -> None:
            for _ in range(100):
                for event in event_examples():
                    peer.channel.send(event)

        threading.Thread(target=speak).start()
        await asyncio.wait_for(arrived.wait(), DEADLINE_SECONDS)
        assert events == event_examples() * 100
        server.close()
        assert await asyncio.to_thread(peer.closed.wait, DEADLINE_SECONDS)
        assert peer.commands == commands
        peer.channel.send(event_examples()[0])  # nobody listens: dropped, no error
        peer.channel._end.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("data", "reason"),
    [(struct.pack(">I", 1 << 31), "over the limit"), (struct.pack(">I", 2) + b"\xc1\xc1", "not an event"), (b"", "")],
)
def test_the_server_closes_on_a_bad_frame_after_telling_what_came_before(data: bytes, reason: str) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        events: list[Event] = []
        reasons: asyncio.Queue[str] = asyncio.Queue()
        await ServerChannel.open(ours, events.append, reasons.put_nowait)
        theirs.sendall(pack(event_examples()[0]) + data)
        theirs.shutdown(socket.SHUT_WR)
        message = await asyncio.wait_for(reasons.get(), DEADLINE_SECONDS)
        assert reason in message
        assert events == event_examples()[:1]
        theirs.close()

    asyncio.run(scenario())


def test_the_worker_closes_on_an_oversized_frame() -> None:
    ours, theirs = socket.socketpair()
    peer = Peer(theirs)
    ours.sendall(struct.pack(">I", channel_module.MAX_FRAME_BYTES + 1))
    assert peer.closed.wait(DEADLINE_SECONDS)
    ours.close()
    peer.channel._end.close()


def test_a_malformed_command_fails_its_sender_and_nobody_else() -> None:
    ours, theirs = socket.socketpair()
    peer = Peer(theirs)
    payload = msgspec.msgpack.encode({"type": "Generate", "id": "bad", "model": 5})
    ours.sendall(struct.pack(">I", len(payload)) + payload + pack(Cancel(id="next")))
    assert peer.heard.wait(DEADLINE_SECONDS)
    assert peer.commands == [Cancel(id="next")]
    ours.settimeout(DEADLINE_SECONDS)
    (answer,) = FrameDecoder().feed(ours.recv(4096))
    failed = unpack_event(answer)
    assert isinstance(failed, Failed)
    assert (failed.id, failed.error) == ("bad", "InvalidRequest")
    ours.close()
    peer.channel._end.close()
