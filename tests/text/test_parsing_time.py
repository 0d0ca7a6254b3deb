"""What a model writes, or a grammar makes it write, is read in a time that does not grow with the square of it."""

import time
from collections.abc import Callable

import pytest

from app.text.answer.calls import MOST_TRIES, parse_python_calls
from app.text.harmony import HEADER

TOOLS = {"f": {"a": {}, "b": {}}}


@pytest.mark.parametrize(
    ("read", "least", "repeated"),
    [
        (lambda text: HEADER.match(text + "<x", partial=True), "<|channel|> a ", "to="),
        (lambda text: parse_python_calls(text + ")]", TOOLS), "[f(a=(1", ", b=x"),
    ],
    ids=["header", "python"],
)
def test_a_text_eight_times_as_long_takes_no_more_than_sixteen_times_as_long(
    read: Callable[[str], object], least: str, repeated: str
) -> None:
    def seconds(count: int) -> float:
        began = time.thread_time()
        assert not read(least + count * repeated)
        return time.thread_time() - began

    assert seconds(4_000) < 16 * max(seconds(500), 0.001)


def test_a_value_with_many_ends_that_are_none_is_still_read() -> None:
    value = ", b=".join("x" for _ in range(MOST_TRIES - 1))
    (call,) = parse_python_calls(f"[f(a=[1, '{value}'])]", TOOLS)
    assert call.name == "f"
