"""Responses that a conversation may go on with, in memory, bounded in time and bytes, each owner's apart."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from app.serving.errors import Rejected

KEPT_SECONDS = 24 * 3600.0
KEPT_BYTES = 64 * 1024 * 1024

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and the messages with which a conversation goes on behind it."""

    response: Item
    input_items: list[Item]
    messages: list[Item]
    size_bytes: int
    kept_at: float


class KeptResponses:
    """By owner and id; the oldest go when they are too old, or too many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept: OrderedDict[tuple[str, str], KeptResponse] = OrderedDict()
        self._size_bytes = 0
        self._items: dict[tuple[str, str], Item] = {}
        """Items of earlier answers by owner and id, which a conversation may name in place of sending them."""
        self._clock = clock

    def keep(self, owner: str, response: Item, input_items: list[Item], messages: list[Item]) -> None:
        """Keep a response that has ended."""
        size = len(msgspec.json.encode([response, input_items, messages]))
        kept = KeptResponse(response, input_items, messages, size, self._clock())
        self._kept[owner, response["id"]] = kept
        self._items |= {(owner, item["id"]): item for item in response["output"]}
        self._size_bytes += size
        while self._kept and (
            self._size_bytes > KEPT_BYTES or next(iter(self._kept.values())).kept_at < self._clock() - KEPT_SECONDS
        ):
            self._drop(*next(iter(self._kept)))

    def find(self, owner: str, response_id: str) -> KeptResponse:
        """Raises Rejected (404) for one that is not kept, or another owner's."""
        kept = self._kept.get((owner, response_id))
        if kept is None or kept.kept_at < self._clock() - KEPT_SECONDS:
            hours = int(KEPT_SECONDS // 3600)
            message = f"There is no response of this id: they are kept for {hours} hours, until the server stops."
            raise Rejected(404, message, "response_not_found")
        return kept

    def forget(self, owner: str, response_id: str) -> None:
        """Raises Rejected (404) as `find` does."""
        self.find(owner, response_id)
        self._drop(owner, response_id)

    def item(self, owner: str, item_id: str) -> Item | None:
        """Find an item of an earlier answer; None where it is not kept."""
        return self._items.get((owner, item_id))

    def _drop(self, owner: str, response_id: str) -> None:
        dropped = self._kept.pop((owner, response_id))
        self._size_bytes -= dropped.size_bytes
        for item in dropped.response["output"]:
            self._items.pop((owner, item["id"]), None)
