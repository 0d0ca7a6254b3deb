"""A unit crosses to the worker as it was chosen, or not at all."""

import msgspec
import pytest

from app.core.unit import ModelSpecification


@pytest.mark.parametrize("field", ["policy", "acceptance"])
def test_an_unknown_rule_does_not_reach_the_worker(field: str) -> None:
    sent = msgspec.msgpack.encode({"id": "main", "path": "main", field: "hope"})
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(sent, type=ModelSpecification)
