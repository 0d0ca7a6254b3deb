"""Models in memory, their units and stays: server and worker agree whenever at rest, whatever happened before.

A real client over a real text thread, loop and pool in one thread; engines and weights are fakes, the clock is virtual.
"""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import PacelineError
from app.core.messages import Command, Generate, KeepModels, Ready
from app.core.reason import Reason
from app.core.unit import DrafterSpecification, LoadedModel, ModelSpecification, Stay
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.pool import EnginePool
from app.machine.channel import CrashNote
from app.supervision.client import WorkerClient
from app.supervision.stream import RequestStream
from app.supervision.supervisor import WorkerPhase
from app.worker.loop import Loop
from app.worker.text_thread import TextThread
from app.worker.thread_commands import LoopCommand
from tests.engine import pool_world
from tests.engine.pool_world import SIZES, World
from tests.unmeasured import Unmeasured
from tests.worker.fakes import BreakableScheduler, FakeEngine, fake_read

MODELS = ("a", "b", "c", "d")
LIMITS = (None, None, -1.0, 0.0, 5.0, 40.0)


def open_engine(world: World, unit: LoadedUnit) -> pool_world.FakeEngine:
    """Return an engine that has bytes for the pool to count, and that answers requests."""
    world.open.append(unit.spec.id)
    engine, answers = pool_world.FakeEngine(world, unit.spec.id), FakeEngine()
    engine.limits = answers.limits
    for name in ("admit", "step", "release"):
        setattr(engine, name, getattr(answers, name))
    return engine


class Worker:
    """One worker: commands go into its text thread, its events go to `client`."""

    def __init__(self, world: World, client: "LinkedClient") -> None:
        self.pool = EnginePool(
            ceiling_bytes=pool_world.CEILING,
            load=world.load,
            open_engine=partial(open_engine, world),
            estimate=world.footprint,
            clock=world.clock,
            reclaim=world.reclaim,
            costs=Unmeasured(),
        )
        self.text_thread = TextThread(read=fake_read, send=client._on_event, post=self._post, clock=world.clock)
        self.loop = Loop(
            pool=self.pool,
            open_scheduler=lambda spec, engine, _costs: BreakableScheduler(
                engine.limits, queue_limit=spec.live.queue_limit, clock=world.clock
            ),
            text_thread=self.text_thread,
            send=client._on_event,
            save_costs=lambda _spec, _costs: None,
            crash_note=CrashNote(),
            clock=world.clock,
            read_pressure=lambda: "normal",
        )

    def _post(self, command: LoopCommand) -> None:
        self.loop.post(command)

    def send(self, command: Command) -> None:
        self.text_thread.receive(command)

    def turn(self) -> None:
        self.text_thread.turn(wait=False)
        self.loop.turn(wait=False)


class LinkedClient(WorkerClient):
    """The server's client, linked to a `Worker` in the same thread."""

    def link(self, worker: Worker | None) -> None:
        self._child = worker  # type: ignore[assignment]  # only `send` is used
        self._enter(WorkerPhase.PAUSING if worker is None else WorkerPhase.RUNNING)


@dataclass
class House:
    """A server and its worker, and the requests, loads and settings sent to them."""

    folder: Path
    chance: random.Random
    world: World = field(default_factory=lambda: World(dict(SIZES)))
    client: LinkedClient = field(default_factory=LinkedClient)
    worker: Worker = field(init=False)
    streams: list[RequestStream] = field(default_factory=list)
    loads: list[asyncio.Task[Any]] = field(default_factory=list)
    settings: KeepModels = field(default_factory=KeepModels)
    asked: int = 0

    def start(self) -> None:
        self.world, now = World(dict(SIZES)), self.world.now
        self.world.now = now
        self.worker = Worker(self.world, self.client)
        self.client.link(self.worker)
        self.client._on_event(Ready(process_id=1, device="fake"))

    def crash(self) -> None:
        self.client.link(None)
        self.client._on_exit(Reason("exit_killed"), pause_seconds=0.0)
        self.start()

    def unit(self, model_id: str) -> ModelSpecification:
        """Return the unit for a request: mostly the one in memory or loading, else a new one, maybe with a drafter."""
        path = self.folder / model_id
        path.mkdir(exist_ok=True)
        drafts = self.chance.choice(((), (DrafterSpecification("x", "/x"),)))
        held = self.client.unit(model_id) if self.chance.random() < 0.8 else None
        return held or ModelSpecification(id=model_id, path=str(path), drafters=drafts)

    def stay(self) -> Stay:
        return Stay(pinned=self.chance.choice((None, None, None, True, False)), idle_seconds=self.chance.choice(LIMITS))

    def ask(self, unit: ModelSpecification, stay: Stay) -> None:
        self.asked += 1
        length = self.chance.choice((1, 8, 30))
        command = Generate(id=f"r{self.asked}", model=unit, text="hello", max_tokens=length, stay=stay)
        self.streams.append(self.client.open([command]))

    def load(self, unit: ModelSpecification, stay: Stay) -> None:
        self.loads.append(asyncio.ensure_future(self.client.load(unit, stay)))

    def change_settings(self) -> None:
        models = {model_id: self.stay() for model_id in MODELS if self.chance.random() < 0.4}
        usual = Stay(pinned=False, idle_seconds=self.chance.choice((30.0, 3600.0)))
        self.settings = KeepModels(usual=usual, models=models)
        self.client.keep(self.settings)

    async def act(self) -> None:
        model_id = self.chance.choice(MODELS)
        match self.chance.randrange(12):
            case 0 | 1 | 2 | 3:
                self.ask(self.unit(model_id), self.stay())
            case 4:
                self.load(self.unit(model_id), self.stay())
            case 5:
                self.loads.append(asyncio.ensure_future(self.client.unload(model_id)))
            case 6:
                self.change_settings()
            case 7 if self.streams:
                self.chance.choice(self.streams).close()
            case 8 if self.loads:
                self.chance.choice(self.loads).cancel()
            case 9:
                self.world.now += self.chance.choice((1.0, 6.0, 50.0))
            case 10:
                self.crash()
        for _ in range(self.chance.choice((0, 0, 1, 5, 20))):
            await self.turn()

    async def turn(self) -> None:
        await asyncio.sleep(0)
        self.worker.turn()
        self.world.now += 0.01

    async def rest(self) -> None:
        """Run turns until nothing is pending, and one more a second later, for the next heartbeat."""
        quiet = 0
        while quiet < 3:
            await self.turn()
            is_busy = (
                bool(self.client.in_flight) or self.worker.loop._busy() or any(not load.done() for load in self.loads)
            )
            quiet = 0 if is_busy else quiet + 1
        self.world.now += 1.0
        await self.turn()
        for load in self.loads:
            with contextlib.suppress(PacelineError, asyncio.CancelledError):
                load.result()
        self.loads.clear()
        for stream in self.streams:
            stream.close()
        self.streams.clear()

    def check(self) -> dict[str, LoadedModel]:
        """Check that server, worker and settings agree about the models in memory; return these."""
        worker, held = self.worker, self.client.book.loaded()
        assert tuple(held.values()) == worker.pool.snapshot()
        assert sorted(held) == sorted(self.world.open)
        for model_id, model in held.items():
            assert (model.state, model.leases) == ("ready", 0)
            assert self.client.unit(model_id) == model.unit
            assert model.stay == worker.pool._entries[model_id].requested_stay.over(self.settings.of(model_id))
            assert model.seconds_left(self.world.now) != 0, "its time is over"
        for model_id in set(MODELS) - held.keys():
            assert self.client.unit(model_id) is None
        return held


async def live(folder: Path, seed: int) -> None:
    house = House(folder, random.Random(seed))
    house.start()
    for _ in range(3):
        for _ in range(house.chance.randrange(1, 12)):
            await house.act()
        await house.rest()
        held = house.check()
        if not held:
            continue
        # The stay requested last wins over earlier ones, and survives the worker.
        model_id = house.chance.choice(sorted(held))
        word = Stay(idle_seconds=house.chance.choice((5.0, 40.0, -1.0)))
        house.chance.choice((house.ask, house.load))(held[model_id].unit, word)
        await house.rest()
        said = house.check()[model_id]
        assert said.stay.idle_seconds == word.idle_seconds
        units = {name: model.unit for name, model in house.client.book.loaded().items()}
        house.crash()
        assert units == {name: house.client.unit(name) for name in units}, "a request keeps to what was loaded"
        await house.rest()
        again = house.check()
        assert again[model_id].stay == said.stay
        assert again[model_id].unit == said.unit
        # The time left gets shorter, and the model leaves when it is over.
        before = again[model_id].seconds_left(house.world.now)
        house.world.now += 6.0
        await house.rest()
        after = house.check().get(model_id)
        if before is None:
            assert after is not None
        elif before > 10.0:
            assert after is not None
            assert after.seconds_left(house.world.now) == pytest.approx(before - 7.0, abs=0.2)
        else:
            assert after is None


@pytest.mark.parametrize(
    "first_seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(100, 10_000, 900))]
)
def test_server_and_worker_agree_at_each_rest(tmp_path: Path, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + (900 if first_seed else 100)):
        asyncio.run(live(tmp_path, seed))
