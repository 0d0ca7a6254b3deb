"""Work of several owners, who take turns, so that a busy owner delays and fills only its own queue."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from app.core.errors import QueueFull

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")


class Turns(Generic[Key, Item]):
    """FIFO queue per owner, round-robin between owners. Removing an item never reorders the others."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[Key, Item]] = {}
        """Non-empty queues by owner, in the order of their turns."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, key: Key) -> bool:
        return any(key in queue for queue in self._queues.values())

    def waiting(self, owner: str) -> int:
        """Return the number of items of one owner."""
        return len(self._queues.get(owner, ()))

    def append(self, owner: str, key: Key, item: Item) -> None:
        """Append to the owner's queue."""
        self._queues.setdefault(owner, {})[key] = item

    def put_back(self, owner: str, key: Key, item: Item) -> None:
        """Put an item back at the head of the queue, before all others: it has been taken before."""
        self._queues = {owner: {key: item, **self._queues.pop(owner, {})}, **self._queues}

    def head(self) -> Item | None:
        """Return the next item, without removing it."""
        return next((item for queue in self._queues.values() for item in queue.values()), None)

    def take(self) -> Item | None:
        """Remove and return the next item; its owner's next turn is after those of all other owners."""
        for owner, queue in self._queues.items():
            item = queue.pop(next(iter(queue)))
            del self._queues[owner]
            if queue:
                self._queues[owner] = queue
            return item
        return None

    def remove(self, key: Key) -> Item | None:
        """Remove and return one item, wherever it is in the queue; None if it is not waiting."""
        for owner, queue in self._queues.items():
            if key in queue:
                item = queue.pop(key)
                if not queue:
                    del self._queues[owner]
                return item
        return None


class Backlog:
    """Counts the work of each owner that has not been done, and limits its number and its size in bytes."""

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._counts: Counter[str] = Counter()
        self._nbytes: Counter[str] = Counter()

    def enter(self, owner: str, nbytes: int) -> None:
        """Count work of `nbytes` bytes until `leave`. Raises `QueueFull` above a limit; one piece may have any size."""
        count = self._counts[owner]
        if count >= self._limit or (count and self._nbytes[owner] + nbytes > self._limit_bytes):
            raise QueueFull("Too many of your requests wait to be read; try again.", retry_after_seconds=1)
        self._counts[owner] += 1
        self._nbytes[owner] += nbytes

    def leave(self, owner: str, nbytes: int) -> None:
        """Count work as done."""
        self._counts[owner] -= 1
        self._nbytes[owner] -= nbytes
        if not self._counts[owner]:
            del self._counts[owner], self._nbytes[owner]


class SharedThread:
    """One thread that runs functions for several owners. `after` gets the seconds that each one took, in the thread."""

    def __init__(self, name: str, after: Callable[[float], None] = lambda _seconds: None) -> None:
        self._after = after
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._turns: Turns[Future[Any], tuple[Future[Any], Callable[[], Any]]] = Turns()

    def submit(self, owner: str, function: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        """Run `function` at a turn of its owner; cancelling the future has an effect only before that."""
        future: Future[Result] = Future()
        with self._lock:
            self._turns.append(owner, future, (future, partial(function, *arguments)))
        future.add_done_callback(self._forget)
        self._thread.submit(self._run_next)
        return future

    def close(self) -> None:
        """Cancel what waits, without waiting for what runs."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        while waiting := self._take():
            waiting[0].cancel()

    def _take(self) -> "tuple[Future[Any], Callable[[], Any]] | None":
        with self._lock:
            return self._turns.take()

    def _forget(self, future: "Future[Any]") -> None:
        with self._lock:
            self._turns.remove(future)

    def _run_next(self) -> None:
        taken = self._take()
        if taken is None or not taken[0].set_running_or_notify_cancel():
            return  # cancelled before its turn
        future, function = taken
        began = time.perf_counter()
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            future.set_exception(error)
        self._after(time.perf_counter() - began)
