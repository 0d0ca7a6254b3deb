"""Runs schemathesis over a few routes of the OpenAPI document at a time, with requests that fit it and others."""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

from campaign.attack import RESTART_ROUTE, TurnContext
from campaign.chats import MODEL
from campaign.honest import ROOT

CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
ROUTES = 12
"""Number of routes in one turn."""
SECONDS = 30
GRACE_SECONDS = 20.0


async def fuzz(context: TurnContext) -> None:
    """Let schemathesis call some routes for some seconds; the answers are judged here, not by its own checks."""
    async with context.server.client(context.server.admin_key) as admin:
        paths = sorted({*(await admin.get("/openapi.json")).json()["paths"]} - {RESTART_ROUTE})
    chosen = [word for path in context.rng.sample(paths, ROUTES) for word in ("--include-path", path)]
    answers = context.server.folder / "answers.jsonl"
    answers.write_text("")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIGURATION), "run"),
        *(
            f"{context.server.address}/openapi.json",
            "--max-time",
            str(SECONDS),
            "--phases",
            "coverage,fuzzing,stateful",
        ),
        *("--seed", str(context.rng.getrandbits(32)), *chosen),
        *("--header", f"Authorization: Bearer {context.server.admin_key}"),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SCHEMA_MODEL": MODEL, "CAMPAIGN_ANSWERS": str(answers)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await asyncio.wait_for(process.wait(), SECONDS + GRACE_SECONDS)
    except TimeoutError:  # it finishes its last scenario first
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    for line in answers.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # the last line may be half written
            status, headers, body, description = json.loads(line)
            context.findings.count_response(status, headers, body.encode(), description)
    context.findings.expect(context.findings.tried, "schemathesis asked for nothing")
