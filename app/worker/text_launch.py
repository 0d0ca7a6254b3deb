"""Starts text processes, with little imported: the first one starts before its worker imports mlx, and imports its own
libraries beside it.
"""

import os
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import NamedTuple

from app.machine.descriptors import socket_pair

ENVIRONMENT = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}


class Launched(NamedTuple):
    """A text process that waits for its model folder on its standard input, and our end of that."""

    process: subprocess.Popen[bytes]
    connection: Connection


def launch_text_process(*, close_fds: bool = False) -> Launched:
    """Start a text process. Spawned, not forked: no state of Metal may be inherited.

    Our own descriptors are not inheritable, so that none need be closed, which takes a fork; those that a worker is
    started with are, at first.
    """
    ours, theirs = socket_pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.worker.text_process"],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            close_fds=close_fds,
            env={**os.environ, **ENVIRONMENT},
        )
    return Launched(process, Connection(ours.detach()))
