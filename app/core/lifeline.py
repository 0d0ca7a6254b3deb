"""A process that ends with its parent: at once, however that ended, and whatever it is at itself.

Its standard input is a pipe whose other end the parent holds. A thread waits for that to close, from before the slow
imports on, and has the kernel end the whole group: what reads a tokenizer gives its own threads no turn.
"""

import contextlib
import os
import signal
import threading


def end_with_parent(descriptor: int = 0) -> None:
    """End this process once nobody holds the other end of `descriptor`, which is standard input."""
    threading.Thread(target=_wait, args=(descriptor,), daemon=True, name="lifeline").start()


def end_group() -> None:
    """End this process now, and those that it started where it leads a group."""
    with contextlib.suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _wait(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.read(descriptor, 1)
    end_group()
