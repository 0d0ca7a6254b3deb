"""A computer that is short of memory, as the test sets its pressure: real models, pool, scheduler and loop."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest

from app.core.messages import Event, Heartbeat, KeepModels, Pressure
from app.core.request import Request, SamplingParameters
from app.core.unit import ModelSpecification, Stay
from app.engine import memory
from app.engine.engine import Engine
from app.engine.loading.loader import load_unit
from app.engine.loading.opening import open_engine
from app.engine.loading.pool import EnginePool
from app.engine.prefix.disk import Disk
from app.machine.channel import CrashNote
from app.worker.loop import Loop, is_relief_due
from app.worker.thread_commands import Submission
from tests.tiny import write_tiny_model
from tests.worker.test_ceiling import RecordingTextThread, open_scheduler

PATIENCE_SECONDS = 60.0


@pytest.mark.parametrize(
    ("pressure", "relieved", "seconds", "due"),
    [
        ("normal", "normal", 1e9, False),
        ("normal", "critical", 1e9, False),
        ("warning", "normal", 0.0, True),
        ("critical", "normal", 0.0, True),
        ("critical", "warning", 0.0, True),
        ("warning", "warning", 59.9, False),
        ("warning", "warning", 60.0, True),
        ("warning", "critical", 59.9, False),
        ("critical", "critical", 9.9, False),
        ("critical", "critical", 10.0, True),
    ],
)
def test_a_lack_of_memory_is_answered_at_once_when_it_worsens_and_now_and_then_while_it_lasts(
    pressure: Pressure, relieved: Pressure, seconds: float, due: bool
) -> None:
    assert is_relief_due(pressure, relieved, seconds) == due


@dataclass
class Computer:
    """A worker without its threads. A `turn` takes a second by default; the system reports the memory `pressure`."""

    folder: Path
    pressure: Pressure = "normal"
    records: RecordingTextThread = field(default_factory=RecordingTextThread)
    events: list[Event] = field(default_factory=list)
    now: float = 0.0
    heard: list[float] = field(default_factory=list)
    most_running: int = 0

    def __post_init__(self) -> None:
        self.disk = Disk(self.folder / "prefixes", 1 << 26)
        self.pool = EnginePool(
            ceiling_bytes=1 << 30,
            load=load_unit,
            open_engine=partial(open_engine, disk=self.disk),
            estimate=memory.footprint,
        )
        self.loop = Loop(
            pool=self.pool,
            open_scheduler=open_scheduler,
            text_thread=self.records,  # type: ignore[arg-type]  # it only records
            send=self.events.append,
            save_costs=lambda _spec, _costs: None,
            crash_note=CrashNote(),
            clock=lambda: self.now,
            read_pressure=self.hear,
        )
        write_tiny_model(self.folder / "model", "qwen3", context_tokens=700)

    def hear(self) -> Pressure:
        self.heard.append(self.now)
        return self.pressure

    def specification(self, name: str) -> ModelSpecification:
        return ModelSpecification(id=name, path=str(self.folder / "model"), max_rows=4, prefix_cache_bytes=1 << 20)

    def ask(self, request: Request, model: str = "m") -> None:
        self.loop.post(Submission(request.id, self.specification(model), (request,)))

    def turn(self, seconds: float = 1.0) -> None:
        self.loop.turn(wait=False)
        self.now += seconds
        self.most_running = max([self.most_running, *(served.running for served in self.loop._served.values())])

    def answer(self, *requests: Request, model: str = "m") -> list[list[int]]:
        """Send all requests, run until each has ended, and return their tokens."""
        for request in requests:
            self.ask(request, model)
        while not self.records.ends.keys() >= {request.id for request in requests}:
            self.turn()
            assert self.records.refused_for == {}
        return [self.records.tokens[request.id] for request in requests]

    @property
    def prefix_bytes(self) -> int:
        return sum(model.prefix_cache_bytes for model in self.pool.snapshot())

    @property
    def found_tokens(self) -> dict[str, int]:
        (model,) = self.pool.snapshot()
        return dict(model.prefixes.restored_tokens)


@pytest.fixture(name="computer")
def a_computer(tmp_path: Path) -> Iterator[Computer]:
    yield (computer := Computer(tmp_path))
    for model in computer.pool.snapshot():
        computer.pool.unload(model.id)
    mx.clear_cache()


def request(name: str, seed: int = 0, tokens: int = 600) -> Request:
    chance = random.Random(seed)
    prompt = tuple(chance.randrange(32, 127) for _ in range(tokens))
    return Request(id=name, prompt_tokens=prompt, max_tokens=12, sampling=SamplingParameters(seed=1))


def test_pressure_is_heard_once_a_second_however_many_steps_there_are(computer: Computer) -> None:
    computer.ask(request("r"))
    while "r" not in computer.records.ends:
        computer.turn(0.1)
    gaps = [later - earlier for earlier, later in zip(computer.heard, computer.heard[1:], strict=False)]
    assert gaps
    assert min(gaps) >= 0.99


def test_a_warning_halves_what_is_kept_of_prompts_and_the_disk_still_has_them(computer: Computer) -> None:
    computer.answer(request("first"), request("second", seed=1))
    computer.disk.flush(PATIENCE_SECONDS)
    full = computer.prefix_bytes
    computer.pressure = "warning"
    computer.turn()
    assert 0 < computer.prefix_bytes <= full / 2
    halved = computer.prefix_bytes
    computer.turn()
    assert computer.prefix_bytes == halved, "not every second"
    for _ in range(14):
        computer.turn(5.0)
    assert computer.prefix_bytes <= halved / 2
    for _ in range(60):
        computer.turn(60.0)
    assert computer.prefix_bytes > 0, "an hour of warnings leaves what was used last"
    assert [model.id for model in computer.pool.snapshot()] == ["m"], "the model stays"
    computer.pressure = "normal"
    assert computer.answer(request("first again")) == [computer.records.tokens["first"]]
    assert computer.found_tokens["disk"] > 0


def test_in_need_idle_models_go_pinned_ones_stay_and_requests_run_one_by_one(computer: Computer) -> None:
    crowd = [request(f"r{number}", seed=number, tokens=80) for number in range(4)]
    usual = computer.answer(*crowd)
    assert computer.most_running > 1
    computer.answer(request("other", tokens=80), model="idle")
    computer.loop.post(KeepModels(models={"pinned": Stay(pinned=True)}))
    computer.answer(request("another", tokens=80), model="pinned")
    computer.pressure, computer.most_running = "critical", 0
    for _ in range(3):
        computer.turn()
    assert [model.id for model in computer.pool.snapshot()] == ["pinned"]
    assert computer.prefix_bytes == 0
    again = [msgspec.structs.replace(member, id=f"again {member.id}") for member in crowd]
    assert computer.answer(*again) == usual, "and nothing fails"
    assert computer.most_running == 1
    computer.pressure = "normal"
    computer.answer(*(msgspec.structs.replace(member, id=f"last {member.id}") for member in crowd))
    assert computer.most_running > 1


def test_the_server_is_told_and_the_log_says_so(computer: Computer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    heard: tuple[Pressure, ...] = ("normal", "warning", "critical", "normal")
    for computer.pressure in heard:
        computer.turn()
        computer.turn()
    shown = [event.snapshot for event in computer.events if isinstance(event, Heartbeat) and event.snapshot]
    assert tuple(snapshot.memory_pressure for snapshot in shown) == heard
    assert caplog.text.count("the system is short of memory") == 2
    assert caplog.text.count("the system has memory again") == 1


def test_a_request_that_cannot_be_admitted_leaves_neither_a_row_nor_a_promise_behind(computer: Computer) -> None:
    """Otherwise, at critical pressure, all other requests would wait for this one for ever."""
    computer.answer(request("r", tokens=80))
    engine = computer.pool.engine("m")
    assert isinstance(engine, Engine)
    claim = engine.runner.claim

    def refuse(*_asked: object) -> None:
        raise RuntimeError("a row that cannot be had")

    engine.runner.claim = refuse  # type: ignore[method-assign]
    computer.answer(request("refused", tokens=80))
    engine.runner.claim = claim  # type: ignore[method-assign]
    assert "cannot be had" in computer.records.ends["refused"].error
    assert engine.runner.rows == {}
    computer.pool.pressure = "critical"
    assert not computer.pool.must_wait


def test_a_prompt_is_not_read_from_disk_before_there_is_memory_for_its_row(
    computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    computer.answer(request("first"))
    computer.disk.flush(PATIENCE_SECONDS)
    engine = computer.pool.engine("m")
    assert engine is not None
    engine.drop_prefix_cache()
    reads: list[object] = []
    read_ahead = computer.disk.read_ahead
    monkeypatch.setattr(computer.disk, "read_ahead", lambda block: reads.append(block) or read_ahead(block))
    with monkeypatch.context() as patch:
        patch.setattr(computer.pool, "reserve", lambda *_: False)
        computer.ask(request("again"))
        for _ in range(3):
            computer.turn()
        assert reads == []
    while "again" not in computer.records.ends:
        computer.turn()
    assert reads
    assert computer.records.tokens["again"] == computer.records.tokens["first"]
