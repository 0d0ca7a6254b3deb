"""How many files this process may have open: as many as it wants, or as the system lets it."""

import contextlib
import resource
from collections.abc import Iterator

WANTED = 8192


def limit() -> int:
    """How many there may be now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else min(WANTED, soft)


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many as it wants, or as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has another bound, which it does not tell
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
