"""Forks processes that run a server's download queue ("lives") from one warm process: `python -m tests.hub.forge`.

Starting an interpreter takes longer than a small download, and a forked process can be killed just as well. A line of
JSON on standard input starts a life. It prints its process id, that of each child, and its end unless it is killed. A
life leads its own process group and forks its download processes, which read their job and report as real ones do.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, cast

from huggingface_hub import file_download, hf_api  # noqa: F401 - warm: a life imports them at its first request

from app.admin.downloading import Downloads
from app.hub import download_child
from app.hub.download_run import DownloadTimeouts
from app.hub.hub_files import HubToken
from app.machine.lifeline import end_with_parent
from app.settings import Settings
from app.store.rows import DownloadRows
from app.store.store import Store

TIMEOUTS = DownloadTimeouts(pauses_seconds=(0.01,) * 50)


class ForkedChild:
    """A forked download process, with the interface that `app.hub.download_run` uses."""

    def __init__(self, pid: int, stdin: int, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self._stdin = stdin
        self._ended: asyncio.Task[int] | None = None

    def kill(self) -> None:
        if self._ended is None:
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        if self._ended is None:
            os.close(self._stdin)
            self._ended = asyncio.create_task(asyncio.to_thread(self._reap))
        return await self._ended

    def _reap(self) -> int:
        return os.waitpid(self.pid, 0)[1]


async def fork_child(job: bytes) -> asyncio.subprocess.Process:
    """Fork a download process: `spawn_child` without a new interpreter."""
    stdin_read, stdin_write = os.pipe()
    stdout_read, stdout_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        serve_forked(stdin_read, stdout_write)
    say({"child": pid})
    os.close(stdin_read)
    os.close(stdout_write)
    with contextlib.suppress(BrokenPipeError):  # killed already
        os.write(stdin_write, job)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(stdout_read, "rb"))
    return cast("asyncio.subprocess.Process", ForkedChild(pid, stdin_write, reader))


def serve_forked(stdin: int, stdout: int) -> None:
    """Do what `python -m app.hub.download_child` does, after closing all other descriptors of the parent."""
    inherited_descriptors = sorted((stdin, stdout, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    first = 3
    for descriptor in inherited_descriptors:
        os.closerange(first, min(descriptor, 4096))
        first = descriptor + 1
    with os.fdopen(stdin, "rb", buffering=0) as read, os.fdopen(stdout, "wb") as write:
        job = read.readline()
        end_with_parent(read.fileno())
        download_child.serve(job, write)
        os._exit(0)


async def live(order: dict[str, Any]) -> None:
    """Run one life of a server: resume earlier downloads, start the requested one, stop once it is done or failed."""
    store = Store(Path(order["store"]))
    settings = Settings(home=store.path.parent, downloads_folder=Path(order["folder"]), hub_endpoint=order["endpoint"])
    downloads = Downloads(
        lambda: settings,
        DownloadRows(store),
        HubToken(settings.home),
        spawn=fork_child,
        timeouts=TIMEOUTS,
        reserve_bytes=0,
        retry_seconds=0.01,
        streams=2,
    )
    await downloads.start()
    view = await downloads.add(order["repository"])
    while view["state"] not in {"done", "failed"}:
        await downloads.changed()
        view = downloads.view(view["id"])
    await downloads.stop()
    store.close()
    say({"end": view["state"], "problem": view["problem_text"]})


def say(what: dict[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def main() -> None:
    """Fork a life for each order; never wait for one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            say({"pid": os.getpid()})
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(live(json.loads(line)))
            os._exit(0)


if __name__ == "__main__":
    main()
