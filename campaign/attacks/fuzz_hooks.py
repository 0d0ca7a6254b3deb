"""Hooks of the fuzzer in schemathesis's process: bodies name an existing model, and every answer is recorded."""

import json
import os
from pathlib import Path
from typing import Any

import schemathesis

from tests.api import schema_hooks  # noqa: F401 - its hooks make the bodies

MAX_BODY_CHARACTERS = 300
_answers = Path(os.environ["CAMPAIGN_ANSWERS"]).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - as long as the process


@schemathesis.hook
def after_call(_context: Any, case: Any, response: Any) -> None:
    """Record the parts of one answer that its judgement needs."""
    headers = {name.lower(): "".join(value) for name, value in response.headers.items()}
    body = (response.content or b"")[:MAX_BODY_CHARACTERS].decode("utf-8", "replace")
    description = f"{case.method} {case.path}"
    _answers.write(json.dumps([response.status_code, headers, body, description]) + "\n")
