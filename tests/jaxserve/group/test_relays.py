"""Groups of many processes: some pass on to the others what process 0 sends to all."""

import contextlib
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.client import AdminClient
from jaxserve.group import relays
from jaxserve.group.leader import Leader
from jaxserve.group.messages import Addresses, Agreed, End, Joined, Launch, Listening, Reset
from jaxserve.group.relays import NUM_RELAYS, Relay, direct_receivers, has_relays, relay_partners
from tests.faults.conftest import faulty_environment
from tests.faults.injected.sitecustomize import ONE_RELAY
from tests.free_ports import free_ports
from tests.group_server import answers, assert_gone, assert_same, expected_answers, family, follower_pid, kill, post
from tests.group_server import running_group as started_group
from tests.jaxserve.group.test_leader import FakeFollower, joining, place_of
from tests.server_process import PROGRAMS_CACHE

LARGE: Sequence[int] = (18, 19, 33, 34, 64, 273, 600)


@pytest.mark.parametrize("count", (2, 17, *LARGE))
def test_everyone_is_reached_once(count: int) -> None:
    """By process 0 or by one that it sends to, which agrees about that; the parts differ by one at most."""
    assert has_relays(count) == (count in LARGE)
    direct = direct_receivers(range(1, count))
    passed_on = {rank: [*relay_partners(rank, count)] for rank in direct}
    assert sorted([*direct, *(each for part in passed_on.values() for each in part)]) == [*range(1, count)]
    for rank, part in passed_on.items():
        assert all(relay_partners(each, count) == [rank] for each in part)
    sizes = {len(part) for part in passed_on.values()}
    assert max(sizes) - min(sizes) <= 1 and (count > 273 or max(sizes) <= NUM_RELAYS)


class Passing:
    """The parts of all followers of a group, connected to each other."""

    def __init__(self, count: int):
        self.taken = [queue.SimpleQueue[Any]() for _ in range(count)]
        self.failures = queue.SimpleQueue[BaseException]()
        ranks, host = range(1, count), "127.0.0.1"
        self.relays = {
            rank: Relay(place_of(rank, 1, count), host, self.taken[rank].put, self.failures.put) for rank in ranks
        }
        addresses = Addresses([host] * count, [1, *(self.relays[rank].address.port for rank in ranks)])
        with ThreadPoolExecutor(count) as pool:
            for connected in [pool.submit(relay.connect, addresses) for relay in self.relays.values()]:
                connected.result()

    def end(self, rank: int) -> None:
        """Close the connections of a rank."""
        for connection in self.relays[rank].connections:
            connection.close()


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passing]:
    """Two relays: ranks 3 and 5 get what rank 1 passes on, and rank 4 what rank 2 does."""
    monkeypatch.setattr(relays, "NUM_RELAYS", 2)
    monkeypatch.setattr(relays, "_FAREWELL_S", 0.0)
    made = Passing(6)
    yield made
    for rank in made.relays:
        made.end(rank)


def test_messages_are_passed_on_in_order(passing: Passing) -> None:
    messages = [Launch(0, b"x" * 100_000), Reset(), Launch(1, b"y"), Launch(2, b"")]
    for message in messages:
        passing.relays[1].pass_on(message)
    passing.relays[2].pass_on(Reset(1))
    passing.relays[3].pass_on(Reset(2))  # nobody gets it from there
    for rank in (3, 5):
        assert [passing.taken[rank].get(timeout=20) for _ in messages] == messages
    assert passing.taken[4].get(timeout=20) == Reset(1)
    assert all(each.empty() for each in passing.taken) and passing.failures.empty()


def test_the_end_of_a_receiver_is_no_concern_of_the_others(passing: Passing) -> None:
    passing.end(3)
    for number in range(50):
        passing.relays[1].pass_on(Launch(number, b""))
    assert [passing.taken[5].get(timeout=20).number for _ in range(50)] == [*range(50)]


def test_the_end_of_a_relay_is_an_error_of_its_receivers(passing: Passing) -> None:
    passing.end(2)
    assert "rank 2, which passes on what process 0 sends, has ended" in str(passing.failures.get(timeout=20))


def test_process_0_sends_steps_to_relays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each follower hears of signs of life, ends and its own matters from process 0 itself."""
    monkeypatch.setattr(relays, "NUM_RELAYS", 1)
    monkeypatch.setattr("jaxserve.group.leader._END_S", 0.2)
    port, lost = free_ports(), queue.SimpleQueue[Any]()
    leader = Leader(place_of(0, port, 4), lost.put)
    done = joining(leader)
    with contextlib.ExitStack() as stack:
        followers = [stack.enter_context(FakeFollower(place_of(rank, port, 4))) for rank in (1, 2, 3)]
        for rank, follower in enumerate(followers, 1):
            follower.expect(Joined)
            follower.connection.send(Listening("10.0.0.1", rank))
        for follower in followers:
            addresses = follower.expect(Addresses)
            assert addresses == Addresses(["127.0.0.1", *["10.0.0.1"] * 3], [port, 1, 2, 3])
        assert done.get(timeout=20) is None
        for message in (Agreed({}), Launch(0, b"plans")):
            leader.send_all(message)
            assert followers[0].expect(type(message)) == message
        leader.end()
        for follower in followers:
            assert follower.expect(End) == End("")


@pytest.mark.slow
def test_a_group_with_a_relay(tmp_path: Path) -> None:
    """Four processes, of which two get the steps from the first follower: the tokens of one; a lost relay ends all."""
    (tmp_path / ONE_RELAY).touch()
    flags = ("--mesh", "stage=2,tensor=2", "--dtype", "float32")
    with started_group(*flags, nproc=4, environment=faulty_environment(tmp_path)) as server:
        found = answers(server)
        with AdminClient(server.admin) as admin:
            sent = {each.rank: each.num_sent_bytes for each in admin.load().ranks}
        assert sent[1] > 4 * sent[2] and sent[1] > 4 * sent[3]
        processes = family(server.process.pid)
        kill(follower_pid(server, 1))
        status, response = post(server, "/v1/completions", {"prompt": "12+30=", "max_tokens": 8})
        assert status == 503 and "rank 1 of its processes ended" in response["error"]["message"]
        assert_gone(processes[1:], within_s=20.0)
        assert server.wait() == 70
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    with LLM("demo", mesh=flags[1], dtype=flags[3], compilation_cache_dir=str(PROGRAMS_CACHE), **settings) as llm:
        assert_same(found, expected_answers(llm))
