"""Hubs that lie about files: each download ends, the queue continues, and nothing is written outside its folder."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from campaign.attack import TurnContext
from tests.hub.queue import model_files
from tests.hub.stand_in import Repository, StandInHub

ROUTE = "/admin/api/downloads"
SECONDS, LIE_SECONDS, TRUTH_SECONDS = 30.0, 10.0, 60.0
ROWS = 2000
TOKEN = "hf_" + "campaign" * 4
FINISHED = ("done", "failed", "cancelled")

Information = dict[str, Any]


@dataclass
class LyingRepository(Repository):
    """A repository with false information."""

    lie: Callable[[Information], Any] = field(default=lambda truth: truth)

    def information(self, *, blobs: bool = False) -> Any:
        """Return the repository's information, falsified by `lie`."""
        return self.lie(super().information(blobs=blobs))


def with_files(**values: Any) -> Callable[[Information], Any]:
    """Return a lie that changes the values of every file."""
    return lambda truth: truth | {"siblings": [file | values for file in truth["siblings"]]}


def with_more(*names: str, size: int = 10) -> Callable[[Information], Any]:
    """Return a lie that adds files that do not exist."""
    return lambda truth: truth | {"siblings": truth["siblings"] + [{"rfilename": name, "size": size} for name in names]}


LIES: dict[str, Callable[[Information], Any]] = {
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
    "a commit that climbs": lambda truth: truth | {"sha": "../../../evil"},
    "no commit": lambda truth: truth | {"sha": None},
    "another identity": lambda truth: truth | {"id": "../evil", "modelId": "../evil"},
    "no list of files": lambda truth: truth | {"siblings": {"a": 1}},
    "no object": lambda _truth: ["nothing"],
    "null": lambda _truth: None,
    "an endless object": lambda truth: truth | {"config": json.loads('{"a":' * 900 + "1" + "}" * 900)},
}


async def lying_hubs(context: TurnContext) -> None:
    """Try one lie after another for some seconds."""
    ends_at = time.monotonic() + SECONDS
    context.hub.tokens.add(TOKEN)
    await context.server.call("PUT", "/admin/api/hub/token", {"token": TOKEN})
    for name, lie in context.rng.sample([*LIES.items()], len(LIES)):
        if time.monotonic() < ends_at:
            await try_lie(context, LyingRepository(new_name(context), model_files(ROWS), lie=lie), name)
    await redirected(context)


async def redirected(context: TurnContext) -> None:
    """Download files from another host, which must not get the token."""
    elsewhere, files = StandInHub(), model_files(ROWS)
    try:
        await try_lie(context, Repository(new_name(context), files, elsewhere=elsewhere.address), "files elsewhere")
    finally:
        elsewhere.close()
    leaked = [request for request in elsewhere.requests if request.authorization]
    context.findings.expect(not leaked, "files elsewhere: the token was told to another host")


def new_name(context: TurnContext) -> str:
    """Return a repository name that was not used before."""
    return f"campaign/model-{context.rng.getrandbits(48):x}"


async def try_lie(context: TurnContext, lying: Repository, name: str) -> None:
    """Download the lying repository, which must end, and then an honest one, which must succeed."""
    context.begin(name)
    context.hub.repositories[lying.id] = lying
    honest = context.hub.add(new_name(context), model_files(ROWS))
    async with context.server.client(context.server.admin_key) as admin:
        await download_to_end(context, admin, lying.id, name, LIE_SECONDS)
        state = await download_to_end(context, admin, honest.id, name, TRUTH_SECONDS)
    context.findings.expect(state == "done", f"{name}: the next download is {state or 'not there'}")
    stray = [path.name for path in context.server.folder.rglob("*evil*")]
    context.findings.expect(not stray, f"{name}: outside of its folder: {stray[:3]}")


async def download_to_end(
    context: TurnContext, admin: httpx2.AsyncClient, repository: str, name: str, seconds: float
) -> str:
    """Download a repository and return its last state; cancel it after `seconds`, and remove it from the list."""
    await call(context, admin, "POST", ROUTE, name, {"repository": repository})
    deadline, state = time.monotonic() + seconds, ""
    while True:
        listed = (await call(context, admin, "GET", ROUTE, name)).get("downloads", [])
        download = next((entry for entry in listed if entry["repository"] == repository), None)
        state = download["state"] if download else ""
        if download is None or state in FINISHED or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    if download is not None:
        await call(context, admin, "POST", f"{ROUTE}/{download['id']}/cancel", name, {})
        await call(context, admin, "DELETE", f"{ROUTE}/{download['id']}", name)
    return state


async def call(
    context: TurnContext, admin: httpx2.AsyncClient, method: str, path: str, name: str, body: Any = None
) -> Any:
    """Make one call and judge it; return its answer, or {} if it failed."""
    answer = await admin.request(method, path, json=body)
    context.findings.count_response(answer.status_code, answer.headers, answer.content, f"{name}: {method} {path}")
    return answer.json() if answer.is_success else {}
