"""One run of the worker process: spawned once, never reused, reliably ended."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import app
from app.core.messages import Event
from app.core.reason import Reason
from app.machine.channel import EXIT_DEVICE_LOST, NOTE_BYTES, CrashNote, ServerChannel
from app.machine.descriptors import socket_pair

MAX_LINE_BYTES = 64 * 1024
SIGKILL_SECONDS = 10.0
"""Seconds to wait for a process to end after SIGKILL; longer means that the kernel is blocking it."""
STDERR_DRAIN_SECONDS = 1.0
"""Seconds to drain the stderr pipe once the child has ended."""
WORKER_COMMAND = (sys.executable, "-m", "app.worker.process")
PACKAGE_PARENT = Path(app.__file__).resolve().parent.parent

_FIXED_VARIABLES = {
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
_DROPPED_VARIABLES = frozenset({"MLX_LM_TRUST_REMOTE_CODE"})
_SIGNALS: dict[int, Reason] = {
    signal.SIGKILL: Reason("exit_killed"),
    signal.SIGABRT: Reason("exit_aborted"),
    signal.SIGSEGV: Reason("exit_segfault"),
    signal.SIGBUS: Reason("exit_bus"),
    signal.SIGILL: Reason("exit_illegal"),
    signal.SIGTERM: Reason("exit_terminated"),
}


def worker_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the worker's environment: offline, with stack dumps, without anything that looks like a secret."""
    allowed = {
        name: value
        for name, value in inherited.items()
        if name not in _DROPPED_VARIABLES and not name.upper().endswith(_SECRET_ENDINGS)
    }
    return allowed | _FIXED_VARIABLES


def open_note_file() -> BinaryIO | None:
    """Return a file for a crash note; None if there is no disk for it: the note is then private to each process.

    It is written, not just extended: writing to a hole in a mapped file is a SIGBUS if the disk is full by then.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as cleanup:
        file = cleanup.enter_context(tempfile.TemporaryFile(buffering=0))
        if file.write(bytes(NOTE_BYTES)) == NOTE_BYTES:
            cleanup.pop_all()
            return file
    return None


class Child:
    """The process, its channel and its crash note. `end` leaves neither the process nor its group behind."""

    def __init__(
        self,
        process: Process,
        lifeline: BinaryIO,
        channel: ServerChannel,
        note: CrashNote,
        stderr_task: asyncio.Task[None] | None,
    ) -> None:
        self._process = process
        self._lifeline = lifeline
        self._note = note
        self._stderr_task = stderr_task
        self._channel = channel
        self.process_id = process.pid
        """Id of the process, and of its session and group."""
        self.send = channel.send
        """Queue one command; see `ServerChannel.send`."""

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        *,
        on_event: Callable[[Event], None],
        on_close: Callable[[str], None],
        on_line: Callable[[str], None] | None = None,
    ) -> "Child":
        """Start `command --channel-fd N --note-fd M` in its own session. Its stdin closes when this process ends;
        `on_line` gets the lines of its stderr; without `on_line`, stderr is inherited. Raises OSError."""
        with contextlib.ExitStack() as cleanup, contextlib.ExitStack() as child_ends:
            ours, theirs = socket_pair()
            cleanup.callback(ours.close)
            child_ends.enter_context(theirs)
            note = open_note_file()
            note_fd = -1 if note is None else child_ends.enter_context(note).fileno()
            stdin, write_end = os.pipe()
            child_ends.callback(os.close, stdin)
            lifeline = os.fdopen(write_end, "wb")
            cleanup.callback(lifeline.close)
            stderr_task, stderr = None, None
            if on_line is not None:
                read_end, stderr = os.pipe()
                child_ends.callback(os.close, stderr)
                stderr_task = asyncio.create_task(_forward_lines(read_end, on_line), name="stderr of the worker")
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--channel-fd", str(theirs.fileno()), "--note-fd", str(note_fd)),
                stdin=stdin,
                stdout=DEVNULL,
                stderr=stderr,
                cwd=PACKAGE_PARENT,
                env=worker_environment(os.environ),
                pass_fds={theirs.fileno(), note_fd} - {-1},
                start_new_session=True,
            )
            cleanup.callback(process.kill)
            channel = await ServerChannel.open(ours, on_event, on_close)
            cleanup.pop_all()
            return cls(process, lifeline, channel, CrashNote(note_fd), stderr_task)

    @property
    def active_model(self) -> str:
        """Id of the model that the worker is working on, or was when it ended; empty for none."""
        return self._note.model_id

    async def wait(self, seconds: float) -> int | None:
        """Return the exit code (negative: minus the signal), or None if the process is still alive after `seconds`."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._process.wait(), seconds)
        return None

    async def end(self, *signals: tuple[signal.Signals, float]) -> int | None:
        """Send each signal and wait up to its seconds; then SIGKILL the whole group. Return the exit code; None if the
        process is stuck in a system call and is left behind."""
        for number, seconds in signals:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)
                await self.wait(seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # after a crash, its text processes may still be running
        code = await self.wait(SIGKILL_SECONDS)
        self._lifeline.close()
        self._channel.close()
        if self._stderr_task is not None:
            await asyncio.wait({self._stderr_task}, timeout=STDERR_DRAIN_SECONDS)
            self._stderr_task.cancel()
        return code


async def _forward_lines(read_end: int, on_line: Callable[[str], None]) -> None:
    """Pass lines to `on_line` until the other end of the pipe is closed; an endless line is split.

    The pipe is not asyncio's own: with that, a process counts as running while one of its children has stderr open.
    """
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
                on_line(line.decode("utf-8", "replace"))
        if rest:
            on_line(rest.decode("utf-8", "replace"))
    finally:
        transport.close()


def exit_name(code: int | None) -> str:
    """Return an exit code as text: its number, or the name of the signal (negative: minus the signal; None: killed)."""
    if code is not None and code >= 0:
        return str(code)
    number = signal.SIGKILL if code is None else -code
    return signal.Signals(number).name if number in {*signal.Signals} else str(number)


def describe_exit(code: int | None) -> Reason:
    """Return why a process ended, given its exit code as in `exit_name`."""
    if code is None:
        return Reason("exit_stuck")
    if code == EXIT_DEVICE_LOST:
        return Reason("exit_device")
    if code >= 0:
        return Reason("exit_code", {"code": code}) if code else Reason("exit_clean")
    return _SIGNALS.get(-code) or Reason("exit_signal", {"name": exit_name(code)})
