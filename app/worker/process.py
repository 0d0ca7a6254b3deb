"""The worker process: `python -m app.worker.process --channel-fd N --note-fd M`, started only by the supervisor.

This file only connects the parts. The main thread runs the loop and is the only thread that touches mlx; the text
thread turns tokens into text; the reader thread receives commands; text processes read the prompts. The worker exits
with its parent, and the text processes exit with the worker.
"""

# ruff: noqa: E402 - mlx and mlx_lm must be prepared before they are imported
import contextlib
import gc

from app.machine import descriptors, lifeline
from app.worker.text_launch import Launched, launch_text_process

SPARE: Launched | None = None
"""Text process for the first model, started in advance."""
if __name__ == "__main__":
    lifeline.end_with_parent()
    gc.disable()  # imports leave no garbage to collect
    with contextlib.suppress(OSError):  # the first prompt tries again
        SPARE = launch_text_process(close_fds=True)

from app.engine import platform

PREPARATION = platform.prepare()
platform.bare_mlx_lm(tokenizers=False)
with descriptors.preserved_limit():
    from app.engine.loading.pool import EnginePool, open_pool

import argparse
import faulthandler
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from app.core.messages import Ready, Shutdown
from app.core.step import EnginePort, StepCost
from app.core.unit import ModelSpecification
from app.engine import memory
from app.engine.loading.warm_up import WarmUps
from app.engine.prefix.disk import Disk
from app.machine.channel import EXIT_DEVICE_LOST, CrashNote, WorkerChannel
from app.models.safe_files import escaped
from app.scheduler.scheduler import Scheduler
from app.worker.device_errors import DeviceLost
from app.worker.loop import Loop
from app.worker.served_model import configure
from app.worker.text_thread import TextThread
from app.worker.texts import TextReaders

TERMINATE_DRAIN_SECONDS = 10.0
FLUSH_SECONDS = 4.0
"""Longest wait, in seconds, for pending writes of the prefix cache at exit; the supervisor allows 5."""
MakePool = Callable[[int, WarmUps], EnginePool]
"""Factory of the pool, given the memory ceiling in bytes and the known step costs."""

logger = logging.getLogger("paceline.worker")


class OneLine(logging.Formatter):
    """Escapes control characters, so that no name or error can forge a log line; tracebacks keep their line breaks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the escaped line."""
        return escaped(super().formatMessage(record))


def open_scheduler(specification: ModelSpecification, engine: EnginePort, costs: Sequence[StepCost]) -> Scheduler:
    """Return the scheduler of one loaded model; `costs` are its known step costs."""
    scheduler = Scheduler(engine.limits, measured=costs, clock=time.monotonic)
    configure(scheduler, specification)
    return scheduler


def main(arguments: Sequence[str] | None = None, *, make_pool: MakePool | None = None) -> int:
    """Serve the channel until a Shutdown, or until the GPU is lost; return the exit code: 0 or `EXIT_DEVICE_LOST`."""
    parser = argparse.ArgumentParser(prog="paceline worker", description="Started by Paceline itself.")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--note-fd", type=int, required=True)
    parser.add_argument("--memory-ceiling-bytes", dest="ceiling_bytes", type=int, default=memory.ceiling_bytes())
    parser.add_argument("--costs-folder", type=Path)
    parser.add_argument("--prefixes-folder", type=Path)
    parser.add_argument("--prefixes-bytes", type=int, default=0)
    parser.add_argument("--prefixes-days", type=float, default=math.inf)
    parser.add_argument("--wire", choices=("auto", "off"), default="off")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    versions = platform.versions()
    libraries = [f"{name} {versions.get(name)}" for name in ("mlx", "mlx-lm", "paceline")]
    costs = WarmUps(options.costs_folder, (memory.device_name(), *libraries, PREPARATION.reason))
    for descriptor in {options.channel_fd, options.note_fd} - {-1}:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - a child that outlived this process would hold them open
    channel = WorkerChannel(socket.socket(fileno=options.channel_fd))
    memory.bound_buffer_cache()
    disk = Disk(options.prefixes_folder, options.prefixes_bytes, max_days=options.prefixes_days)
    make_pool = make_pool or partial(open_pool, wire=options.wire == "auto", disk=disk)
    try:
        pool = make_pool(options.ceiling_bytes, costs)
        _serve(channel, options.ceiling_bytes, pool, costs, CrashNote(options.note_fd))
    except DeviceLost as error:
        logger.critical("exiting: the GPU accepts no more work from this process: %s", error)
        return EXIT_DEVICE_LOST
    disk.flush(FLUSH_SECONDS)
    return 0


def _serve(channel: WorkerChannel, ceiling_bytes: int, pool: EnginePool, costs: WarmUps, crash_note: CrashNote) -> None:
    texts = TextReaders(spare=SPARE)
    text_thread = TextThread(
        read=texts.read,
        close_idle=texts.close_idle,
        send=channel.send,
        post=lambda command: loop.post(command),  # noqa: PLW0108 - defined below
    )
    loop = Loop(
        pool=pool,
        open_scheduler=open_scheduler,
        text_thread=text_thread,
        send=channel.send,
        save_costs=costs.save,
        crash_note=crash_note,
        text_bytes=lambda: texts.nbytes,
    )

    signal.signal(signal.SIGTERM, lambda *_: text_thread.receive(Shutdown(drain_seconds=TERMINATE_DRAIN_SECONDS)))
    text = threading.Thread(target=_run_or_die, args=(text_thread.run,), name="text", daemon=True)
    text.start()
    channel.start(text_thread.receive, lifeline.end_group)
    logger.info("ready: %s; %s", memory.device_name(), PREPARATION.reason)
    channel.send(
        Ready(
            process_id=os.getpid(),
            device=memory.device_name(),
            versions=platform.versions(),
            memory_ceiling_bytes=ceiling_bytes,
        )
    )
    gc.enable()
    gc.freeze()  # full collections, which delay replies, then skip the imported objects
    loop.run()
    text.join()
    texts.close()


def _run_or_die(work: Callable[[], None]) -> None:
    """Run a thread's work. If it fails, end the process, useless without this thread; the supervisor starts another."""
    try:
        work()
    except BaseException:
        logger.exception("the %s thread failed", threading.current_thread().name)
        os._exit(1)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # skips the destructors of libraries: OpenBLAS's waits for a thread that may never wake
