"""Connections of a group over TLS: who shows no certificate of the group's authority is refused by name."""

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.group import connection as connections
from jaxserve.group import job, settings
from jaxserve.group import leader as leader_module
from jaxserve.group.connection import PeerConnection, introduce, join_leader, open_connection
from jaxserve.group.leader import Leader
from jaxserve.group.messages import Beat, Facts, Joined
from jaxserve.group.secure_link import check_certificate
from jaxserve.group.settings import GroupConfig, GroupPlace
from tests.certificates import Authority, Pair
from tests.free_ports import free_ports


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The group's own."""
    return Authority(tmp_path_factory.mktemp("group") / "ca")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another one."""
    return Authority(tmp_path_factory.mktemp("stranger") / "other")


def place_of(rank: int, port: int, pair: Pair, authority: Authority, address: str = "127.0.0.1") -> GroupPlace:
    """A place in a group of two with certificates."""
    files = (str(pair.certificate), str(pair.key), str(authority.pair.certificate))
    return GroupPlace(address, port, 2, rank, b"s" * 32, 20.0, 30.0, *files)


class Joining:
    """A leader that waits for its follower on another thread."""

    def __init__(self, place: GroupPlace, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(leader_module, "join_job", lambda place: None)
        self.leader = Leader(place, lambda error: None)
        self.thread = threading.Thread(target=self.leader.join, daemon=True)
        self.thread.start()

    def end(self) -> None:
        """End it and its connections."""
        self.thread.join(20)
        self.leader.end()
        for member in self.leader.members:
            member.connection.close()


def test_messages_of_both_sides_cross(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones too, while the other thread waits for a message; nothing of them can be read on the way."""
    port = free_ports()
    joining = Joining(place_of(0, port, authority.sign("leader"), authority), monkeypatch)
    connection = join_leader(place_of(1, port, authority.sign("follower"), authority))
    assert isinstance(connection.receive(), Joined)
    text = "x" * (3 << 20)
    sending = [
        threading.Thread(target=lambda: [connection.send(Facts({"text": text})) for _ in range(4)]),
        threading.Thread(
            target=lambda: [joining.leader.members[0].connection.send(Facts({"text": text})) for _ in range(4)]
        ),
    ]
    for each in sending:
        each.start()
    for _ in range(4):
        while isinstance(found := connection.receive(), Beat):
            pass
        assert found == Facts({"text": text})
        assert joining.leader.members[0].inbox.get(timeout=20) == Facts({"text": text})
    for each in sending:
        each.join()
    connection.close()
    joining.end()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda own, other: (own.sign("late", days=-1), own), "certificate has expired"),
        (lambda own, other: (other.sign("foreign"), own), "unable to get local issuer certificate|self.signed"),
        (lambda own, other: (dataclasses.replace(own.sign("x"), key=other.sign("y").key), own), "key values mismatch"),
        (lambda own, other: (Pair(Path("/none"), own.sign("z").certificate), own), "/none: No such file or directory"),
    ],
)
def test_a_process_refuses_its_own_certificate_first(
    make: Callable[[Authority, Authority], tuple[Pair, Authority]],
    reason: str,
    authority: Authority,
    stranger: Authority,
) -> None:
    pair, trusted = make(authority, stranger)
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=f"group_certfile, group_keyfile, group_ca_certs: .*({reason})"):
            check_certificate(place_of(rank, 1, pair, trusted))


def test_the_certificate_of_process_0_is_for_its_address(authority: Authority) -> None:
    pair = authority.sign("here")
    for rank in (0, 1):
        check_certificate(place_of(rank, 1, pair, authority))
    check_certificate(place_of(1, 1, pair, authority, address="10.0.0.1"))
    with pytest.raises(ConfigError, match="IP address mismatch, certificate is not valid for '10.0.0.1'"):
        check_certificate(place_of(0, 1, pair, authority, address="10.0.0.1"))


def test_strangers_are_refused_by_name(
    authority: Authority, stranger: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without TLS, with another authority's certificate, and with an expired one; the group starts all the same."""
    port = free_ports()
    joining = Joining(place_of(0, port, authority.sign("leader"), authority), monkeypatch)
    good = place_of(1, port, authority.sign("follower"), authority)
    with pytest.raises(ConfigError, match=f"process 0 at 127.0.0.1:{port}: its certificate is not trusted: "):
        join_leader(place_of(1, port, stranger.sign("follower"), stranger))
    with monkeypatch.context() as patch:  # what a process would notice itself
        patch.setattr(connections, "check_certificate", lambda place: None)
        with pytest.raises(ConfigError, match=f"process 0 at 127.0.0.1:{port}: .*alert unknown ca"):
            join_leader(place_of(1, port, stranger.sign("foreign"), authority))
        with pytest.raises(ConfigError, match=f"process 0 at 127.0.0.1:{port}: .*alert certificate expired"):
            join_leader(place_of(1, port, authority.sign("late", days=-1), authority))
    plain = PeerConnection(socket.create_connection(("127.0.0.1", port), timeout=20))
    plain.send(Beat())
    with pytest.raises(OSError):
        introduce(plain, good)
    plain.close()
    connection = join_leader(good)
    assert isinstance(connection.receive(), Joined)
    for reason in ("self.signed|unable to get", "certificate has expired", "wrong version number|http request|record"):
        until_s = time.monotonic() + 20
        while not any(part in caplog.text for part in reason.replace("self.signed", "self-signed").split("|")):
            assert time.monotonic() < until_s, caplog.text
            time.sleep(0.05)
    connection.close()
    joining.end()


def test_a_follower_with_tls_meets_a_leader_without(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def challenge() -> None:
            link = listener.accept()[0]
            connection = PeerConnection(link)
            connection.send(Beat())
            link.recv(1000)
            connection.close()

        plain = threading.Thread(target=challenge)
        plain.start()
        place = place_of(1, listener.getsockname()[1], authority.sign("follower"), authority)
        with pytest.raises(ConfigError, match="wrong version number|record layer failure") as refused:
            join_leader(place)
        plain.join()
    setting = f"this process differs from process 0 in setting group_certfile: {place.certfile} instead of none"
    assert setting in str(refused.value)


@pytest.mark.parametrize("has_leader_tls", [False, True])
def test_both_sides_name_the_setting_that_one_has(
    has_leader_tls: bool, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process ends at once, and the log of process 0 says what it waits for."""
    monkeypatch.setattr(connections, "_FIRST_WORD_S", 0.2)
    port = free_ports()
    places = [place_of(rank, port, authority.sign(f"side{rank}"), authority) for rank in (0, 1)]
    plain = 1 if has_leader_tls else 0
    places[plain] = dataclasses.replace(places[plain], certfile=None, keyfile=None, ca_certs=None)
    joining = Joining(places[0], monkeypatch)
    values = "none instead of a file" if has_leader_tls else f"{places[1].certfile} instead of none"
    with pytest.raises(ConfigError, match=f"in setting group_certfile: {values}"):
        join_leader(places[1])
    values = values if has_leader_tls else "a file instead of none"
    until_s = time.monotonic() + 20
    while f"in setting group_certfile: {values}" not in caplog.text:
        assert time.monotonic() < until_s, caplog.text
        time.sleep(0.02)
    connection = join_leader(dataclasses.replace(places[0], rank=1))
    connection.close()
    joining.end()


def test_a_socket_is_closed_when_tls_fails(authority: Authority) -> None:
    here, there = socket.socketpair()
    there.close()
    with pytest.raises(OSError):
        open_connection(here, place_of(0, 1, authority.sign("leader"), authority), is_leader=True)
    assert here.fileno() == -1


REMOTE: dict[str, Any] = {
    "nnodes": 2,
    "node_rank": 0,
    "master_addr": "10.0.0.1",
    "master_port": 4321,
    "group_secret_file": "secret",
    "group_certfile": "c",
    "group_keyfile": "k",
    "group_ca_certs": "a",
}


def test_certificates_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX must encrypt its own connections too where other machines can reach them."""
    with pytest.raises(ConfigError, match="group_certfile, group_keyfile and group_ca_certs go together"):
        GroupConfig.from_arguments({**REMOTE, "group_keyfile": None}, is_insecure=False)
    for has_mtls in (False, True):
        monkeypatch.setattr(settings, "jax_has_mtls", lambda has_mtls=has_mtls: has_mtls)
        GroupConfig.from_arguments(REMOTE, is_insecure=True)
        GroupConfig.from_arguments({**REMOTE, "master_addr": "127.0.0.1"}, is_insecure=False)
        if has_mtls:
            GroupConfig.from_arguments(REMOTE, is_insecure=False)
        else:
            with pytest.raises(
                ConfigError, match=r"JAX \S+ does not encrypt its own connections, as 0.11.2 does: set ins"
            ):
                GroupConfig.from_arguments(REMOTE, is_insecure=False)


def test_jax_gets_the_same_certificates(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(1, 1, authority.sign("follower"), authority)
    monkeypatch.setattr(job, "jax_has_mtls", lambda: True)
    assert job._certificates(place) == {
        "mtls_cert_file": place.certfile,
        "mtls_key_file": place.keyfile,
        "mtls_ca_file": place.ca_certs,
        "verify_secure_credentials": True,
    }
    monkeypatch.setattr(job, "jax_has_mtls", lambda: False)
    assert job._certificates(place) == {}
    assert job._certificates(dataclasses.replace(place, certfile=None)) == {}
