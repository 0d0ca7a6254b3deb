"""Settings as people write them: in an environment variable, at the terminal or in a form field.

`to_json_value` turns a value into JSON; each other converter parses text and returns any other value unchanged. Sizes
are in bytes.
"""

import ipaddress
import json
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

UNSPECIFIED_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - addresses to compare with, not to bind


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNIT_NAMES = ("B", "kB", "MB", "GB", "TB")
_BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def size_text(count: int) -> str:
    """Format a size as people write it, exactly: `parse_size` returns the same number."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= scale and count * 1000 % scale == 0:
            return f"{Decimal(count) / scale} {unit}"
    return str(count)


def bytes_text(size: float) -> str:
    """Format bytes: 1536000 -> "1.5 MB"; decimal units, as disks and models are sold."""
    power = 0
    while size >= 1000 and power < len(_UNIT_NAMES) - 1:
        size /= 1000
        power += 1
    return f"{size:.0f} {_UNIT_NAMES[power]}" if power == 0 or size >= 100 else f"{size:.1f} {_UNIT_NAMES[power]}"


def parse_size(text: str) -> int:
    """Return the bytes in "12G", "1.5 GiB", "800MB" or "1000000"; K, M, G, T are powers of 1000 unless an i follows.

    Raises ValueError unless the text is a positive size.
    """
    match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([KMGT]?I?)B?", text.strip().upper())
    scale = {**_UNITS, **_BINARY_UNITS}.get(match[2]) if match else None
    if match is None or scale is None or not (size := int(Decimal(match[1]) * scale)):
        raise ValueError(f"{text!r} is not a size: write bytes, or for example 12G")
    return size


HOST_NAME = re.compile(r"\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}")

ORIGIN = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://(?:{HOST_NAME.pattern})(?::[0-9]{{1,5}})?")


def parse_optional_size(value: object) -> object:
    if not isinstance(value, str) or not value:
        return value or None
    return parse_size(value)


def parse_folders(value: object) -> object:
    parts = value.split(os.pathsep) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return tuple(absolute_path(part) if isinstance(part, str) else part for part in parts if part)


def parse_folder(value: object) -> object:
    return absolute_path(value) if isinstance(value, str) and value else value or None


def absolute_path(text: str) -> Path:
    """Return an absolute path, because the worker and downloads run in other folders than the user's current one."""
    if "\0" in text:
        raise ValueError("a folder name cannot contain a NUL character")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError("there is no such user: give the whole path, beginning with /") from None


def parse_names(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(part.strip().lower() for part in value.split(",") if part.strip())


def parse_pairs(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError('this is not valid JSON: give an object like {"main": "draft"}') from None
    entries = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not (main.strip() and equals and draft.strip()) for main, equals, draft in entries):
        raise ValueError('give pairs like "main=draft,other=off", or a JSON object')
    return {main.strip(): draft.strip() for main, _, draft in entries}


def none_if_empty(value: object) -> object:
    return None if value == "" else value


def to_json_value(value: Any) -> Any:
    """Return the value of a setting as plain JSON; a secret becomes the text `set`."""
    if hasattr(value, "get_secret_value"):
        return "set"
    if isinstance(value, tuple):
        return [to_json_value(entry) for entry in value]
    converted = msgspec.to_builtins(value, enc_hook=str)
    return (
        {name: entry for name, entry in converted.items() if entry not in {None, ""}}
        if isinstance(converted, dict)
        else converted
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def client_host(host: str) -> str:
    """Return the address at which a client on this computer reaches a server that listens on `host`."""
    return UNSPECIFIED_ADDRESSES.get(host, host)


def local_url(host: str, port: int) -> str:
    """Return the URL, without a path, at which a client on this computer reaches a server on `host` and `port`."""
    host = client_host(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def host_names(host: str) -> tuple[str, ...]:
    """Return the names that a Host header may have for a server on `host`; empty if it listens on all addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return (host.lower(),)
    if address.is_unspecified:
        return ()
    return (f"[{address}]" if address.version == 6 else str(address),)
