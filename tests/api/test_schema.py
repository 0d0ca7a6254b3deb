"""schemathesis over the OpenAPI document, in every phase, with requests that match the document and others that do not.

No answer is a 5xx, none hangs, none has a status, a type or a shape that the document lacks, and no request that breaks
a schema is accepted. `schemathesis.toml` lists the exceptions, with reasons.
"""

import pytest

from tests.admin.signing import make_sign_in_site
from tests.api.fakes import DRAFTERS, served
from tests.api.schema_run import FOR_PROGRAMS, look_for_failures

pytestmark = pytest.mark.anyio

SECRET = "sk-environment-1234"


async def requests_without_failure(*options: str) -> int:
    """Return the number of requests that schemathesis makes to a site of scripted models."""
    sound = [model for model in DRAFTERS if not model.reason]
    site = make_sign_in_site(api_key=SECRET, models=sound, hub_endpoint="http://127.0.0.1:9").site
    header = f"Authorization: Bearer {SECRET}"
    async with served(site) as (port, _):
        return await look_for_failures(f"http://127.0.0.1:{port}", "demo-main", "--header", header, *options)


@pytest.mark.soak
@pytest.mark.landing
async def test_what_programs_may_call_keeps_to_the_document() -> None:
    like_chat = ("--exclude-path-regex", "^/(tokenize|apply-template)$")
    options = ("--max-examples", "1", "--generation-deterministic")
    assert await requests_without_failure(*FOR_PROGRAMS, *like_chat, *options) > 3000


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_everything_keeps_to_the_document() -> None:
    assert await requests_without_failure("--max-examples", "150") > 20_000
