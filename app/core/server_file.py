"""`PACELINE_HOME/server.json`: where the server of this home listens, and the key that lets its owner's commands in.

Only the owner of the files can read it, and the key is taken from this computer alone. It is locked while that server
runs: a second one on the same home leaves it alone, and one that was killed leaves a key that opens nothing.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

FILE_NAME = "server.json"


class RunningServer(msgspec.Struct, frozen=True):
    """What the file says."""

    host: str
    port: int
    key: str


def read_server(home: Path) -> RunningServer | None:
    """The server that wrote the file last; None where there is none, or nothing that tells."""
    try:
        return msgspec.json.decode((home / FILE_NAME).read_bytes(), type=RunningServer)
    except (OSError, msgspec.DecodeError):
        return None


@contextlib.contextmanager
def written_server(home: Path, server: RunningServer) -> Iterator[None]:
    """The file is there meanwhile; a disk that cannot be written costs it, and nothing else."""
    path = home / FILE_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, msgspec.json.encode(server))
        yield
    finally:
        if read_server(home) == server:
            path.unlink(missing_ok=True)
        os.close(descriptor)
