"""JSON in the store: what a value of a JSON column may be, wherever one is written, read or checked."""

from typing import Any

import msgspec


def encode(value: Any) -> str:
    """Encode a value as text; NaN becomes null. Raises `TypeError` or `ValueError` for what is not JSON."""
    return msgspec.json.encode(value).decode()


def decode(stored: str | bytes | float, kind: Any = Any) -> Any:
    """Decode a text, or the number that SQLite makes of one. Raises `ValueError` unless its value is of `kind`."""
    try:
        value = msgspec.json.decode(stored if isinstance(stored, str | bytes) else repr(stored), type=kind)
        msgspec.json.encode(value)  # no response could carry a number of more than 64 bits
    except (OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return value
