"""Frames of a stream that a reader may leave and read again."""

from collections.abc import AsyncGenerator

import pytest

from app.serving.sse import ReplayableFrames

pytestmark = pytest.mark.anyio


async def read(frames: ReplayableFrames, got: list[bytes]) -> None:
    async for chunk in frames.response(1.0).body_iterator:
        assert isinstance(chunk, bytes)
        got.append(chunk)


async def test_a_fault_ends_every_reader_after_the_frames_before_it() -> None:
    async def faulty() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise ZeroDivisionError

    closed: list[bool] = []
    frames = ReplayableFrames(faulty(), on_close=lambda: closed.append(True), on_expired=lambda: None, grace_seconds=60)
    for _ in range(2):
        got: list[bytes] = []
        with pytest.raises(ZeroDivisionError):
            await read(frames, got)
        assert got == [b"one"]
    assert closed == [True]
