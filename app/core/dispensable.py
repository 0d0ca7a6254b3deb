"""Parts that a request can do without: the prefix cache, and the journal of requests."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Dispensable:
    """Isolates requests from the errors of one part; each type of error is logged once."""

    def __init__(self, name: str, logger: logging.Logger) -> None:
        self._name = name
        self.logger = logger
        self._logged: set[type[Exception]] = set()

    @contextmanager
    def guarded(
        self, undo: Callable[[], None] | None = None, is_vital: Callable[[Exception], bool] = lambda _: False
    ) -> Iterator[None]:
        """Suppress an error in the block: call `undo` (guarded too) to revert what is half done, then log the error.
        Execution continues after the block. An error for which `is_vital` is true is raised again."""
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
                self.logger.exception("%s failed; requests continue without it", self._name)
