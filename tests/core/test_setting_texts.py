"""Sizes as people write them."""

import pytest

from app.core.setting_texts import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12G", 12 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("800mb", 800 * 10**6),
        ("1000000", 10**6),
        ("2K", 2000),
        ("1T", 10**12),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "12 parsecs", "1e9", "nan", "0.1", "1I", "12GG"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (10**12, "1 TB"),
        (1_500_000_000, "1.5 GB"),
        (1_234_567_000_000, "1234.567 GB"),
        (24 << 30, "25769803776"),
        (7, "7"),
    ],
)
def test_a_size_is_told_as_people_write_it_and_loses_no_byte(size: int, text: str) -> None:
    assert size_text(size) == text
    assert parse_size(text) == size
