"""Sizes in bytes as people write them."""

import re
from decimal import Decimal

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def size_text(count: int) -> str:
    """A size as people write it, exact: `parse_size` reads the same number again."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= scale and count * 1000 % scale == 0:
            return f"{Decimal(count) / scale} {unit}"
    return str(count)


def parse_size(text: str) -> int:
    """Bytes in "12G", "1.5 GiB", "800MB" or "1000000"; K, M, G, T are powers of 1000 unless an i follows.

    Raises ValueError when the text is no positive size.
    """
    match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([KMGT]?I?)B?", text.strip().upper())
    scale = {**_UNITS, **_BINARY_UNITS}.get(match[2]) if match else None
    if match is None or scale is None or not (size := int(Decimal(match[1]) * scale)):
        raise ValueError(f"{text!r} is not a size: write bytes, or for example 12G")
    return size
