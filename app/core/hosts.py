"""Names and addresses of hosts, as a Host header and a setting have them."""

import ipaddress
import re

NAME = re.compile(r"\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}")

ORIGIN = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://(?:{NAME.pattern})(?::[0-9]{{1,5}})?")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_of(host: str) -> tuple[str, ...]:
    """What a Host header may call a server on `host`; nothing is known about one that listens everywhere."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return (host.lower(),)
    if address.is_unspecified:
        return ()
    return (f"[{address}]" if address.version == 6 else str(address),)
