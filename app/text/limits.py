"""What one rendering of an untrusted template may cost: seconds, characters, and the size of any value on the way.

There is no safe way to interrupt a native call from another thread, so nothing large is ever begun: every operation
that can multiply its input is weighed first (string and list products, joins, replacements, formats), every loop turn
and call looks at the clock, and a container is counted with everything in it, each time it occurs.
"""

import re
import time
from collections.abc import Callable, Iterable, MappingView
from typing import Any

from jinja2 import TemplateRuntimeError

from app.core.ports import Clock

MAX_SECONDS = 5.0
MAX_CHARACTERS = 16 * 1024 * 1024
MAX_RANGE = 10_000
MAX_NUMBER_BITS = 4096
WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-#0 +_^]*(\d{4}|\*|\d*\.(\d{4}|\*))")
WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")
"""Format fields of 1,000 characters and more, or of a width that is itself a value."""


class LimitExceeded(TemplateRuntimeError):
    """The template took too long or made too much."""


class Meter:
    """The budget of one rendering. Sizes are characters; a list or an object weighs 1 and its content."""

    def __init__(
        self, *, seconds: float = MAX_SECONDS, characters: int = MAX_CHARACTERS, clock: Clock = time.monotonic
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._deadline = clock() + seconds
        self._characters = characters
        self._written = 0
        self._weights: dict[int, tuple[Any, int]] = {}

    def tick(self) -> None:
        """Raise `LimitExceeded` when the time is over."""
        if self._clock() > self._deadline:
            raise LimitExceeded(f"it took longer than {self._seconds:g} s")

    def write(self, characters: int) -> None:
        """Charge output, text that a macro or a block keeps included (so four times the largest value is allowed)."""
        self._written += characters
        if self._written > 4 * self._characters:
            raise LimitExceeded(f"it writes more than {4 * self._characters} characters")

    def allow(self, size: int) -> None:
        """Raise `LimitExceeded` when a value of `size` would be too large to make."""
        if size > self._characters:
            raise LimitExceeded(f"it makes a value of more than {self._characters} characters")

    def weigh(self, value: Any) -> int:
        """The size of `value` written out; containers are remembered, for in this sandbox they never change."""
        if isinstance(value, str):
            weight = len(value)
        elif isinstance(value, int):
            weight = 1 + value.bit_length() // 3
        elif isinstance(value, dict | list | tuple | set | frozenset | MappingView):
            weight = self._weigh_container(value)
        else:
            weight = 1
        self.allow(weight)
        return weight

    def _weigh_container(self, value: Any) -> int:
        known = self._weights.get(id(value))
        if known is None:
            weight = 1
            for part in (part for pair in value.items() for part in pair) if isinstance(value, dict) else value:
                weight += 1 + self.weigh(part)
                self.allow(weight)
            known = self._weights[id(value)] = (value, weight)
        return known[1]


def multiply(meter: Meter, left: Any, right: Any) -> Any:
    """`left * right`, of numbers or of a sequence and a number."""
    for sequence, number in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(number, int):
            meter.allow(meter.weigh(sequence) * max(number, 0))
    _allow_number(left, right, lambda first, second: first + second)
    return left * right


def power(_meter: Meter, left: Any, right: Any) -> Any:
    """`left ** right`."""
    if isinstance(right, int):
        _allow_number(left, left, lambda first, _: first * abs(right))
    return left**right


def modulo(meter: Meter, left: Any, right: Any) -> Any:
    """`left % right`: a remainder, or a string format with narrow fields."""
    if isinstance(left, str):
        allow_format(meter, left, "%", (right,))
    return left % right


def allow_format(meter: Meter, pattern: str, sign: str, values: Iterable[Any]) -> None:
    """Raise when `pattern` with its fields (each begun by `sign`) filled from `values` could become too large."""
    if WIDE_PERCENT.search(pattern) if sign == "%" else WIDE_BRACES.search(pattern):
        raise LimitExceeded("it formats text with a wide or a variable field")
    widest = max((meter.weigh(value) for value in values), default=0)
    meter.allow(len(pattern) + pattern.count(sign) * (widest + 1000))


def replace(meter: Meter, text: str, old: Any, new: Any, count: int | None = None) -> str:
    """`text.replace(old, new, count)`."""
    old, new = str(old), str(new)
    times = text.count(old) if count is None or count < 0 else count
    meter.allow(len(text) + min(times, len(text) + 1) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def join(meter: Meter, separator: Any, parts: Iterable[Any]) -> str:
    """`separator.join(parts)`; parts that are no strings are written out."""
    found = list(parts)
    between = str(separator)
    meter.allow(len(between) * len(found) + sum(meter.weigh(part) for part in found))
    return between.join(str(part) for part in found)


def limited_range(*bounds: int) -> range:
    """`range` of at most 10,000 numbers."""
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise LimitExceeded(f"it counts further than {MAX_RANGE}")
    return numbers


def _allow_number(left: Any, right: Any, bits: Callable[[int, int], int]) -> None:
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and bits(left.bit_length(), right.bit_length()) > MAX_NUMBER_BITS
    ):
        raise LimitExceeded(f"it makes a number of more than {MAX_NUMBER_BITS} bits")
