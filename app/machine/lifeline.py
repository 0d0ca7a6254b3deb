"""Ends a process as soon as its parent ends, however the parent ends and whatever the process is doing.

Standard input is a pipe whose other end the parent keeps open. A thread, started before the slow imports, waits until
it is closed, then has the kernel kill the process group: children cannot run such a thread while they read a tokenizer.
"""

import contextlib
import os
import signal
import threading


def end_with_parent(descriptor: int = 0) -> None:
    """End this process once the other end of `descriptor` (by default standard input) is closed."""
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
