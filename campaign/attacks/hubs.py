"""Hubs that lie about their files: each download ends, the queue continues, and nothing is written outside a folder."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from campaign.attack import Arena
from tests.hub.queue import model_files
from tests.hub.stand_in import Repository, StandInHub

ROUTE = "/admin/api/downloads"
SECONDS, LIE_SECONDS, TRUTH_SECONDS = 30.0, 10.0, 60.0
ROWS = 2000
TOKEN = "hf_" + "campaign" * 4
FINISHED = ("done", "failed", "cancelled")

Told = dict[str, Any]


@dataclass
class LyingRepository(Repository):
    """A repository with false information."""

    lie: Callable[[Told], Any] = field(default=lambda told: told)

    def information(self, *, blobs: bool = False) -> Any:
        """Return the hub's information after the lie."""
        return self.lie(super().information(blobs=blobs))


def with_files(**values: Any) -> Callable[[Told], Any]:
    """Return a lie that changes the values of every file."""
    return lambda told: told | {"siblings": [each | values for each in told["siblings"]]}


def with_more(*names: str, size: int = 10) -> Callable[[Told], Any]:
    """Return a lie that adds files that do not exist."""
    return lambda told: told | {"siblings": told["siblings"] + [{"rfilename": name, "size": size} for name in names]}


LIES: dict[str, Callable[[Told], Any]] = {
    "sizes of 2^63": with_files(size=1 << 63, lfs=None),
    "sizes of 2^62, together too much": with_files(size=1 << 62, lfs=None),
    "sizes of 10^400": with_files(size=10**400, lfs=None),
    "sizes below zero": with_files(size=-(1 << 63), lfs=None),
    "sizes that are words": with_files(size="many", lfs={"size": "all", "sha256": 5}),
    "sizes that are no number": with_files(size=float("nan"), lfs=None),
    "no sizes": with_files(size=None, lfs=None),
    "100,000 files": with_more(*(f"f{number}.json" for number in range(100_000))),
    "names that climb": with_more("../../evil.safetensors", "a/../../evil.json", "..", "a/./../..//evil.json"),
    "names from the root": with_more("/tmp/evil.safetensors", "//evil.json", "C:\\evil.json", "\\\\host\\evil.json"),  # noqa: S108
    "names that are none": with_more(
        "", ".", "a\x00b", "a" * 5000, "\ud800.json", "-rf", ".paceline.json", "model.safetensors"
    ),
    "files within files": with_more("config.json/config.json", "model.safetensors/x"),
    "names that are numbers": with_files(rfilename=7),
    "a commit that climbs": lambda told: told | {"sha": "../../../evil"},
    "no commit": lambda told: told | {"sha": None},
    "another identity": lambda told: told | {"id": "../evil", "modelId": "../evil"},
    "no list of files": lambda told: told | {"siblings": {"a": 1}},
    "no object": lambda _told: ["nothing"],
    "null": lambda _told: None,
    "an endless object": lambda told: told | {"config": json.loads('{"a":' * 900 + "1" + "}" * 900)},
}


async def lying_hubs(arena: Arena) -> None:
    """Try one lie after another for some seconds."""
    ends_at = time.monotonic() + SECONDS
    arena.hub.tokens.add(TOKEN)
    await arena.server.call("PUT", "/admin/api/hub/token", {"token": TOKEN})
    for name, lie in arena.chance.sample([*LIES.items()], len(LIES)):
        if time.monotonic() < ends_at:
            await believe(arena, LyingRepository(new_name(arena), model_files(ROWS), lie=lie), name)
    await redirected(arena)


async def redirected(arena: Arena) -> None:
    """Download files from another host, which must not get the token."""
    elsewhere, files = StandInHub(), model_files(ROWS)
    try:
        await believe(arena, Repository(new_name(arena), files, elsewhere=elsewhere.address), "files elsewhere")
    finally:
        elsewhere.close()
    told = [each for each in elsewhere.seen if each.authorization]
    arena.found.expect(not told, "files elsewhere: the token was told to another host")


def new_name(arena: Arena) -> str:
    """Return a repository name that was not used before."""
    return f"campaign/model-{arena.chance.getrandbits(48):x}"


async def believe(arena: Arena, false: Repository, name: str) -> None:
    """Download the false repository, which must end, and then a true one, which must succeed."""
    arena.begin(name)
    arena.hub.repositories[false.id] = false
    true = arena.hub.add(new_name(arena), model_files(ROWS))
    async with arena.server.client(arena.server.admin_key) as admin:
        await ended(arena, admin, false.id, name, LIE_SECONDS)
        state = await ended(arena, admin, true.id, name, TRUTH_SECONDS)
    arena.found.expect(state == "done", f"{name}: the next download is {state or 'not there'}")
    stray = [each.name for each in arena.server.folder.rglob("*evil*")]
    arena.found.expect(not stray, f"{name}: outside of its folder: {stray[:3]}")


async def ended(arena: Arena, admin: httpx2.AsyncClient, repository: str, name: str, seconds: float) -> str:
    """Download a repository and return its last state; cancel it after `seconds`, and remove it from the list."""
    await ask(arena, admin, "POST", ROUTE, name, {"repository": repository})
    deadline, state = time.monotonic() + seconds, ""
    while True:
        listed = (await ask(arena, admin, "GET", ROUTE, name)).get("downloads", [])
        found = next((each for each in listed if each["repository"] == repository), None)
        state = found["state"] if found else ""
        if found is None or state in FINISHED or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    if found is not None:
        await ask(arena, admin, "POST", f"{ROUTE}/{found['id']}/cancel", name, {})
        await ask(arena, admin, "DELETE", f"{ROUTE}/{found['id']}", name)
    return state


async def ask(arena: Arena, admin: httpx2.AsyncClient, method: str, path: str, name: str, body: Any = None) -> Any:
    """Make one call and judge it; return its answer, or {} if it failed."""
    answer = await admin.request(method, path, json=body)
    arena.found.answered(answer.status_code, answer.headers, answer.content, f"{name}: {method} {path}")
    return answer.json() if answer.is_success else {}
