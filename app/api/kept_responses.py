"""Responses that a conversation may continue, in memory, bounded in time and bytes, separate for each owner.

They are kept as JSON, so that the bytes counted are the bytes held. When space runs out, the owner who holds the most
loses the oldest response: no owner is evicted in favour of one who holds more.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from app.core.clock import Clock
from app.serving.errors import Rejected

KEPT_SECONDS = 24 * 3600.0
KEPT_BYTES = 64 * 1024 * 1024
"""Budget for all owners' responses together, in bytes."""

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response and the messages that a conversation continues from, as JSON."""

    response: bytes
    input_items: bytes
    messages: bytes
    items: dict[str, bytes]
    """Items of its output by id: a conversation may reference one instead of sending it."""
    kept_at: float

    @property
    def size_bytes(self) -> int:
        """Bytes of all of its JSON."""
        return sum(map(len, (self.response, self.input_items, self.messages, *self.items.values())))


class Share:
    """Responses and items of one owner by id, the oldest first."""

    def __init__(self) -> None:
        self.responses: dict[str, KeptResponse] = {}
        self.items: dict[str, bytes] = {}
        self.size_bytes = 0

    def add(self, response_id: str, kept: KeptResponse) -> None:
        """Add a response."""
        self.responses[response_id] = kept
        self.items |= kept.items
        self.size_bytes += kept.size_bytes

    def remove(self, response_id: str) -> None:
        """Remove a response with its items."""
        kept = self.responses.pop(response_id)
        for name in kept.items:
            self.items.pop(name, None)
        self.size_bytes -= kept.size_bytes

    def remove_oldest(self) -> None:
        """Remove the response that was kept first."""
        self.remove(next(iter(self.responses)))


class KeptResponses:
    """Shares of all owners, who never see one another's."""

    def __init__(self, clock: Clock = time.monotonic, most_bytes: int = KEPT_BYTES) -> None:
        self._shares: dict[str, Share] = {}
        self._clock = clock
        self._most_bytes = most_bytes

    def keep(self, owner: str, response: Item, input_items: list[Item], messages: list[Item]) -> None:
        """Keep a finished response, and evict those that are too old or no longer fit."""
        whole, given, said = map(msgspec.json.encode, (response, input_items, messages))
        items = {item["id"]: msgspec.json.encode(item) for item in response["output"]}
        own = self._shares.setdefault(owner, Share())
        own.add(response["id"], KeptResponse(whole, given, said, items, self._clock()))
        for share in self._shares.values():
            while share.responses and self._is_old(next(iter(share.responses.values()))):
                share.remove_oldest()
        while sum(share.size_bytes for share in self._shares.values()) > self._most_bytes:
            max(self._shares.values(), key=lambda share: (share.size_bytes, share is own)).remove_oldest()
        self._shares = {name: share for name, share in self._shares.items() if share.responses}

    def find(self, owner: str, response_id: str) -> KeptResponse:
        """Return a kept response. Raises Rejected (404) if it is not kept or another owner's."""
        kept = self._share(owner).responses.get(response_id)
        if kept is None or self._is_old(kept):
            hours = int(KEPT_SECONDS // 3600)
            message = f"There is no response of this id: they are kept for {hours} hours, until the server stops."
            raise Rejected(404, message, "response_not_found")
        return kept

    def forget(self, owner: str, response_id: str) -> None:
        """Remove a response. Raises Rejected (404) as `find` does."""
        self.find(owner, response_id)
        self._share(owner).remove(response_id)

    def item(self, owner: str, item_id: str) -> Item | None:
        """Find an item of an earlier answer; None if it is not kept."""
        item = self._share(owner).items.get(item_id)
        return None if item is None else msgspec.json.decode(item)

    def _share(self, owner: str) -> Share:
        return self._shares.get(owner, Share())

    def _is_old(self, kept: KeptResponse) -> bool:
        return kept.kept_at < self._clock() - KEPT_SECONDS
