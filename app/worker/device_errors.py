"""GPU failures, recognised by macOS's texts in the messages of mlx, which has no exception classes for them."""

import re

MAX_TIMEOUTS = 8
"""Maximum number of consecutive steps that time out: enough to halve the largest chunk down to the smallest."""
_TIMED_OUT = re.compile(
    r"GPU Timeout|CallbackErrorTimeout|Impacting ?Interactivity|Innocent ?Victim|GPU Hang", re.IGNORECASE
)
"""Messages about a command buffer that was aborted because it, or one of another process, ran too long."""
_LOST = re.compile(r"SubmissionsIgnored|Ignored \(for causing prior", re.IGNORECASE)
"""Messages after which the GPU accepts no more work from this process."""


class DeviceLost(Exception):
    """The GPU accepts no more work from this process; only a new process can use it."""


def is_timed_out(error: Exception) -> bool:
    """Return whether a step was aborted because it, or other work on the GPU, ran too long."""
    return bool(_TIMED_OUT.search(str(error)))


def check_device(error: Exception) -> None:
    """Raise DeviceLost if this error means that the GPU accepts no more work from this process."""
    if _LOST.search(str(error)):
        raise DeviceLost(str(error)) from error
