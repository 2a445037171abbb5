"""Pipeline stages of several processes: who has which, what they send each other, and what process 0 makes of it."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.api.errors import ConfigError, EngineDeadError
from jaxserve.device.runner_interface import RowError, StepResult
from jaxserve.group.leader import Leader
from jaxserve.group.members import Member
from jaxserve.group.messages import Addresses, Results
from jaxserve.group.own_part import OwnPart
from jaxserve.group.peers import Peers
from jaxserve.group.results import decode_results, encode_results, merged
from jaxserve.group.settings import GroupPlace
from jaxserve.group.stage_ranks import StageRanks, all_partners, slice_ranks
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.plan import StepPlan


def place(rank: int, count: int = 2, secret: bytes = b"s" * 32) -> GroupPlace:
    """A place in a group on this machine."""
    return GroupPlace("127.0.0.1", 1, count, rank, secret, join_timeout=2.0, step_timeout=30.0)


@contextlib.contextmanager
def connected(*places: GroupPlace, on_failure: Callable[[BaseException], object] = print) -> Iterator[list[Peers]]:
    """All processes, each connected to all others."""
    peers = [Peers(each, "127.0.0.1", on_failure) for each in places]
    addresses = Addresses([each.address.host for each in peers], [each.address.port for each in peers])
    with ThreadPoolExecutor() as pool:
        others = [[rank for rank in range(len(peers)) if rank != own] for own in range(len(peers))]
        list(pool.map(lambda each, ranks: each.connect(addresses, ranks), peers, others))
    yield peers
    for each in peers:
        each.close()


def numbers(*parts: bytes) -> list[list[int]]:
    """The numbers of shards."""
    return [np.frombuffer(part, np.int32).tolist() for part in parts]


def arrays(*values: int) -> list[jax.Array]:
    """A shard for each value."""
    return [jnp.full(2, value, jnp.int32) for value in values]


def test_shards_come_in_order_by_rank_and_channel() -> None:
    with connected(*(place(rank, 3) for rank in range(3))) as (zero, one, two):
        zero.send(1, 0, arrays(1, 2))
        zero.send(1, 1, arrays(3))
        zero.send(1, 0, arrays(4))
        two.send(1, 0, arrays(5))
        one.send(0, 0, arrays(6))
        assert numbers(*one.receive(2, 0)) == [[5, 5]]
        assert numbers(*one.receive(0, 1)) == [[3, 3]]
        assert numbers(*one.receive(0, 0)) == [[1, 1], [2, 2]]
        assert numbers(*one.receive(0, 0)) == [[4, 4]]
        assert numbers(*zero.receive(1, 0)) == [[6, 6]]


def test_what_was_sent_before_a_reset_is_dropped() -> None:
    with connected(place(0), place(1)) as peers:
        zero, one = (each.of_slice(1) for each in peers)
        zero.send(1, 0, arrays(1, 2))
        zero.send(1, 0, arrays(3))
        for each in (zero, one):
            each.renew()
        zero.send(1, 0, arrays(4))
        assert numbers(*one.receive(0, 0)) == [[4, 4]]


def test_data_slices_have_channels_and_resets_of_their_own() -> None:
    with connected(place(0), place(1)) as peers:
        slices = [[each.of_slice(index) for each in peers] for index in range(2)]
        for number, (zero, one) in enumerate(slices):
            zero.send(1, 0, arrays(number))
            if number:
                zero.renew()
                one.renew()
                zero.send(1, 0, arrays(7))
        assert [numbers(*one.receive(0, 0)) for _, one in slices] == [[[0, 0]], [[7, 7]]]


def test_the_end_of_a_process_is_an_error_of_those_that_wait_for_it() -> None:
    with connected(place(0), place(1)) as (zero, one):
        waiting = threading.Thread(target=lambda: zero._connections[1].close())
        waiting.start()
        with pytest.raises(ConnectionError, match="rank 0 has ended"):
            one.receive(0, 0)
        waiting.join()
        one.send(0, 0, arrays(1))


def test_what_cannot_be_computed_is_an_error_of_its_process() -> None:
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    with connected(place(0), place(1), on_failure=failures.put) as (zero, _):
        zero.send(1, 0, [BrokenArray()])  # pyright: ignore[reportArgumentType]
        assert isinstance(failures.get(timeout=30), RuntimeError)


class BrokenArray:
    """A shard whose computation fails."""

    def copy_to_host_async(self) -> None:
        """Begin."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise RuntimeError("out of memory")


def test_a_process_without_the_secret_is_refused() -> None:
    zero, one = (Peers(place(rank, secret=key * 32), "127.0.0.1", print) for rank, key in ((0, b"s"), (1, b"t")))
    addresses = Addresses(["127.0.0.1"] * 2, [zero.address.port, one.address.port])
    with ThreadPoolExecutor() as pool:
        refusing = pool.submit(zero.connect, addresses, [1])
        with pytest.raises(ConfigError, match="the secret is not that of the group"):
            one.connect(addresses, [0])
        with pytest.raises(ConfigError, match="ranks 1 did not connect to rank 0"):
            refusing.result()
    for each in (zero, one):
        each.close()


@pytest.mark.parametrize(
    ("ranks", "counts", "first", "reporters", "partners"),
    [
        ([[0], [1]], False, 1, [1], [1]),
        ([[0], [0], [1], [1]], True, 1, [1], [1]),
        ([[0], [1], [2], [3]], True, 3, [1, 2, 3], [1, 3]),
        ([[0], [1], [2], [3]], False, 3, [3], [1, 3]),
        ([[0, 1], [2, 3]], False, 2, [2], [2, 3]),
        ([[0], [0, 1], [1]], True, 1, [1], [1]),
        ([[1], [0]], True, 0, [1], [1]),
        ([[0, 1]], False, 0, [], []),
    ],
)
def test_who_reports_and_who_talks_to_whom(
    ranks: list[list[int]], counts: bool, first: int, reporters: list[int], partners: list[int]
) -> None:
    found = StageRanks(ranks, counts)
    assert (found.first_of_last, found.reporters, found.partners(0)) == (first, reporters, partners)
    count = 1 + max(max(each) for each in ranks)
    for one in range(count):
        assert all(one in found.partners(other) for other in found.partners(one)), "both sides agree"


def test_ranks_of_a_plan() -> None:
    meshes = [
        SimpleNamespace(devices=np.array([SimpleNamespace(process_index=rank) for rank in ranks]))
        for ranks in ([0, 0], [0, 1], [1, 1])
    ]
    models = [SimpleNamespace(mesh=mesh, counts_expert_tokens=True) for mesh in meshes]
    found: Any = ([[0], [0, 1], [1]], True)
    assert StageRanks.of(cast("Any", models)) == found
    plan: Any = SimpleNamespace(replicas=[models, models[:1]])
    assert slice_ranks(plan) == [found, ([[0]], True)]
    assert (all_partners(plan, 0), all_partners(plan, 1)) == ([1], [0])


def scores(seed: int) -> TokenLogprobs:
    """Logprobs of two rows."""
    draw = np.random.default_rng(seed)
    first, top, tracked = draw.random(2, np.float32), draw.random((2, 3), np.float32), np.zeros((2, 0), np.float32)
    return cast("TokenLogprobs", TokenLogprobs(first, np.arange(2), np.arange(6).reshape(2, 3), top, tracked))  # pyright: ignore[reportArgumentType]


def test_results_come_back_equal() -> None:
    results = [
        StepResult([[1, 2], []], scores(1), scores(2), np.ones((2, 4), np.float32), np.arange(6).reshape(2, 3)),
        StepResult([], None, None),
    ]
    found = decode_results(encode_results(results))
    assert jax.tree.structure(found) == jax.tree.structure(results)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(results), strict=True):
        assert np.array_equal(mine, theirs) and np.asarray(mine).dtype == np.asarray(theirs).dtype


def test_results_of_all_stages_are_merged() -> None:
    error = RowError(0, ValueError("bad"))
    own = [StepResult([], None, None, None, np.full((1, 2), 0), (error,))]
    middle = [StepResult([], None, None, None, np.full((2, 2), 1))]
    last = [StepResult([[7]], None, None, None, np.full((1, 2), 2))]
    (result,) = merged(own, {1: middle, 2: last}, sampler=2)
    assert result.tokens == [[7]] and result.errors == (error,)
    assert result.expert_tokens is not None and result.expert_tokens[:, 0].tolist() == [0, 1, 1, 2]
    (result,) = merged([own[0]._replace(tokens=[[5]])], {1: middle}, sampler=0)
    assert result.tokens == [[5]]


def test_results_of_steps_that_a_reset_has_dropped_are_ignored() -> None:
    """Those of several data slices may come in another order than they are asked for."""
    leader, member = Leader(place(0), print), Member(cast("Any", None), cast("Any", None))
    leader._members[1] = member
    for found in (Results(3, b"3"), Results(4, b"4"), Results(5, b"5"), EngineDeadError("rank 1 has ended")):
        member.inbox.put(found)
    member.forget_steps(3)
    assert leader.results(1, 5) == b"5"
    assert leader.results(1, 4) == b"4"
    with pytest.raises(EngineDeadError, match="rank 1 has ended"):
        leader.results(1, 3)


class WaitingRunner:
    """A runner whose launches wait until they may go on, or fail."""

    def __init__(self):
        self.may_go_on = threading.Event()
        self.calls: list[str] = []
        self.error: Exception | None = None

    def launch(self, plans: Sequence[StepPlan]) -> None:
        """Wait, then fail if told so."""
        assert self.may_go_on.wait(30)
        if self.error is not None:
            raise self.error
        self.calls.append(f"launch {plans[0].number}")

    def __getattr__(self, name: str) -> Callable[[], list[StepResult]]:
        def call() -> list[StepResult]:
            self.calls.append(name)
            return []

        return call


def test_launches_wait_on_their_own_thread() -> None:
    runner = WaitingRunner()
    part = OwnPart(runner)  # pyright: ignore[reportArgumentType]
    for number in range(2):
        part.launch([StepPlan(number)])
    runner.may_go_on.set()
    assert part.collect() == [] and part.collect() == []
    part.launch([StepPlan(2)])
    part.reset()
    part.close()
    launched = [call for call in runner.calls if call.startswith("launch")]
    assert launched == ["launch 0", "launch 1", "launch 2"]
    assert runner.calls[-2:] == ["reset", "close"] and runner.calls.count("collect") == 2


def test_collect_raises_the_error_of_a_launch() -> None:
    runner = WaitingRunner()
    runner.error = ConnectionError("rank 1 has ended")
    runner.may_go_on.set()
    part = OwnPart(runner)  # pyright: ignore[reportArgumentType]
    part.launch([StepPlan(0)])
    with pytest.raises(ConnectionError, match="rank 1 has ended"):
        part.collect()
    part.close()
