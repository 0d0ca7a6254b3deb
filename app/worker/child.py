"""One life of the worker process: spawned once, spoken to, ended for certain, never reused."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import app
from app.core.messages import Command, Event
from app.worker.channel import ServerChannel
from app.worker.recovery import new_note, read_note

MAX_LINE_BYTES = 64 * 1024
LAST_WORDS_SECONDS = 1.0
"""What is left in the pipe gets this long once the child has ended."""


class StderrPipe:
    """`write_end` is for the child; then `listen` or `give_up`, and `close` once the child has ended.

    Without `on_line` there is no pipe: the child writes where we do.
    """

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        self._on_line = on_line or (lambda _line: None)
        self._read_end: int | None = None
        self.write_end: int | None = None
        if on_line is not None:
            self._read_end, self.write_end = os.pipe()
        self._task: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """The child has its end: let go of ours, and hand over its lines from now on."""
        if self._read_end is not None and self.write_end is not None:
            os.close(self.write_end)
            self._task = asyncio.create_task(self._run(self._read_end), name="stderr of the worker")

    def give_up(self) -> None:
        """There will be no child."""
        for end in (self._read_end, self.write_end):
            if end is not None:
                os.close(end)

    async def close(self) -> None:
        """Hand over the last words, then stop listening."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=LAST_WORDS_SECONDS)
            self._task.cancel()

    async def _run(self, read_end: int) -> None:
        """An endless line comes in pieces."""
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb")
        )
        rest = b""
        try:
            while chunk := await stream.read(MAX_LINE_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) >= MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._on_line(line.decode("utf-8", "replace"))
            if rest:
                self._on_line(rest.decode("utf-8", "replace"))
        finally:
            transport.close()


WORKER_COMMAND = (sys.executable, "-m", "app.worker.process")
PACKAGE_PARENT = Path(app.__file__).resolve().parent.parent

_SET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
}
_SECRET_ENDINGS = ("TOKEN", "_KEY", "SECRET", "PASSWORD")
_DROPPED = frozenset({"MLX_LM_TRUST_REMOTE_CODE"})


def worker_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: offline, with stack dumps, and without anything that looks like a secret."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _DROPPED and not name.upper().endswith(_SECRET_ENDINGS)
    }
    return kept | _SET


class Child:
    """The process and its channel. `end` leaves neither it nor its group behind."""

    def __init__(self, process: Process, channel: ServerChannel, pipe: StderrPipe, note: IO[bytes]) -> None:
        self._process = process
        self._channel = channel
        self._pipe = pipe
        self._note = note

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        *,
        on_event: Callable[[Event], None],
        on_close: Callable[[str], None],
        on_line: Callable[[str], None] | None = None,
    ) -> "Child":
        """Start `command --channel-fd N --note-fd M` in its own session; `on_line` hears its stderr. Raises OSError."""
        with contextlib.ExitStack() as undo:
            note = new_note()
            undo.callback(note.close)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            pipe = StderrPipe(on_line)
            with theirs, contextlib.ExitStack() as unheard:
                unheard.callback(pipe.give_up)
                process = await asyncio.create_subprocess_exec(
                    *command,
                    *("--channel-fd", str(theirs.fileno()), "--note-fd", str(note.fileno())),
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=pipe.write_end,
                    cwd=PACKAGE_PARENT,
                    env=worker_environment(os.environ),
                    pass_fds=(theirs.fileno(), note.fileno()),
                    start_new_session=True,
                )
                unheard.pop_all()
            undo.callback(process.kill)
            pipe.listen()
            channel = await ServerChannel.open(ours, on_event, on_close)
            undo.pop_all()
        return cls(process, channel, pipe, note)

    @property
    def process_id(self) -> int:
        """The process id, also of its session and group."""
        return self._process.pid

    @property
    def at(self) -> str:
        """The id of the model that the worker is at, or was when it ended; empty for none. Ask before `end`."""
        return read_note(self._note)

    def send(self, command: Command) -> None:
        """Queue one command; see `ServerChannel.send`."""
        self._channel.send(command)

    async def wait(self, seconds: float) -> int | None:
        """The exit code once it has ended (negative: minus the signal), None when it lives on after `seconds`."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._process.wait(), seconds)
        return None

    def send_signal(self, number: signal.Signals) -> None:
        """Send `number` to the process, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, *steps: tuple[signal.Signals, float]) -> int:
        """Send each signal and wait its seconds; then SIGKILL to the whole group. The answer is the exit code."""
        for number, seconds in steps:
            if self._process.returncode is None:
                self.send_signal(number)
                await self.wait(seconds)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = await self._process.wait()
        self._channel.close()
        await self._pipe.close()
        self._note.close()
        return code
