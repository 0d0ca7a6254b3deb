"""Hooks in the process of schemathesis, which make its requests name an existing model and end soon."""

import os
from typing import Any

import schemathesis

LONGEST = 4
LIMITS = {"/v1/responses": "max_output_tokens"}
"""Names of the token limit on routes that do not call it `max_tokens`."""
OLLAMA = ("/api/chat", "/api/generate")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Replace a valid model name by an existing one, and a valid or missing token limit by a small one."""
    if not isinstance(body, dict):
        return body
    changes: dict[str, Any] = {}
    if isinstance(name := body.get("model"), str) and 0 < len(name) <= 300:
        changes["model"] = os.environ["SCHEMA_MODEL"]
    path = context.operation.path
    if path in OLLAMA:
        options = {} if body.get("options") is None else body["options"]
        return body | changes | ({"options": options | {"num_predict": LONGEST}} if isinstance(options, dict) else {})
    limits = (LIMITS.get(path, "max_tokens"), "max_completion_tokens")
    changes |= {name: LONGEST for name in limits if type(length := body.get(name)) is int and length > LONGEST}
    if path.startswith(("/v1/", "/admin/api/v1/")) and all(body.get(name) is None for name in limits):
        changes[limits[0]] = LONGEST
    return body | changes
