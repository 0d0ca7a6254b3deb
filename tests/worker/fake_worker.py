"""A worker without a model: a real process that speaks over the channel and does what the text of each request says.

Run as `python -m tests.worker.fake_worker [--flag] --channel-fd N --note-fd M`. Texts: "words N", "forever", "silent",
"kill", "abort", "kill idle" (no model in the crash note), "stop" (SIGSTOP), "exit N", "garbage", "fail NAME",
"environment", "hold" (finishes when the worker drains). A load of the model "slow" never ends; one of "once" ends only
if its path does not exist yet, and creates it. With `--lingers`, the process does not exit after its drain.
"""

import argparse
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from app.core.messages import (
    Accepted,
    Cancel,
    Command,
    Delta,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    KeepModels,
    LoadModel,
    LoadProgress,
    ModelLoaded,
    ModelUnloaded,
    Ready,
    Shutdown,
    Snapshot,
    UnloadModel,
)
from app.core.statistics import Statistics
from app.core.unit import UNSPECIFIED_STAY, LoadedModel, ModelSpecification
from app.machine.channel import CrashNote, WorkerChannel

BEAT_SECONDS = 0.05


class FakeWorker:
    """Obeys the texts of requests; cancels and drains like the real worker."""

    def __init__(self, end: socket.socket, options: argparse.Namespace) -> None:
        self.end = end
        self.options = options
        self.crash_note = CrashNote(options.note_fd)
        self.channel = WorkerChannel(end)
        self.open: dict[str, Generate] = {}
        self.loads: set[str] = set()
        self.models = {
            "fake": LoadedModel(unit=ModelSpecification(id="fake", path=""), state="ready", stay=UNSPECIFIED_STAY)
        }
        self.kept = KeepModels()
        self.over = threading.Event()

    def run(self) -> int:
        self.channel.start(self.obey, self.over.set)
        if not self.options.never_ready:
            self.channel.send(Ready(process_id=os.getpid(), device="fake", versions={"fake": "1"}))
        while not self.over.wait(BEAT_SECONDS):
            for request_id, command in tuple(self.open.items()):
                if command.text == "forever":
                    self.channel.send(Delta(id=request_id, index=0, text="x", tokens=1))
            models = tuple(
                msgspec.structs.replace(model, stay=model.stay.over(self.kept.of(name)))
                for name, model in sorted(self.models.items())
            )
            snapshot = Snapshot(models=models, active_bytes=1)
            self.channel.send(Heartbeat(pending=bool(self.open), step_seconds=(0.001,), snapshot=snapshot))
        return 0

    def obey(self, command: Command, _nbytes: int) -> None:
        match command:
            case Generate():
                self.generate(command)
            case Cancel():
                if self.open.pop(command.id, None):
                    self.channel.send(Finished(id=command.id, index=0, finish_reason="cancelled", usage=Statistics()))
                if command.id in self.loads:
                    self.loads.discard(command.id)
                    self.channel.send(LoadProgress(model_id="slow", phase="failed", fraction=0.0))
            case LoadModel():
                self.load(command)
            case KeepModels():
                self.kept = command
            case UnloadModel():
                self.models.pop(command.model_id, None)
                self.channel.send(ModelUnloaded(id=command.id, model_id=command.model_id))
            case Shutdown():
                if not self.options.deaf:
                    self.drain()

    def load(self, command: LoadModel) -> None:
        is_endless = command.model.id == "slow" or (command.model.id == "once" and Path(command.model.path).exists())
        self.channel.send(LoadProgress(model_id=command.model.id, phase="weights", fraction=0.5))
        if is_endless:
            self.loads.add(command.id)
            return
        if command.model.id == "once":
            Path(command.model.path).touch()
        self.models[command.model.id] = LoadedModel(unit=command.model, state="ready", stay=command.stay)
        self.channel.send(LoadProgress(model_id=command.model.id, phase="ready", fraction=1.0))
        self.channel.send(ModelLoaded(id=command.id, model_id=command.model.id, seconds=0.1))

    def drain(self) -> None:
        for request_id, command in tuple(self.open.items()):
            if command.text == "hold":
                self.channel.send(Delta(id=request_id, index=0, text="done", tokens=1))
                self.finish(command)
        self.over.set()

    def finish(self, command: Generate) -> None:
        self.open.pop(command.id, None)
        for index in range(command.n):
            usage = Statistics(prompt_tokens=1, completion_tokens=1)
            self.channel.send(Finished(id=command.id, index=index, finish_reason="stop", usage=usage))

    def generate(self, command: Generate) -> None:
        verb, _, argument = (command.text or "").partition(" ")
        actions: dict[str, Callable[[], object]] = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "abort": os.abort,
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "exit": lambda: os._exit(int(argument)),
            "garbage": lambda: self.end.sendall(struct.pack(">I", 1 << 31)),
            "words": lambda: self.words(command, int(argument)),
            "environment": lambda: self.environment(command),
        }
        if verb == "fail":
            self.channel.send(Failed(id=command.id, error=argument, message="as asked", code="asked"))
            return
        self.open[command.id] = command
        self.channel.send(Accepted(id=command.id, prompt_tokens=1))
        with self.crash_note.on("" if argument == "idle" else command.model.id):
            actions.get(verb, lambda: None)()

    def words(self, command: Generate, count: int) -> None:
        for number in range(count):
            for index in range(command.n):
                self.channel.send(Delta(id=command.id, index=index, text=f"{number} ", tokens=1))
        self.finish(command)

    def environment(self, command: Generate) -> None:
        for name, value in os.environ.items():
            self.channel.send(Delta(id=command.id, index=0, text=f"{name}={value}", tokens=1))
        self.channel.send(Delta(id=command.id, index=0, text=f"session={os.getsid(0) == os.getpid()}", tokens=1))
        self.channel.send(Delta(id=command.id, index=0, text=f"cwd={Path.cwd()}", tokens=1))
        self.finish(command)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--note-fd", type=int, required=True)
    parser.add_argument("--memory-ceiling-bytes", type=int)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--lingers", action="store_true")
    parser.add_argument("--crash", action="store_true")
    options = parser.parse_args()
    if options.crash:
        return 7
    if options.deaf or options.lingers:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = FakeWorker(socket.socket(fileno=options.channel_fd), options).run()
    if options.lingers:
        threading.Event().wait()
    return code


if __name__ == "__main__":
    sys.exit(main())
