"""Raises the limits on open files and on a socket's buffered bytes, up to what the system allows."""

import contextlib
import resource
import socket
from collections.abc import Iterator

from app.machine.host import ReadSetting, sysctl, sysctl_number

WANTED_FILES = 8192
SOCKET_BYTES = 1 << 20
"""Buffer size, in bytes, of each end of a socket. With macOS's 8 KiB, a model's steps would wait for the server."""


def limit() -> int:
    """Return the current limit on open files, at most `WANTED_FILES`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED_FILES if soft == resource.RLIM_INFINITY else min(WANTED_FILES, soft)


def attainable(read: ReadSetting = sysctl) -> int:
    """Return the limit that `raise_limit` can reach: macOS has a bound of its own in addition to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    by_kernel = sysctl_number("kern.maxfilesperproc", read) or WANTED_FILES
    return min(WANTED_FILES, by_kernel, WANTED_FILES if hard == resource.RLIM_INFINITY else hard)


def raise_limit() -> None:
    """Raise the limit of this process and its children to `attainable()`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = attainable()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends that buffer `SOCKET_BYTES`, or what the system allows, before a writer blocks."""
    ends = socket.socketpair()
    for end in ends:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
    return ends


@contextlib.contextmanager
def preserved_limit() -> Iterator[None]:
    """Ignore changes of the limit within this block: mlx-lm lowers it at import, or fails if the system allows less."""
    set_limit = resource.setrlimit
    resource.setrlimit = lambda kind, limits: None if kind == resource.RLIMIT_NOFILE else set_limit(kind, limits)
    try:
        yield
    finally:
        resource.setrlimit = set_limit
