"""The port of a server that is not running: whether another program uses it, which program, and which port is free."""

import contextlib
import errno
import socket
from typing import NamedTuple

import psutil

from app.command.server import peek_settings
from app.settings import Settings

LAST_PORT = 65535


class PortConflict(NamedTuple):
    """A port that another program uses: its name and process id as in `port_owner`, and the next free port or 0."""

    port: int
    name: str
    pid: int
    free_port: int


def port_conflict(settings: Settings) -> PortConflict | None:
    """Return the conflict that keeps a server with these settings from its port; None if no program uses the port."""
    settings = peek_settings(settings) or settings
    host, port = settings.host, settings.port
    error = bind_error(host, port)
    if error is None or error.errno != errno.EADDRINUSE:
        return None
    free_ports = (other for other in range(port + 1, LAST_PORT + 1) if bind_error(host, other) is None)
    return PortConflict(port, *port_owner(port), next(free_ports, 0))


def bind_error(host: str, port: int) -> OSError | None:
    """Return the error that keeps a server from listening on the port; None if it can listen."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def port_owner(port: int) -> tuple[str, int]:
    """Return name and id of the process that listens on a port; "" and 0 if the system does not reveal the process."""
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            connections = process.net_connections(kind="tcp")
            if any(held.status == psutil.CONN_LISTEN and held.laddr.port == port for held in connections):
                return str(process.info["name"]), process.pid
    return "", 0
