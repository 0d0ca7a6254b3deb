"""Responses that a conversation may continue: in memory, limited in age and bytes, separate for each owner.

They are stored as JSON, so that the counted bytes are the memory used. When space runs out, the owner with the most
bytes loses its oldest response: no owner loses a response to another that stores more.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from app.core.clock import Clock
from app.serving.errors import Rejected

MAX_AGE_SECONDS = 24 * 3600.0
MAX_TOTAL_BYTES = 64 * 1024 * 1024
"""Budget for all owners' responses together, in bytes."""

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the messages that a conversation continues from, as JSON."""

    response: bytes
    input_items: bytes
    messages: bytes
    items: dict[str, bytes]
    """Output items by id: a conversation may reference an item instead of sending it."""
    stored_at: float

    @property
    def size_bytes(self) -> int:
        """Size of all its JSON, in bytes."""
        return sum(map(len, (self.response, self.input_items, self.messages, *self.items.values())))


class OwnerResponses:
    """Responses and items of one owner by id, the oldest first."""

    def __init__(self) -> None:
        self.responses: dict[str, StoredResponse] = {}
        self.by_item: dict[str, StoredResponse] = {}
        """The response that each item belongs to, by the item's id."""
        self.size_bytes = 0

    def add(self, response_id: str, stored: StoredResponse) -> None:
        """Add a response."""
        self.responses[response_id] = stored
        self.by_item |= dict.fromkeys(stored.items, stored)
        self.size_bytes += stored.size_bytes

    def remove(self, response_id: str) -> None:
        """Remove a response with its items."""
        stored = self.responses.pop(response_id)
        for name in stored.items:
            self.by_item.pop(name, None)
        self.size_bytes -= stored.size_bytes

    def remove_oldest(self) -> None:
        """Remove the response that was stored first."""
        self.remove(next(iter(self.responses)))


class ResponseStore:
    """Stored responses of all owners, isolated from one another."""

    def __init__(self, clock: Clock = time.monotonic, max_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._by_owner: dict[str, OwnerResponses] = {}
        self._clock = clock
        self._max_bytes = max_bytes

    def save(self, owner: str, response: Item, input_items: list[Item], messages: list[Item]) -> None:
        """Store a finished response, and evict responses that are too old or no longer fit."""
        encoded_response, encoded_input, encoded_messages = map(msgspec.json.encode, (response, input_items, messages))
        items = {item["id"]: msgspec.json.encode(item) for item in response["output"]}
        owned = self._by_owner.setdefault(owner, OwnerResponses())
        owned.add(
            response["id"], StoredResponse(encoded_response, encoded_input, encoded_messages, items, self._clock())
        )
        for candidate in self._by_owner.values():
            while candidate.responses and self._is_old(next(iter(candidate.responses.values()))):
                candidate.remove_oldest()
        while sum(candidate.size_bytes for candidate in self._by_owner.values()) > self._max_bytes:
            max(
                self._by_owner.values(), key=lambda candidate: (candidate.size_bytes, candidate is owned)
            ).remove_oldest()
        self._by_owner = {name: candidate for name, candidate in self._by_owner.items() if candidate.responses}

    def find(self, owner: str, response_id: str) -> StoredResponse:
        """Return a stored response. Raises Rejected (404) if it is not stored or belongs to another owner."""
        stored = self._responses_of(owner).responses.get(response_id)
        if stored is None or self._is_old(stored):
            hours = int(MAX_AGE_SECONDS // 3600)
            message = f"There is no response with this id: they are kept for {hours} hours, until the server stops."
            raise Rejected(404, message, "response_not_found")
        return stored

    def delete(self, owner: str, response_id: str) -> None:
        """Remove a response. Raises Rejected (404) as `find` does."""
        self.find(owner, response_id)
        self._responses_of(owner).remove(response_id)

    def item(self, owner: str, item_id: str) -> Item | None:
        """Return an item of an earlier response; None if it is not stored."""
        stored = self._responses_of(owner).by_item.get(item_id)
        return None if stored is None or self._is_old(stored) else msgspec.json.decode(stored.items[item_id])

    def _responses_of(self, owner: str) -> OwnerResponses:
        return self._by_owner.get(owner, OwnerResponses())

    def _is_old(self, stored: StoredResponse) -> bool:
        return stored.stored_at < self._clock() - MAX_AGE_SECONDS
