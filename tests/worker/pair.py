"""The real text thread and loop around the fakes, turned by hand in one thread."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.core.messages import Command, Delta, Event, Failed, Finished, Generate, Heartbeat
from app.core.step import EnginePort, StepCost
from app.core.unit import ModelSpecification
from app.machine.channel import CrashNote
from app.worker.loop import Loop
from app.worker.text_thread import TextThread
from app.worker.thread_commands import LoopCommand
from tests.worker.fakes import BreakableScheduler, FakeEngine, FakePool, fake_read


class Pair:
    """`say` a command, `settle`, and look at `events`. Time moves only with `settle`, or when a test changes `now`."""

    def __init__(self, folder: Path, *, make_engine: Callable[[], FakeEngine] = FakeEngine, **options: Any) -> None:
        save_costs = options.pop("save_costs", lambda _spec, _costs: None)
        self.folder = folder
        self.now = 100.0
        self.events: list[Event] = []
        self.pool = FakePool(make_engine=make_engine)
        self.schedulers: list[BreakableScheduler] = []
        self.known_costs: Sequence[StepCost] = ()
        """Costs that the last scheduler was opened with."""
        read = options.pop("read", fake_read)
        self.text_thread = TextThread(read=read, send=self.events.append, post=self.post, clock=self.clock, **options)
        self.loop = Loop(
            pool=self.pool,
            open_scheduler=self.open_scheduler,
            text_thread=self.text_thread,
            send=self.events.append,
            save_costs=save_costs,
            crash_note=CrashNote(),
            clock=self.clock,
            read_pressure=lambda: "normal",
        )

    def post(self, command: LoopCommand) -> None:
        self.loop.post(command)

    def clock(self) -> float:
        return self.now

    def open_scheduler(
        self, specification: ModelSpecification, engine: EnginePort, costs: Sequence[StepCost]
    ) -> BreakableScheduler:
        self.schedulers.append(
            BreakableScheduler(
                engine.limits, queue_limit=specification.live.queue_limit, measured=costs, clock=self.clock
            )
        )
        self.known_costs = costs
        return self.schedulers[-1]

    def model(self, name: str = "m", **changes: Any) -> ModelSpecification:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return ModelSpecification(id=name, path=str(path), **changes)

    def ask(self, request_id: str = "r", text: str | None = "hello", model: str = "m", **changes: Any) -> Generate:
        options = {"max_tokens": 10, **changes}
        return Generate(id=request_id, model=self.model(model), text=text, **options)

    def say(self, *commands: Command) -> None:
        for command in commands:
            self.text_thread.receive(command)

    def turn(self) -> bool:
        """Run one round of each thread; return False once the text thread has finished."""
        going = self.text_thread.turn(wait=False)
        self.loop.turn(wait=False)
        return going

    def settle(self, rounds: int = 60) -> None:
        for _ in range(rounds):
            self.turn()
            self.now += 0.01

    # --- events -----------------------------------------------------------------------------------------------

    def of(self, request_id: str) -> list[Event]:
        return [event for event in self.events if getattr(event, "id", None) == request_id]

    def text(self, request_id: str = "r", index: int = 0) -> str:
        return "".join(event.text for event in self.of(request_id) if isinstance(event, Delta) and event.index == index)

    def finished(self, request_id: str = "r") -> list[Finished]:
        return [event for event in self.of(request_id) if isinstance(event, Finished)]

    def failed(self, request_id: str = "r") -> list[Failed]:
        return [event for event in self.of(request_id) if isinstance(event, Failed)]

    def heartbeats(self) -> list[Heartbeat]:
        return [event for event in self.events if isinstance(event, Heartbeat)]

    @property
    def engine(self) -> FakeEngine:
        return next(iter(self.pool.engines.values()))

    @property
    def leases(self) -> int:
        return sum(self.pool.leases.values())
