"""Ports for tests that start processes one by one."""

import contextlib
import random
import socket


def free_ports() -> int:
    """The first of two ports that are free, and that the system gives to no other process's connection."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000, 2)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            with socket.create_server(("127.0.0.1", port + 1)):
                return port
