"""Ports that a launcher keeps for its group until the group listens at them."""

import socket
from collections.abc import Iterator

import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.group import ports
from jaxserve.group.connection import check_free, listen
from jaxserve.group.ports import LOOPBACK, PortPair


@pytest.fixture
def pair() -> Iterator[PortPair]:
    """Ports that are kept."""
    found = PortPair()
    yield found
    found.close()


def test_a_group_listens_at_ports_that_are_kept_for_it(pair: PortPair) -> None:
    check_free(LOOPBACK, pair.first + 1)
    with listen(LOOPBACK, pair.first), listen(LOOPBACK, pair.first + 1):
        socket.create_connection((LOOPBACK, pair.first)).close()
        with pytest.raises(ConfigError, match="cannot listen"):
            listen(LOOPBACK, pair.first)
    with listen(LOOPBACK, pair.first):  # started again
        pass


def test_nobody_else_is_given_a_port_that_is_kept(pair: PortPair) -> None:
    for port in (pair.first, pair.first + 1):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, port))


def test_no_pair_takes_a_port_of_another(pair: PortPair, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter((pair.first - 1, pair.first, pair.first + 1))
    bound = ports._bound
    monkeypatch.setattr(ports, "_bound", lambda family, address, port: bound(family, address, port or next(given)))
    monkeypatch.setattr(ports, "_TRIES", 1)
    with pytest.raises(ConfigError, match=r"no two consecutive ports are free at 127\.0\.0\.1"):
        PortPair()
