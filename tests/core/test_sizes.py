"""Sizes as people write them."""

import pytest

from app.core.sizes import parse_size


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
