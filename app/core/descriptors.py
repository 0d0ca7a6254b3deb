"""How many files this process may have open: as many as it wants, or as the system lets it."""

import contextlib
import resource
from collections.abc import Iterator

from app.core.host import ReadSetting, sysctl, sysctl_number

WANTED = 8192


def limit() -> int:
    """How many there may be now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else min(WANTED, soft)


def attainable(read: ReadSetting = sysctl) -> int:
    """How many there may be once `raise_limit` has asked: macOS has a bound of its own besides the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    by_kernel = sysctl_number("kern.maxfilesperproc", read) or WANTED
    return min(WANTED, by_kernel, WANTED if hard == resource.RLIM_INFINITY else hard)


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many as it wants, or as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = attainable()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def kept_limit() -> Iterator[None]:
    """Nobody changes it meanwhile: mlx-lm would lower it at import, and fails where the system allows less."""
    set_limit = resource.setrlimit
    resource.setrlimit = lambda kind, limits: None if kind == resource.RLIMIT_NOFILE else set_limit(kind, limits)
    try:
        yield
    finally:
        resource.setrlimit = set_limit
