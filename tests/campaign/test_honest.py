"""Silences of the honest stream, as the campaign measures them."""

import asyncio
import time

import pytest

from campaign.honest import HonestStream


def test_chunks_that_are_read_late_are_no_silence() -> None:
    async def listen() -> float:
        stream, began = HonestStream(), time.monotonic() - 9.0
        stream.record(b"%f 0.0 chunk" % began)
        listening = asyncio.create_task(stream.silence(began))
        for late in range(1, 10):  # the campaign itself was busy, and the pipe is full
            await asyncio.sleep(0)
            stream.record(b"%f 0.0 chunk" % (began + late))
        stream.record(b"%f 0.0 chunk" % (began + 10.0))
        return (await listening)[0]

    assert asyncio.run(listen()) == pytest.approx(1.0, abs=1e-3)


def test_a_silence_lasts_until_the_next_chunk_or_as_long_as_is_listened() -> None:
    async def listen() -> float:
        stream, began = HonestStream(), time.monotonic() - 9.0
        stream.record(b"%f 0.0 chunk" % began)
        return (await stream.silence(began, listen_seconds=0.05))[0]

    assert asyncio.run(listen()) >= 9.04
