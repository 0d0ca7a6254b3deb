"""The OpenAPI document holds for real answers of a model with a drafter: schemathesis against the real server."""

import asyncio
from pathlib import Path

import pytest

from tests.api.schema_run import FOR_PROGRAMS, look_for_failures
from tests.serving.conftest import running
from tests.tiny import write_tiny_model

CONTEXT_TOKENS = 512
"""Context of the models in tokens; short, as thousands of requests set no limit and generate until it is full."""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_what_programs_may_call_keeps_to_the_document(tmp_path: Path) -> None:
    for name, noise in (("attention", 0.0), ("attention-draft", 0.03)):
        write_tiny_model(tmp_path / "models" / name, "qwen3", noise=noise, context_tokens=CONTEXT_TOKENS)
    models = {"PACELINE_MODEL_DIRS": str(tmp_path / "models"), "PACELINE_DRAFTS": "attention=attention-draft"}
    with running(tmp_path / "home", **models) as server:
        assert asyncio.run(look_for_failures(server.url, "attention", *FOR_PROGRAMS, "--max-examples", "60")) > 5000
