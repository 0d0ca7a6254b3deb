"""Servers killed in the middle of writing: nothing is torn, and nothing acknowledged is lost."""

import asyncio
import contextlib
import json
import secrets
import shutil
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil

from app.store.store import FILE_NAME, Store
from campaign.attack import TurnContext
from campaign.chats import chat
from campaign.judgement import CHILDREN_GONE
from campaign.server import kill_all

WRITE_SECONDS = (0.2, 2.5)
GONE_SECONDS = 30.0
PAUSE_SECONDS = 0.02
SAFETENSORS_HEADER_BYTES = 8


@dataclass
class WriteLog:
    """Writes that were sent, and those that were acknowledged."""

    setting: int = 0
    sent: int = 0
    keys: set[str] = field(default_factory=set)
    turns: dict[int, set[str]] = field(default_factory=dict)
    """Ids of acknowledged turns, by conversation."""


async def kill_server(context: TurnContext) -> None:
    """SIGKILL the server while settings, keys and conversations are written and chats run; then restart it."""
    log, server = WriteLog(), context.server
    async with server.client(server.admin_key) as admin:
        writers = [asyncio.create_task(write(admin, log)) for write in (settings, keys, conversations, chats)]
        await asyncio.sleep(context.rng.uniform(*WRITE_SECONDS))
        children = server.process_tree()[1:]
        killed_at = time.monotonic()
        await server.kill()
        await asyncio.gather(*writers)
    context.findings.record_time(CHILDREN_GONE, await wait_for_exit(children, killed_at))
    context.findings.failures += torn_files(server.home)
    context.findings.tried += 1
    await server.start()
    async with server.client(server.admin_key) as admin:
        context.findings.failures += await missing_writes(admin, log)


async def settings(admin: httpx2.AsyncClient, log: WriteLog) -> None:
    """Write one setting again and again."""
    with contextlib.suppress(httpx2.TransportError):
        while True:
            log.sent += 1
            if (await admin.patch("/admin/api/settings", json={"history_limit": log.sent})).is_success:
                log.setting = log.sent


async def keys(admin: httpx2.AsyncClient, log: WriteLog) -> None:
    """Create one key after another."""
    with contextlib.suppress(httpx2.TransportError):
        while True:
            body = {"name": secrets.token_hex(8), "scope": "inference"}
            if (response := await admin.post("/admin/api/keys", json=body)).is_success:
                log.keys.add(str(response.json()["key"]["id"]))


async def conversations(admin: httpx2.AsyncClient, log: WriteLog) -> None:
    """Write one conversation after another, turn by turn."""
    with contextlib.suppress(httpx2.TransportError):
        for number in range(1_000_000):
            await one_conversation(admin, log, time.time_ns() + number)


async def one_conversation(admin: httpx2.AsyncClient, log: WriteLog, number: int) -> None:
    """Write three turns of a conversation under an id of our choice."""
    begin: dict[str, object] = {"begin": {"title": "Kept"}}
    number, parent = number % (1 << 53), ""
    for version in range(3):
        turn = {"id": f"t{version}", "parent": parent, "role": "user", "content": "words " * 200}
        body = {"version": version, "turns": [turn]} | begin
        response = await admin.post(f"/admin/api/conversations/{number}/turns", json=body)
        if not response.is_success:
            return
        log.turns.setdefault(number, set()).add(f"t{version}")
        begin, parent = {}, f"t{version}"


async def chats(admin: httpx2.AsyncClient, _log: WriteLog) -> None:
    """Request answers, whose statistics are written too."""
    with contextlib.suppress(httpx2.TransportError):
        while True:
            await admin.post("/v1/chat/completions", json=chat("Hello", max_tokens=20) | {"stream": False})


async def wait_for_exit(children: list[psutil.Process], since: float) -> float:
    """Return the seconds from `since` to the end of the last process, at most about `GONE_SECONDS`; kill the rest."""
    while (now := time.monotonic()) < since + GONE_SECONDS:
        if not any(map(_runs, children)):
            break
        await asyncio.sleep(PAUSE_SECONDS)
    kill_all(children)
    return now - since


def _runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended; a zombie that its new parent has not reaped has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def missing_writes(admin: httpx2.AsyncClient, log: WriteLog) -> list[str]:
    """List the acknowledged writes that are missing."""
    problems = []
    values = (await admin.get("/admin/api/settings")).json()
    limit = next(setting["value"] for setting in values["settings"] if setting["name"] == "history_limit")
    if log.setting and not log.setting <= limit <= log.sent:
        problems.append(f"a setting is {limit}, {log.setting} was acknowledged")
    present = {str(key["id"]) for key in (await admin.get("/admin/api/keys")).json()["keys"]}
    problems += [f"key {key} is lost" for key in log.keys - present]
    for number, turns in log.turns.items():
        answer = await admin.get(f"/admin/api/conversations/{number}")
        present_turns = {turn["id"] for turn in answer.json()["turns"]} if answer.is_success else set()
        problems += [f"turn {turn} of a conversation is lost" for turn in turns - present_turns]
    return problems


def torn_files(home: Path) -> list[str]:
    """List the torn files in the home of a stopped server, without changing it."""
    problems = []
    for path in sorted(home.rglob("*")):
        if path.suffix == ".json" and not is_json(path):
            problems.append(f"{path.name} is torn")
        if path.suffix == ".safetensors" and not is_safetensors(path):
            problems.append(f"{path.name} is torn")
        if "damaged" in path.name:
            problems.append(f"{path.name} was set aside")
    with tempfile.TemporaryDirectory() as folder:
        for path in home.glob(f"{FILE_NAME}*"):
            shutil.copy(path, folder)
        store = Store(Path(folder) / FILE_NAME)
        with contextlib.closing(store):
            if message := store.start():
                problems.append(f"the store is torn: {message}")
    return problems


def is_json(path: Path) -> bool:
    """Return whether a file is JSON."""
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def is_safetensors(path: Path) -> bool:
    """Return whether a file has the length that its header implies."""
    content = path.read_bytes()
    try:
        (length,) = struct.unpack("<Q", content[:SAFETENSORS_HEADER_BYTES])
        header = json.loads(content[SAFETENSORS_HEADER_BYTES : SAFETENSORS_HEADER_BYTES + length])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError):
        return False
    return bool(len(content) == SAFETENSORS_HEADER_BYTES + length + max(ends, default=0))
