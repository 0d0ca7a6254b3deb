"""What schemathesis asks of its requests, in its own process: that they name a model that is there."""

from typing import Any

import schemathesis

MODEL = "demo-main"


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """A name of the right length becomes one that is there: what is wrong elsewhere stays wrong."""
    if isinstance(body, dict) and isinstance(name := body.get("model"), str) and 0 < len(name) <= 300:
        return body | {"model": MODEL}
    return body
