"""Failures of a GPU as macOS words them, read from the messages of mlx, which has no classes for them."""

import re

MAX_TIMEOUTS = 8
"""Steps in a row that may time out: enough to halve the largest chunk down to the smallest one."""
_TIMED_OUT = re.compile(
    r"GPU Timeout|CallbackErrorTimeout|Impacting ?Interactivity|Innocent ?Victim|GPU Hang", re.IGNORECASE
)
"""Messages where a command buffer was ended for the time that it, or another process's, took."""
_LOST = re.compile(r"SubmissionsIgnored|Ignored \(for causing prior", re.IGNORECASE)
"""Messages where nothing more is accepted from this process."""


class DeviceLost(Exception):
    """The GPU accepts no more work of this process; only another one can go on."""


def is_timed_out(error: Exception) -> bool:
    """Return whether a step took the GPU for too long, or was ended with another one that did."""
    return bool(_TIMED_OUT.search(str(error)))


def check_device(error: Exception) -> None:
    """Raise DeviceLost if this error says that the GPU is lost to this process."""
    if _LOST.search(str(error)):
        raise DeviceLost(str(error)) from error
