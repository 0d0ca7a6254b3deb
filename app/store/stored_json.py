"""JSON in the store: the one codec for values of JSON columns, wherever they are written, read or checked."""

from typing import Any

import msgspec


def encode(value: Any) -> str:
    """Encode a value as text; NaN becomes null. Raises `TypeError` or `ValueError` for a value that is not JSON."""
    return msgspec.json.encode(value).decode()


def decode(stored: str | bytes | float, kind: Any = Any) -> Any:
    """Decode a JSON text, or the number that SQLite made of it. Raises `ValueError` unless the value is of `kind`."""
    try:
        value = msgspec.json.decode(stored if isinstance(stored, str | bytes) else repr(stored), type=kind)
        msgspec.json.encode(value)  # fails for integers of over 64 bits, which no response can contain
    except (OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return value
