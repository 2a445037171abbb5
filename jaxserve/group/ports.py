"""Ports of a group on this machine, which no other process is given before the group listens at them."""

import contextlib
import socket
from typing import final

from jaxserve.api.errors import ConfigError

LOOPBACK = "127.0.0.1"
"""Address of processes that are all on this machine."""
_TRIES = 100


@final
class PortPair:
    """Two consecutive ports that are kept until ``close``: for process 0 of a group, and for JAX's coordinator.

    A socket is bound to each. The system then gives neither port to a process that asks for any port; only one that
    names the port and sets SO_REUSEADDR can listen at it, as process 0 and the coordinator do.

    Args:
        address: An address of this machine.

    Attributes:
        first: The first port.

    Raises:
        ConfigError: No two consecutive ports are free.
    """

    def __init__(self, address: str = LOOPBACK):
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        for _ in range(_TRIES):
            with contextlib.ExitStack() as stack:
                first = stack.enter_context(_bound(family, address, 0))
                self.first: int = first.getsockname()[1]
                try:
                    second = stack.enter_context(_bound(family, address, self.first + 1))
                except (OSError, OverflowError):
                    continue
                for each in (first, second):  # not before: it would be bound beside another pair
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._sockets = stack.pop_all()
                return
        raise ConfigError(f"no two consecutive ports are free at {address}")

    def close(self) -> None:
        """Give the ports back; those that listen at them go on."""
        self._sockets.close()


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.bind((address, port))
    except BaseException:
        made.close()
        raise
    return made
