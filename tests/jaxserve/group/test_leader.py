"""The leader of a group and its followers over real connections, without devices: joining, digests, and ends."""

import contextlib
import queue
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from jaxserve.api.errors import ConfigError, EngineDeadError, JaxserveError
from jaxserve.device.runner_interface import StepResult
from jaxserve.frames import HEADER
from jaxserve.group import leader as leader_module
from jaxserve.group import members
from jaxserve.group.connection import PeerConnection, introduce
from jaxserve.group.digests import Digests
from jaxserve.group.group_runner import GroupRunner
from jaxserve.group.leader import Leader
from jaxserve.group.members import SilenceLimits, Steps
from jaxserve.group.messages import (
    Beat,
    Challenge,
    Done,
    End,
    Failed,
    Joined,
    Launch,
    Ready,
    Reset,
    ShowStacks,
    WarmUp,
)
from jaxserve.group.settings import GroupPlace
from jaxserve.group.stage_ranks import StageRanks
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.plan_codec import SentRows, decode_plans
from tests.free_ports import free_ports


class FakeRunner:
    """A ``Runner`` without devices: every row samples the step's number."""

    def __init__(self):
        self.plans: list[list[StepPlan]] = []
        self.calls: list[str] = []

    def warm_up(self) -> None:
        """Note the call."""
        self.calls.append("warm_up")

    def launch(self, plans: Sequence[StepPlan]) -> None:
        """Keep the plans."""
        self.plans.append([*plans])

    def collect(self) -> list[StepResult]:
        """The tokens of the oldest step."""
        plans = self.plans.pop(0)
        return [StepResult([[plan.number] for _ in plan.slots], None, None) for plan in plans]

    def reset(self) -> None:
        """Drop what is in flight."""
        self.plans.clear()
        self.calls.append("reset")

    def close(self) -> None:
        """Note the call."""
        self.calls.append("close")


class FakeFollower:
    """One that answers as it is told."""

    def __init__(self, place: GroupPlace):
        self.connection = connected(place)
        try:
            introduce(self.connection, place)
        except BaseException:
            self.connection.close()
            raise

    def __enter__(self) -> "FakeFollower":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def expect(self, kind: type) -> object:
        """The next message, which is of this class; beats are left out."""
        while isinstance(found := self.connection.receive(), Beat):
            pass
        assert isinstance(found, kind), found
        return found


def connected(place: GroupPlace) -> PeerConnection:
    """A connection to the leader, which may not listen yet."""
    for _ in range(200):
        try:
            return PeerConnection(socket.create_connection((place.address, place.port), timeout=10))
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nobody listens")


def place_of(rank: int, port: int, count: int = 2, secret: bytes = b"s" * 32, join_timeout: float = 20.0) -> GroupPlace:
    """A place in a group on this machine."""
    return GroupPlace("127.0.0.1", port, count, rank, secret, join_timeout, step_timeout=30.0)


STRANGE_FRAMES = (b"", b"\xc1", b"\x81\xc7\0\x5b\4", b"\x81\xc7\0\1\x05", b"\x81\x90\1", b"\xd4\x5b\0")
"""Bytes that are no message, such as those of an unknown class, or with a field of another type."""


@pytest.fixture
def port() -> int:
    """A free port whose successor is free too."""
    return free_ports()


@pytest.fixture
def lost() -> "queue.Queue[JaxserveError]":
    """The error with which the group fails."""
    return queue.Queue()


@pytest.fixture
def make_leader(
    monkeypatch: pytest.MonkeyPatch, port: int, lost: "queue.Queue[JaxserveError]"
) -> Iterator[Callable[..., Leader]]:
    """Makes leaders that start no JAX job; they end after the test."""
    monkeypatch.setattr(leader_module, "join_job", lambda place: None)
    monkeypatch.setattr(leader_module, "_END_S", 0.2)
    made: list[Leader] = []

    def make(**settings: int | float) -> Leader:
        made.append(Leader(place_of(0, port, **settings), lost.put))  # pyright: ignore[reportArgumentType]
        return made[-1]

    yield make
    for leader in made:
        leader.end()
        for member in leader.members:
            member.connection.close()


def joining(leader: Leader) -> "queue.Queue[BaseException | None]":
    """Let a leader join on another thread; what it raised comes in the queue."""
    done: queue.Queue[BaseException | None] = queue.Queue()

    def join() -> None:
        try:
            leader.join()
            done.put(None)
        except BaseException as error:
            done.put(error)

    threading.Thread(target=join, daemon=True).start()
    return done


@pytest.fixture
def pair(
    make_leader: Callable[..., Leader], port: int
) -> Iterator[tuple[Leader, FakeFollower, GroupRunner, FakeRunner]]:
    """A leader whose one follower is ready, and its runner."""
    leader = make_leader()
    done = joining(leader)
    with FakeFollower(place_of(1, port)) as follower:
        assert done.get(timeout=20) is None
        follower.expect(Joined)
        follower.connection.send(Ready())
        leader.wait_ready()
        own = FakeRunner()
        fake: Any = own
        runner = GroupRunner(leader, fake, StageRanks([[0, 1]], False))
        yield leader, follower, runner, own


def plan_of(number: int, previous: StepPlan | None = None) -> StepPlan:
    """A decode step of three rows."""
    plan = StepPlan(number)
    plan.add_decode_rows([0, 1, 2])
    if previous is not None:
        plan.compare_rows(previous)
    return plan


def test_only_processes_of_the_group_join(make_leader: Callable[..., Leader], port: int) -> None:
    leader = make_leader(count=3)
    done = joining(leader)
    stranger = connected(place_of(1, port))
    stranger.send(Ready())
    with pytest.raises(ConfigError, match="the secret is not that of the group"):
        FakeFollower(place_of(1, port, 3, secret=b"x" * 32))
    for body in STRANGE_FRAMES:
        other = connected(place_of(1, port, 3))
        other.receive()
        other.send_frame(HEADER.pack(len(body)) + body)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                other.receive()  # until the leader hangs up
        other.close()
    with pytest.raises(ConfigError, match=r"it expects 2 processes, and this group has 3 \(nnodes\)"):
        FakeFollower(place_of(1, port))
    with pytest.raises(ConfigError, match="node_rank=3 is not one of 1 to 2"):
        FakeFollower(place_of(3, port, 3))
    with FakeFollower(place_of(1, port, 3)) as first:
        with pytest.raises(ConfigError, match=r"node_rank=1 is taken by rank 1 \(host "):
            FakeFollower(place_of(1, port, 3))
        with FakeFollower(place_of(2, port, 3)) as second:
            assert done.get(timeout=20) is None
            for follower in (first, second):
                joined = follower.expect(Joined)
                assert isinstance(joined, Joined) and joined.num_on_host == 3
            leader.end()
    stranger.close()
    assert (leader.processes.count, leader.processes.num_on_host) == (3, 3)


def test_missing_processes_are_named(make_leader: Callable[..., Leader], port: int) -> None:
    done = joining(make_leader(count=4, join_timeout=1.0))
    with FakeFollower(place_of(2, port, 4)) as follower:
        error = done.get(timeout=20)
        told = follower.expect(End)
    assert isinstance(error, ConfigError)
    assert f"processes 1, 3 of 4 did not join at 127.0.0.1:{port} within join_timeout=1 s" in str(error)
    assert isinstance(told, End) and "processes 1, 3 of 4 did not join" in told.reason


def test_a_port_in_use(make_leader: Callable[..., Leader], port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(ConfigError, match=f"master_addr, master_port: cannot listen at 127.0.0.1:{port}: "):
            make_leader().join()
    with socket.create_server(("127.0.0.1", port + 1)):
        with pytest.raises(ConfigError, match=r"master_port \+ 1 is for JAX's coordinator: .* cannot listen"):
            make_leader().join()


@pytest.mark.parametrize(
    "message, error",
    [(Joined(1), "expected a challenge, got Joined"), (Challenge(5), "expected a challenge, got Challenge")],  # pyright: ignore[reportArgumentType]
)
def test_a_leader_without_the_secret_is_no_leader(port: int, message: Joined | Challenge, error: str) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:

        def pretend() -> None:
            connection = PeerConnection(listener.accept()[0])
            connection.send(message)
            connection.close()

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(OSError, match=error):
            FakeFollower(place_of(1, port))
        pretending.join()


def test_plans_and_digests(
    pair: tuple[Leader, FakeFollower, GroupRunner, FakeRunner], lost: "queue.Queue[JaxserveError]"
) -> None:
    """The follower gets every plan. Equal digests change nothing, and after a reset both sides begin them anew."""
    leader, follower, runner, own = pair
    runner.warm_up()
    follower.expect(WarmUp)
    assert own.calls == ["warm_up"]
    for _ in range(2):
        sent, digests, theirs, plan = SentRows(), Digests(), FakeRunner(), None
        for number in range(4):
            plan = plan_of(number, plan)
            runner.launch([plan])
            launch = follower.expect(Launch)
            assert isinstance(launch, Launch)
            theirs.launch(sent.restore(decode_plans(launch.plans)))
            assert theirs.plans[-1] == [plan]
            follower.connection.send(Done(launch.number, digests.add(launch.plans, theirs.collect())))
            assert runner.collect()[0].tokens == [[number]] * 3
        runner.launch([plan_of(9)])
        follower.expect(Launch)
        runner.reset()
        follower.expect(Reset)
    runner.close()
    told = follower.expect(End)
    assert isinstance(told, End) and told.reason == "" and own.calls[-1] == "close"
    assert lost.empty() and leader.members[0].steps.number == 3 + 5


def test_a_digest_that_differs_ends_the_group(
    pair: tuple[Leader, FakeFollower, GroupRunner, FakeRunner],
    lost: "queue.Queue[JaxserveError]",
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The results of the step are not used: some rank has computed wrong ones."""
    leader, follower, runner, _ = pair
    monkeypatch.setattr(leader_module, "_LOST_S", 0.1)
    runner.launch([plan_of(0)])
    follower.expect(Launch)
    follower.connection.send(Done(0, b"12345678"))
    while leader.members[0].steps.number < 0:
        time.sleep(0.01)
    with pytest.raises(EngineDeadError, match="another process of the group has failed"):
        runner.collect()
    assert str(lost.get(timeout=20)) == "rank 1 of its processes ended, failed or is late; the log says more"
    told = follower.expect(End)
    assert isinstance(told, End) and "at step 0: plans or tokens differ" in told.reason
    assert "3132333435363738 instead of " in caplog.text and "rank 1 (host " in caplog.text


def test_the_end_of_a_follower_ends_the_group(
    pair: tuple[Leader, FakeFollower, GroupRunner, FakeRunner],
    lost: "queue.Queue[JaxserveError]",
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair[1].connection.close()
    assert "rank 1 of its processes" in str(lost.get(timeout=20))
    assert "the group ends: rank 1 (host " in caplog.text and "has ended" in caplog.text


def test_a_follower_that_fails_says_why(
    pair: tuple[Leader, FakeFollower, GroupRunner, FakeRunner],
    lost: "queue.Queue[JaxserveError]",
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair[1].connection.send(Failed("ValueError: no", False, "Traceback: there"))
    assert "rank 1 of its processes" in str(lost.get(timeout=20))
    assert "Traceback: there" in caplog.text and "ValueError: no" in caplog.text


def test_time_in_which_the_leader_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clocks say, a step is late after seconds that the leader has noticed one by one."""
    member: Any = types.SimpleNamespace(silent_s=0.0, steps=Steps())
    limits = SilenceLimits(step_timeout=3.0)
    limits.is_running = True
    member.steps.launched(0)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: 1e9)
        assert [limits.problem(member, 1.0) for _ in range(3)] == [None] * 3
        member.steps.done(0, b"d")
        assert limits.problem(member, 1.0) is None
        member.steps.launched(1)
        member.steps.launched(2)
        assert [limits.problem(member, 1.0) for _ in range(3)] == [None] * 3
        assert limits.problem(member, 1.0) == "has not finished a step within step_timeout=3 s"
        assert limits.problem(member, 1.0) == "has sent nothing for 8 s"


def test_a_late_step_ends_the_group(
    pair: tuple[Leader, FakeFollower, GroupRunner, FakeRunner],
    lost: "queue.Queue[JaxserveError]",
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All log their stacks; who does not even do that is named as stopped."""
    leader, follower, runner, _ = pair
    monkeypatch.setattr(members, "_STACKS_S", 0.2)
    leader._limits = SilenceLimits(step_timeout=0.1)
    leader._limits.is_running = True
    runner.launch([plan_of(0)])
    follower.expect(Launch)
    follower.expect(ShowStacks)
    assert "rank 1 of its processes" in str(lost.get(timeout=20))
    assert "does not answer: it is stopped" in caplog.text and "step that it finished is -1" in caplog.text
    assert "in show_stacks" in caplog.text
