"""A specification with an unknown rule is refused when it is decoded, so the worker never sees it."""

import msgspec
import pytest

from app.core.unit import ModelSpecification


@pytest.mark.parametrize("field", ["policy", "acceptance"])
def test_an_unknown_rule_does_not_reach_the_worker(field: str) -> None:
    sent = msgspec.msgpack.encode({"id": "main", "path": "main", field: "hope"})
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(sent, type=ModelSpecification)
