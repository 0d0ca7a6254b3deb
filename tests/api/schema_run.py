"""Runs schemathesis, in a process of its own, against a server."""

import asyncio
import os
import re
import sys
from pathlib import Path

CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
FOR_PROGRAMS = ("--include-path-regex", r"^/(v1|api|tokenize|detokenize|apply-template|openapi|metrics|health)")


async def look_for_failures(url: str, model: str, *options: str) -> int:
    """Let it call the routes of the document, assert that no answer was wrong, and return the number of requests."""
    looking = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIGURATION), "run"),
        *(f"{url}/openapi.json", *options),
        env=os.environ | {"PYTHONPATH": str(CONFIGURATION.parents[2]), "SCHEMA_MODEL": model},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = (await looking.communicate())[0].decode()
    match = re.search(r"(\d+) generated", said)
    assert looking.returncode == 0, said
    assert match is not None, said
    return int(match.group(1))
