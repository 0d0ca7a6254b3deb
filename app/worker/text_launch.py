"""Starts text processes. Imports little itself: the first process starts before the worker imports mlx, so that both
load their libraries in parallel.
"""

import os
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import NamedTuple

from app.machine.descriptors import socket_pair

ENVIRONMENT = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}


class Launched(NamedTuple):
    """A text process that waits on its standard input for its model folder, and our end of that socket."""

    process: subprocess.Popen[bytes]
    connection: Connection


def launch_text_process(*, close_fds: bool = False) -> Launched:
    """Start a text process as a new program, so that it inherits no state of Metal.

    `close_fds` closes inherited descriptors, for which Python must fork. Only a worker that just started needs it: the
    descriptors that it was started with are still inheritable; other descriptors never are.
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
