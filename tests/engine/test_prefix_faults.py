"""Requests survive a failing prefix cache: the tokens are the same, no row is left, and one line is logged."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from app.core.request import Request, SamplingParameters, SpeculationRequest
from app.engine.engine import Engine
from app.engine.prefix import cache as prefix_cache
from app.engine.prefix import disk as prefix_disk
from app.engine.prefix.disk import Disk
from app.scheduler.scheduler import Scheduler
from tests.engine.driving import build
from tests.engine.pool_world import World
from tests.engine.schedules import models

PROMPT = tuple(5 * place % 97 for place in range(300))
SILENCE_SECONDS = 0.5
"""Longest promised silence of a stream, in seconds, whatever else the worker does."""


def answer(engine: Engine, name: str) -> tuple[int, ...]:
    """Return the tokens of one answer to `PROMPT`, generated with a draft model."""
    scheduler = Scheduler(engine.limits, policy="auto")
    sampling = SamplingParameters(temperature=0.8, seed=3)
    wish = SpeculationRequest(method="draft_model", num_draft_tokens=3)
    scheduler.submit(Request(id=name, prompt_tokens=PROMPT, max_tokens=12, sampling=sampling, speculation=wish))
    request = scheduler.next_admission()
    assert request is not None
    while not engine.fetch(request):
        pass
    scheduler.admitted(name, engine.admit(request))
    output: list[int] = []
    while (plan := scheduler.plan()) is not None:
        for event in scheduler.commit(engine.step(plan)):
            output += event.tokens
    for released, tokens in scheduler.drain_released():
        engine.release(released, tokens)
    return tuple(output)


def stored(folder: Path) -> tuple[Engine, tuple[int, ...]]:
    """Return an engine whose prefix cache has the prompt on disk only, and its answer."""
    target, draft = models("qwen3", quantised=False)
    disk = Disk(folder / "prefixes", 1 << 30)
    engine = build(target, draft=draft, prefix_bytes=1 << 30, disk=disk)
    wanted = answer(engine, "first")
    disk.flush(60)
    engine.prefixes.clear()
    return engine, wanted


def test_what_is_on_disk_is_read_by_other_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, wanted = stored(tmp_path)
    real, may_read, readers = prefix_disk._whole, threading.Event(), set[threading.Thread]()

    def read(path: Path) -> bytes:
        readers.add(threading.current_thread())
        may_read.wait(60)
        return real(path)

    monkeypatch.setattr(prefix_disk, "_whole", read)
    assert not engine.fetch(Request(id="cancelled", prompt_tokens=PROMPT, max_tokens=12))
    engine.release("cancelled", ())
    assert not engine.prefixes._ahead.contents, "nothing is held for who has left"
    assert not engine.fetch(Request(id="again", prompt_tokens=PROMPT, max_tokens=12))
    may_read.set()
    assert answer(engine, "again") == wanted
    assert sum(engine.prefixes.restored_tokens.values()) > 0
    assert readers
    assert threading.current_thread() not in readers


def test_what_nobody_waits_for_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, _ = stored(tmp_path)
    real, may_read, files = prefix_disk._whole, threading.Event(), list[Path]()

    def read(path: Path) -> bytes:
        files.append(path)
        may_read.wait(60)
        return real(path)

    monkeypatch.setattr(prefix_disk, "_whole", read)
    assert not engine.fetch(Request(id="cancelled", prompt_tokens=PROMPT, max_tokens=12))
    engine.release("cancelled", ())
    may_read.set()
    engine.prefixes.disk._readers.shutdown()
    assert len(files) == prefix_disk.READERS


def test_a_disk_that_is_too_slow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, wanted = stored(tmp_path)
    real, may_read, files = prefix_disk._whole, threading.Event(), list[Path]()

    def read(path: Path) -> bytes:
        files.append(path)
        if path != files[0]:
            may_read.wait(60)
        return real(path)

    monkeypatch.setattr(prefix_disk, "_whole", read)
    monkeypatch.setattr(prefix_disk, "STALL_SECONDS", 0.3)
    assert answer(engine, "again") == wanted
    assert engine.prefixes.restored_tokens == {"memory": 256, "disk": 0}, "what was read is used"
    may_read.set()
    engine.prefixes.clear()
    assert answer(engine, "later") == wanted
    assert engine.prefixes.restored_tokens["disk"] > 256, "nothing was forgotten"


def fails(*_arguments: Any, **_options: Any) -> Any:
    raise KeyError("a fault of ours")


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mamba2"])
@pytest.mark.parametrize(
    ("owner", "broken"),
    [
        (prefix_cache.PrefixCache, "restore"),
        (prefix_cache.PrefixCache, "fetch"),
        (prefix_cache.PrefixCache, "keeps"),
        (prefix_cache.PrefixCache, "store"),
        (Disk, "read"),
        (Disk, "read_ahead"),
        (Disk, "write"),
        (Disk, "used"),
        (prefix_cache, "_restore_row"),
    ],
)
def test_an_answer_is_the_same_whatever_of_the_cache_fails(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    family: str,
    owner: Any,
    broken: str,
) -> None:
    target, draft = models(family, quantised=False)
    disk = Disk(tmp_path / "prefixes", 1 << 30)
    engine = build(target, draft=draft, prefix_bytes=1 << 30, disk=disk)
    wanted = answer(engine, "first")
    disk.flush(60)
    if broken.startswith("read"):
        engine.prefixes.clear()  # leaves the prompt on disk only
    real = getattr(owner, broken)
    monkeypatch.setattr(prefix_cache.PrefixCache, "clear", fails)
    monkeypatch.setattr(owner, broken, lambda *given: (real(*given), fails()) if broken == "_restore_row" else fails())
    with caplog.at_level(logging.ERROR):
        assert [answer(engine, f"again {number}") for number in range(3)] == [wanted] * 3
    assert not engine.runner.caches.table.slots
    assert [record.getMessage() for record in caplog.records] == [
        "the prefix cache failed; requests continue without it"
    ]
    monkeypatch.undo()
    assert answer(engine, "healed") == wanted


def test_a_prompt_that_there_is_no_memory_to_restore_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models("qwen3", quantised=False)
    engine = build(target, draft=draft, prefix_bytes=1 << 30)
    wanted = answer(engine, "first")
    assert engine.prefix_cache_bytes

    def refuse(*_arguments: Any) -> None:
        raise RuntimeError("[metal::malloc] Unable to allocate 1073741824 bytes.")

    monkeypatch.setattr(prefix_cache, "_restore_row", refuse)
    request = Request(id="again", prompt_tokens=PROMPT, max_tokens=12)
    assert engine.admit(request) == 0
    engine.release("again", ())
    assert engine.prefix_cache_bytes == 0, "its memory helps the row"
    assert answer(engine, "later") == wanted


@pytest.mark.parametrize("name", ["drop_prefix_cache", "bound_prefix_cache"])
def test_a_cache_that_cannot_be_made_smaller_ends_no_request(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    engine = build(models("qwen3", quantised=False)[0], prefix_bytes=1 << 30)
    for broken in ("trim", "clear", "bound"):
        monkeypatch.setattr(prefix_cache.PrefixCache, broken, fails)
    getattr(engine, name)(*([0] if name == "bound_prefix_cache" else []))


def test_what_is_cleared_without_a_model_in_memory_is_forgotten_on_disk_and_a_failure_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, draft = models("qwen3", quantised=False)
    disk = Disk(tmp_path / "prefixes", 1 << 30)
    engine = build(target, draft=draft, prefix_bytes=1 << 30, disk=disk)
    answer(engine, "first")
    engine.close()
    disk.flush(60)
    pool = World({}).pool(disk=disk)
    assert disk.blocks.nbytes
    with monkeypatch.context() as broken:
        broken.setattr(disk, "clear", fails)
        pool.clear_prefixes()
    pool.clear_prefixes()
    disk.flush(60)
    assert disk.blocks.nbytes == len(list(tmp_path.rglob("*.safetensors"))) == 0


def test_a_model_that_leaves_memory_hardly_waits_for_a_slow_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, draft = models("qwen3", quantised=False)
    disk = Disk(tmp_path / "prefixes", 1 << 30)
    engine = build(target, draft=draft, prefix_bytes=1 << 30, disk=disk)
    may_write, real, waits = threading.Event(), prefix_disk._write, list[float]()

    def write(*arguments: Any) -> Any:
        may_write.wait()
        return real(*arguments)

    def flush(seconds: float) -> None:
        waits.append(seconds)
        Disk.flush(disk, 0)

    monkeypatch.setattr(prefix_disk, "_write", write)
    monkeypatch.setattr(disk, "flush", flush)
    answer(engine, "first")
    assert disk.pending
    engine.close()
    assert sum(waits) < SILENCE_SECONDS
    may_write.set()
    Disk.flush(disk, 60)
    assert not disk.pending
