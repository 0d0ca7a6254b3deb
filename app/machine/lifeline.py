"""A process that ends with its parent: at once, however the parent ended, and whatever the process is doing.

Its standard input is a pipe whose other end the parent holds. A thread, started before the slow imports, waits for it
to close and has the kernel kill the whole group: a process that reads a tokenizer lets none of its own threads run.
"""

import contextlib
import os
import signal
import threading


def end_with_parent(descriptor: int = 0) -> None:
    """End this process once the other end of `descriptor`, which is standard input, is closed."""
    threading.Thread(target=_wait, args=(descriptor,), daemon=True, name="lifeline").start()


def end_group() -> None:
    """Kill this process now, with its children if it leads a group."""
    with contextlib.suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _wait(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.read(descriptor, 1)
    end_group()
