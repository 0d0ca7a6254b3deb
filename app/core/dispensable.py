"""Parts that a request can do without: the prefix cache, its record, what is measured."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Dispensable:
    """Keeps the faults of one part from what it serves: each kind is logged once."""

    def __init__(self, name: str, logger: logging.Logger) -> None:
        self._name = name
        self.logger = logger
        self._logged: set[type[Exception]] = set()

    @contextmanager
    def guarded(
        self, undo: Callable[[], None] | None = None, is_vital: Callable[[Exception], bool] = lambda _: False
    ) -> Iterator[None]:
        """Suppress and log an error in the block, and then `undo` what it may have left half done, guarded too.
        Execution continues after the block. An error that `is_vital` is raised again."""
        try:
            yield
        except Exception as error:
            if is_vital(error):
                raise
            if undo is not None:
                with self.guarded():
                    undo()
            if type(error) not in self._logged:
                self._logged.add(type(error))
                self.logger.exception("%s failed; requests go on without it", self._name)
