"""Ports for the servers that tests start."""

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Returns ports of the loopback on which nothing listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [unused.getsockname()[1] for unused in sockets]
