"""A device that runs out of memory at chosen calls: real tiny models under the real scheduler and loop."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app.core.request import Request, SamplingParameters, SpeculationRequest
from app.engine.engine import Engine
from app.engine.runner import Runner
from app.worker.device_errors import DeviceLost
from tests.engine.driving import Driver, build
from tests.tiny import related_draft, tiny_model
from tests.worker.pair import Pair

REFUSAL = "[metal::malloc] Unable to allocate 1073741824 bytes."
FAMILIES = ("qwen3", "gemma3", "qwen3_next")
CALLS = ((mx, "eval"), (mx, "async_eval"), (Runner, "forward"), (Runner, "commit"))


class Device:
    """Counts the calls to the device; `refuses(number)` says whether a call fails, by its number from 1 on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = self.refused = 0
        self.text = REFUSAL
        self.refuses: Callable[[int], bool] = lambda _call: False
        for owner, name in CALLS:
            patch.setattr(owner, name, self._guarded(getattr(owner, name)))

    def _guarded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            refused = self.refuses(self.calls)
            if refused and self.calls % 2:  # before the call
                self._refuse()
            answer = real(*arguments, **options)
            if refused:  # after the call, whose effects must not count
                self._refuse()
            return answer

        return guarded

    def _refuse(self) -> None:
        self.refused += 1
        raise RuntimeError(self.text)


@pytest.fixture(name="device")
def a_device() -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        yield Device(patch)


def engine_of(family: str, **options: Any) -> Engine:
    target = tiny_model(family, vocabulary_size=256)
    return build(target, draft=related_draft(family, vocabulary_size=256), vocabulary=256, chunk_tokens=32, **options)


def ask_all(pair: Pair) -> None:
    """Send four requests: greedy and sampled, with and without drafts, one with a long prompt."""
    for number, size in enumerate((3, 90, 17, 40)):
        text = "".join(chr(97 + (place * (number + 3)) % 26) for place in range(size))
        method = ("draft_model", "off", "ngram", "auto")[number]
        pair.say(
            pair.ask(
                f"r{number}",
                text,
                max_tokens=24,
                sampling=SamplingParameters(temperature=0.7 * (number % 2), seed=number),
                speculation=SpeculationRequest(method=method),
            )
        )


def texts(pair: Pair) -> list[str]:
    for _ in range(2000):
        if all(pair.finished(f"r{number}") or pair.failed(f"r{number}") for number in range(4)):
            break
        pair.turn()
    return [pair.text(f"r{number}") for number in range(4)]


@pytest.mark.parametrize("family", FAMILIES)
def test_whenever_memory_runs_out_every_text_stays_the_same_and_nobody_fails(
    tmp_path: Path, family: str, device: Device
) -> None:
    calm = Pair(tmp_path, make_engine=lambda: engine_of(family))
    ask_all(calm)
    wanted = texts(calm)
    assert all(calm.finished(f"r{number}") for number in range(4))
    needed = device.calls
    for seed in range(3):
        pair = Pair(tmp_path, make_engine=lambda: engine_of(family))
        pair.settle(rounds=1)
        ask_all(pair)
        chance = random.Random(seed)
        pair.settle(rounds=8)
        begin = device.calls
        # apart, so that memory freed after one helps the next: three in a row fail a request that runs alone
        refused = {begin + part * needed // 6 + chance.randrange(1, needed // 12) for part in range(3)}
        device.refuses = refused.__contains__
        before = device.refused
        assert texts(pair) == wanted
        device.refuses = lambda _call: False
        assert device.refused > before, "else nothing was tested"
        assert [pair.failed(f"r{number}") for number in range(4)] == [[]] * 4
        assert pair.pool.sheds == device.refused - before
        assert pair.leases == 0


FAILED = "[METAL] Command buffer execution failed: "
TIMEOUTS = (
    "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
    "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
    "Innocent Victim of GPU Error/Recovery (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
)
IGNORED = (
    "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)


@pytest.mark.parametrize("text", TIMEOUTS)
def test_steps_that_take_the_gpu_for_too_long_go_on_in_smaller_ones(tmp_path: Path, device: Device, text: str) -> None:
    calm = Pair(tmp_path, make_engine=lambda: engine_of("qwen3"))
    ask_all(calm)
    wanted, needed = texts(calm), device.calls
    pair = Pair(tmp_path, make_engine=lambda: engine_of("qwen3"))
    pair.settle(rounds=1)
    ask_all(pair)
    pair.settle(rounds=8)
    device.text = FAILED + text
    begin = device.calls
    refused = {begin + part * needed // 6 + 1 for part in range(3)}
    device.refuses = refused.__contains__
    assert texts(pair) == wanted
    assert device.refused == len(refused)
    assert [pair.failed(f"r{number}") for number in range(4)] == [[]] * 4
    assert pair.pool.sheds == 0, "memory was not short"


@pytest.mark.parametrize("text", [IGNORED, TIMEOUTS[0]])
def test_a_gpu_that_takes_no_more_work_ends_the_process_without_blame(
    tmp_path: Path, device: Device, text: str
) -> None:
    pair = Pair(tmp_path, make_engine=lambda: engine_of("qwen3"))
    ask_all(pair)
    pair.settle(rounds=8)
    device.text = FAILED + text
    device.refuses = lambda _call: True
    with pytest.raises(DeviceLost):
        texts(pair)
    assert pair.loop._crash_note.model_id == ""
    assert all(len(pair.failed(f"r{number}")) <= 1 for number in range(4))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slow_engine_tells_its_parts_and_says_the_same(tmp_path: Path, family: str) -> None:
    calm = Pair(tmp_path, make_engine=lambda: engine_of(family))
    ask_all(calm)
    wanted = texts(calm)
    parts: list[str] = []

    def slow_engine() -> Engine:
        engine = engine_of(family, slow_seconds=0.0)
        engine.runner.on_progress = lambda: parts.append("")
        return engine

    slow = Pair(tmp_path, make_engine=slow_engine)
    ask_all(slow)
    assert texts(slow) == wanted
    assert len(parts) > 2 * 24, "some for every step"


@pytest.mark.parametrize("place", [0, 1, 3])
def test_only_the_request_that_does_not_even_fit_alone_fails(tmp_path: Path, place: int, device: Device) -> None:
    calm = Pair(tmp_path, make_engine=lambda: engine_of("qwen3"))
    ask_all(calm)
    wanted = texts(calm)
    pair = Pair(tmp_path, make_engine=lambda: engine_of("qwen3"))
    real = Runner.forward

    def forward(runner: Runner, sequence_ids: list[str], *arguments: Any, **options: Any) -> Any:
        if any(name.startswith(f"r{place}") for name in sequence_ids) and pair.loop:
            device._refuse()
        return real(runner, sequence_ids, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "forward", forward)
        ask_all(pair)
        got = texts(pair)
    others = [number for number in range(4) if number != place]
    assert [got[number] for number in others] == [wanted[number] for number in others]
    assert [number for number in range(4) if pair.failed(f"r{number}")] == [place]
    (failed,) = pair.failed(f"r{place}")
    assert REFUSAL in failed.message
    assert device.refused <= 6, "two halvings of the rows, and one more try alone"
    assert pair.leases == 0
    pair.say(pair.ask("after", "abc", max_tokens=8))
    pair.settle(rounds=100)
    assert pair.finished("after")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_there_is_no_memory_to_keep_frees_its_row_and_says_so(
    family: str, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_model(family, vocabulary_size=256)
    engine = build(target, draft=related_draft(family, vocabulary_size=256), vocabulary=256, prefix_bytes=1 << 24)
    driver = Driver(engine, random.Random(1), ("draft_model",))
    driver.admit(Request(id="r", prompt_tokens=tuple(range(40)), max_tokens=50))
    while driver.live["r"].output_tokens < 5:
        driver.step()
    device.refuses = lambda _call: True
    driver.leave("r")
    assert device.refused
    assert (dict(engine.runner.rows), engine.prefixes.memory.nbytes) == ({}, 0)
    assert "not cached" in caplog.text
