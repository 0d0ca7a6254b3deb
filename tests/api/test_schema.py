"""schemathesis over the OpenAPI document, in every phase, with requests that fit it and such that do not.

No answer is a 5xx, none hangs, none has a status, a type or a shape that the document does not tell, and nothing that
breaks a schema passes. `schemathesis.toml` says what is left out, and why.
"""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.admin.signing import make_sign_in_site
from tests.api.fakes import DRAFTERS, served

pytestmark = pytest.mark.anyio

SECRET = "sk-environment-1234"
CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
FOR_PROGRAMS = r"^/(v1|api|tokenize|detokenize|apply-template|openapi|metrics|health)"


async def look_for_failures(*options: str) -> int:
    """Let schemathesis call a server; the answer is how many requests it made, none of them wrong."""
    sound = [model for model in DRAFTERS if not model.reason]
    site = make_sign_in_site(api_key=SECRET, models=sound, hub_endpoint="http://127.0.0.1:9").site
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIGURATION), "run"]
    given = ["--header", f"Authorization: Bearer {SECRET}", *options]
    async with served(site) as (port, _):
        looking = await asyncio.create_subprocess_exec(
            *command,
            f"http://127.0.0.1:{port}/openapi.json",
            *given,
            env=os.environ | {"PYTHONPATH": str(CONFIGURATION.parents[2])},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said = (await looking.communicate())[0].decode()
    assert looking.returncode == 0, said
    found = re.search(r"(\d+) generated", said)
    assert found is not None, said
    return int(found.group(1))


async def test_what_programs_may_call_keeps_to_the_document() -> None:
    options = ("--max-examples", "1", "--generation-deterministic")
    assert await look_for_failures("--include-path-regex", FOR_PROGRAMS, *options) > 3000


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_everything_keeps_to_the_document() -> None:
    assert await look_for_failures("--max-examples", "150") > 20_000
