"""The stderr of a child process, line by line, to whoever wants it.

A pipe of our own, so that waiting for the child's end never waits for somebody whom it started and who holds it open.
"""

import asyncio
import os
from collections.abc import Callable

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
