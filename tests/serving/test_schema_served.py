"""The OpenAPI document holds for models that answer themselves, with drafts: schemathesis against the real server."""

import asyncio

import pytest

from tests.api.schema_run import FOR_PROGRAMS, look_for_failures
from tests.serving.conftest import Server


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_what_programs_may_call_keeps_to_the_document(server: Server) -> None:
    assert asyncio.run(look_for_failures(server.url, "attention", *FOR_PROGRAMS, "--max-examples", "60")) > 5000
