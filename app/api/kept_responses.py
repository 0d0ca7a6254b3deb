"""Responses that a conversation may go on with, in memory, bounded in time and bytes, each owner's apart.

They are kept as JSON, so that what is counted is what they take. Where there is no room, the owner who has most loses
the oldest: nobody's go for those of somebody who has more.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from app.core.clock import Clock
from app.serving.errors import Rejected

KEPT_SECONDS = 24 * 3600.0
KEPT_BYTES = 64 * 1024 * 1024
"""Bytes of all owners' responses together."""

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and the messages with which a conversation goes on behind it, as JSON."""

    response: bytes
    input_items: bytes
    messages: bytes
    items: dict[str, bytes]
    """Those of its output by their ids: a conversation may name one in place of sending it."""
    kept_at: float

    @property
    def size_bytes(self) -> int:
        """The length of all of it."""
        return sum(map(len, (self.response, self.input_items, self.messages, *self.items.values())))


class Share:
    """What one owner has, by id, the oldest first."""

    def __init__(self) -> None:
        self.responses: dict[str, KeptResponse] = {}
        self.items: dict[str, bytes] = {}
        self.size_bytes = 0

    def add(self, response_id: str, kept: KeptResponse) -> None:
        """Keep one more."""
        self.responses[response_id] = kept
        self.items |= kept.items
        self.size_bytes += kept.size_bytes

    def remove(self, response_id: str) -> None:
        """Forget one."""
        kept = self.responses.pop(response_id)
        for name in kept.items:
            self.items.pop(name, None)
        self.size_bytes -= kept.size_bytes

    def remove_oldest(self) -> None:
        """Forget the one that was kept first."""
        self.remove(next(iter(self.responses)))


class KeptResponses:
    """The shares of all owners, who never find another's."""

    def __init__(self, clock: Clock = time.monotonic, most_bytes: int = KEPT_BYTES) -> None:
        self._shares: dict[str, Share] = {}
        self._clock = clock
        self._most_bytes = most_bytes

    def keep(self, owner: str, response: Item, input_items: list[Item], messages: list[Item]) -> None:
        """Keep a response that has ended."""
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
        """Raises Rejected (404) for one that is not kept, or another owner's."""
        kept = self._share(owner).responses.get(response_id)
        if kept is None or self._is_old(kept):
            hours = int(KEPT_SECONDS // 3600)
            message = f"There is no response of this id: they are kept for {hours} hours, until the server stops."
            raise Rejected(404, message, "response_not_found")
        return kept

    def forget(self, owner: str, response_id: str) -> None:
        """Raises Rejected (404) as `find` does."""
        self.find(owner, response_id)
        self._share(owner).remove(response_id)

    def item(self, owner: str, item_id: str) -> Item | None:
        """Find an item of an earlier answer; None where it is not kept."""
        item = self._share(owner).items.get(item_id)
        return None if item is None else msgspec.json.decode(item)

    def _share(self, owner: str) -> Share:
        return self._shares.get(owner, Share())

    def _is_old(self, kept: KeptResponse) -> bool:
        return kept.kept_at < self._clock() - KEPT_SECONDS
