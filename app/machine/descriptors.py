"""The limit on open files of this process, raised to `WANTED` or as far as the system allows."""

import contextlib
import resource
from collections.abc import Iterator

from app.machine.host import ReadSetting, sysctl, sysctl_number

WANTED = 8192


def limit() -> int:
    """Return the present limit, at most `WANTED`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else min(WANTED, soft)


def attainable(read: ReadSetting = sysctl) -> int:
    """Return the limit that `raise_limit` can reach: macOS has a bound of its own in addition to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    by_kernel = sysctl_number("kern.maxfilesperproc", read) or WANTED
    return min(WANTED, by_kernel, WANTED if hard == resource.RLIM_INFINITY else hard)


def raise_limit() -> None:
    """Raise the limit of this process and its children to `attainable()`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = attainable()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def kept_limit() -> Iterator[None]:
    """Block changes of the limit: mlx-lm would lower it at import, and fails where the system allows less."""
    set_limit = resource.setrlimit
    resource.setrlimit = lambda kind, limits: None if kind == resource.RLIMIT_NOFILE else set_limit(kind, limits)
    try:
        yield
    finally:
        resource.setrlimit = set_limit
