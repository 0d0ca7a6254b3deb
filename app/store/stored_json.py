"""JSON as the store keeps it: what a value of a JSON column may be, for everybody who writes, reads or checks one."""

from typing import Any

import msgspec


def written(value: Any) -> str:
    """The text of a value; NaN becomes null. Raises `TypeError` or `ValueError` for what is no JSON."""
    return msgspec.json.encode(value).decode()


def read(stored: str | bytes | float, kind: Any = Any) -> Any:
    """The value of a text, or of the number that SQLite makes of one. Raises `ValueError` unless it is of `kind`."""
    try:
        value = msgspec.json.decode(stored if isinstance(stored, str | bytes) else repr(stored), type=kind)
        msgspec.json.encode(value)  # no answer could carry a number of more than 64 bits
    except (OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return value
