"""Sockets between processes buffer more than the system's default, so that a writer need not wait for its reader."""

import contextlib
import socket

from app.machine.descriptors import socket_pair

EVENT = bytes(140)
"""Bytes of about the size of one step's event."""


def events_held(ends: tuple[socket.socket, socket.socket]) -> int:
    """Return how many events one end accepts while nobody reads at the other."""
    writer, reader = ends
    with writer, reader, contextlib.suppress(BlockingIOError):
        writer.setblocking(False)
        count = 0
        while True:
            writer.send(EVENT)
            count += 1
    return count


def test_a_pair_of_sockets_holds_more_events_than_one_of_the_system() -> None:
    assert events_held(socket_pair()) > 1.5 * events_held(socket.socketpair())


def test_where_the_system_gives_8_kib_both_ends_get_more() -> None:
    small = socket.socketpair()
    for end in small:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 8192)
    assert events_held(socket_pair()) > 10 * events_held(small)
