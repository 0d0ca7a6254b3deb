"""A specification with an unknown rule is refused when it is decoded, so the worker never sees it."""

from typing import Any

import msgspec
import pytest

from app.core.unit import ModelSpecification


@pytest.mark.parametrize("values", [{"live": {"policy": "hope"}}, {"acceptance": "hope"}])
def test_an_unknown_rule_does_not_reach_the_worker(values: dict[str, Any]) -> None:
    sent = msgspec.msgpack.encode({"id": "main", "path": "main"} | values)
    with pytest.raises(msgspec.ValidationError, match="hope"):
        msgspec.msgpack.decode(sent, type=ModelSpecification)
