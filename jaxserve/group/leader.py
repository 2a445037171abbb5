"""Process 0 of a group: waits for the others, compares what they are about to run, and leads their steps."""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, EngineDeadError, JaxserveError
from jaxserve.api.metric_types import Counter, Metric
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.group.connection import (
    PeerConnection,
    admit,
    check_free,
    listen,
    machine_name,
    not_joined,
    send_to_each,
    welcome,
    wrong_place,
)
from jaxserve.group.differences import difference, least
from jaxserve.group.facts import agreed_plan, early_facts, plan_facts
from jaxserve.group.job import join_job
from jaxserve.group.members import Member, SilenceLimits, show_stacks
from jaxserve.group.messages import (
    Addresses,
    Agreed,
    Beat,
    End,
    Facts,
    Hello,
    Joined,
    Listening,
    Ready,
    Reset,
    ToFollower,
)
from jaxserve.group.peers import Peers, after_move
from jaxserve.group.relays import direct_receivers, has_relays
from jaxserve.group.secure_link import check_certificate
from jaxserve.group.settings import GroupPlace, host_name
from jaxserve.group.stage_ranks import all_partners
from sharding.processes import Processes

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
_OTHERS_S = 0.5  # for the process that ended first, when several report their ends
_END_S = 5.0  # for followers to end
_FAIL_S = 1.0  # likewise after a failure, of which one of them may be the reason
_BLAME_S = 2.0  # to learn that another process has failed, when a step fails here
_LOST_S = 60.0  # for the end of this process, which takes a few seconds


class Leader:
    """The connections of process 0 to all others.

    Args:
        place: Where to wait for them.
        on_lost: Called once, on another thread, with the reason if the group fails while this thread may wait for a
            collective that never ends; it must end the process.
    """

    def __init__(self, place: GroupPlace, on_lost: Callable[[JaxserveError], None]):
        self.place = place
        self._on_lost = on_lost
        self._members: dict[int, Member] = {}
        self._receivers: Sequence[Member] = ()
        self._is_ending = False
        self._is_failing = threading.Event()
        self._is_lost = threading.Event()
        self._reports: queue.SimpleQueue[tuple[bool, int, JaxserveError]] = queue.SimpleQueue()
        self._limits = SilenceLimits(place.step_timeout)
        self._peers: Peers | None = None
        self._num_moves = 0
        self._launched = -1

    @property
    def members(self) -> list[Member]:
        """The followers in the order of their ranks."""
        return [self._members[rank] for rank in sorted(self._members)]

    @property
    def names(self) -> list[str]:
        """What to call each process in messages, in the order of ranks."""
        return [f"rank 0 (host {host_name()})", *(member.name for member in self.members)]

    # ---------------------------------------------------------------- start

    def join(self, moved: dict[str, Any] | None = None) -> None:
        """Wait for all followers.

        Args:
            moved: Settings with which all start in place of those of the command; see ``Resharder``.

        Raises:
            ConfigError: The address cannot be used, or some followers are missing after ``join_timeout``.
        """
        self._accept_all()
        machines = [machine_name(), *(member.hello.machine for member in self.members)]
        self.processes = Processes(self.place.count, machines.count(machines[0]), has_slices=bool(moved))
        for member in self.members:
            member.send(Joined(machines.count(member.hello.machine), moved or {}))
            name = f"jaxserve-rank-{member.rank}"
            threading.Thread(target=self._watch, args=(member,), name=name, daemon=True).start()
        self._receivers = self.members
        threading.Thread(target=self._report, name="jaxserve-group-reports", daemon=True).start()
        threading.Thread(target=self._beat, name="jaxserve-group", daemon=True).start()
        if has_relays(self.place.count):
            self._exchange_addresses(Listening(self.place.address, self.place.port))
            self._receivers = direct_receivers(self.members)
        logger.info("all %d processes have joined: %s", self.place.count, ", ".join(self.names))

    def _accept_all(self) -> None:
        place, deadline_s = self.place, time.monotonic() + self.place.join_timeout
        if place.certfile is not None:
            check_certificate(place)
        check_free(place.address, place.coordinator_port)
        with listen(place.address, place.port) as listener:
            lock = threading.Lock()
            logger.info("waiting for %d processes at %s:%d", place.count - 1, place.address, place.port)
            while len(self._members) < place.count - 1:
                listener.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    link, address = listener.accept()
                    threading.Thread(target=self._accept, args=(link, address[0], lock), daemon=True).start()
                if time.monotonic() > deadline_s:
                    missing = [rank for rank in range(1, place.count) if rank not in self._members]
                    self._refuse_all(not_joined("processes", missing, place))
        for member in self.members:
            member.connection.set_timeout(None)

    def _accept(self, link: socket.socket, address: str, lock: threading.Lock) -> None:
        """Take a process in, or tell it why not."""

        def take(hello: Hello, connection: PeerConnection) -> str | None:
            with lock:
                problem = self._problem(hello)
                if problem is None:
                    welcome(connection, self.place, hello)
                    self._members[hello.rank] = Member(hello, connection)
                return problem

        admit(link, address, self.place, take)

    def _problem(self, hello: Hello) -> str | None:
        problem = wrong_place(hello, self.place, "this group has")
        if problem is None and hello.rank in self._members:
            return f"node_rank={hello.rank} is taken by {self._members[hello.rank].name}"
        return problem

    def agree(self, config: EngineConfig) -> EnginePlan:
        """Compare versions, files and settings of all processes, start the JAX job, plan the engine, compare the plans.

        Raises:
            ConfigError: A setting is wrong, or the processes differ; all of them are told.
        """
        self._compare(early_facts(config))
        join_job(self.place)
        plan = plan_engine(config, processes=self.processes)
        facts = plan_facts(plan)
        return agreed_plan(config, plan, self._compare(facts), self.processes)

    def _compare(self, facts: dict[str, Any]) -> dict[str, int]:
        """Compare facts with those of all followers; return the numbers that all use."""
        found = [facts, *(self._expect(member, Facts).values for member in self.members)]
        problem = difference(found, self.names)
        if problem is not None:
            self._refuse_all(problem)
        numbers = least(found)
        self.send_all(Agreed(numbers))
        return numbers

    def link(self, plan: EnginePlan) -> Peers | None:
        """Connect the processes that exchange what pipeline stages hand over; return this one's part, None without
        stages.

        Raises:
            JaxserveError: A follower cannot be reached, or failed.
        """
        if plan.num_stages == 1:
            return None
        self._peers = peers = Peers(self.place, self.place.address, self.fail)
        peers.connect(self._exchange_addresses(peers.address), all_partners(plan, 0))
        return peers

    def _exchange_addresses(self, own: Listening) -> Addresses:
        """Tell all followers where each process waits for the others, and return it."""
        found = [own, *(self._expect(member, Listening) for member in self.members)]
        addresses = Addresses([each.host for each in found], [each.port for each in found])
        self.send_all(addresses)
        return addresses

    def wait_ready(self) -> None:
        """Wait until all followers are compiled and loaded; from now on, a lost one ends the process.

        Raises:
            JaxserveError: A follower failed.
        """
        for member in self.members:
            self._expect(member, Ready)
        self._limits.is_running = True

    def _expect(self, member: Member, kind: type[Any]) -> Any:
        found = member.inbox.get()
        if isinstance(found, JaxserveError):
            self._refuse_all(str(found), type(found))
        assert isinstance(found, kind), f"{member.name} sent {type(found).__name__} in place of {kind.__name__}"
        return found

    def _refuse_all(self, problem: str, kind: type[JaxserveError] = ConfigError) -> None:
        """Tell all followers why the group does not start, and raise the same error here."""
        self.end(problem)
        raise kind(problem)

    # ---------------------------------------------------------------- steps

    def send_all(self, message: ToFollower) -> None:
        """Send a message to every follower, to some through relays, without waiting for any."""
        send_to_each([member.connection for member in self._receivers], message)

    def launched(self, number: int) -> None:
        """Note that a step is launched."""
        self._launched = number
        for member in self.members:
            member.steps.launched(number)

    def computed(self, number: int, digest: bytes, of_plans: bytes, samplers: Container[int]) -> None:
        """Note the digests of a step, and compare them with those that have come.

        Args:
            number: Number of the step.
            digest: Digest of plans and tokens.
            of_plans: Digest of the plans alone.
            samplers: Ranks that know the tokens.
        """
        for member in self.members:
            if not member.steps.computed(number, digest if member.rank in samplers else of_plans):
                self._diverged(member, number)

    def results(self, rank: int, number: int) -> bytes:
        """Wait for what a follower reports of a step; what it reported of steps that a reset has dropped is ignored.

        Raises:
            JaxserveError: It failed.
        """
        return self._members[rank].results_of(number)

    def fail(self, error: BaseException) -> None:
        """Let the group end because of an error on a thread of this process."""
        logger.error("rank 0 failed: %s", error)
        self._reports.put((True, 0, EngineDeadError(f"rank 0: {error}")))

    def reset(self, replica: int = 0) -> None:
        """Let all followers drop the steps of a data slice that are in flight; the other ones are about to be reset."""
        for member in self.members:
            member.forget_steps(self._launched)
        self.send_all(Reset(replica))

    def check(self) -> None:
        """Return if no follower has failed; call it before results are used.

        Raises:
            EngineDeadError: One has, so that no result can be trusted; this process usually ends before.
        """
        if self._is_failing.is_set():
            time.sleep(_LOST_S)
            raise EngineDeadError("another process of the group has failed")

    def blame(self, error: BaseException) -> None:
        """Wait until the process that made a step fail here is known, which ends this one; return if none is."""
        logger.error("a step of the group failed: %s", error)
        if self._is_failing.wait(_BLAME_S):
            self.check()

    def end(self, reason: str = "") -> None:
        """Let all followers end, and wait for them for a few seconds; call it before this process ends. In a group that
        fails, those of this machine that send nothing are killed.

        Args:
            reason: Why the group fails; empty: it does not.
        """
        if self._is_ending:
            return
        self._is_ending = True
        for member in self.members:
            member.send(End(reason))
        until_s = time.monotonic() + (_FAIL_S if reason else _END_S)
        for member in self.members:
            if not member.has_ended.wait(max(0.0, until_s - time.monotonic())) and reason:
                member.kill_if_silent()
        if self._peers is not None:
            self._peers.close()

    def metrics(self, prefix: str) -> list[Metric]:
        """Return the progress of each follower, and the bytes sent to it."""
        found = list[Metric]()
        for member in self.members:
            labels = {"rank": str(member.rank), "host": member.hello.host}
            found.append(Counter(f"{prefix}group_steps", labels, member.steps.number + 1))
            found.append(Counter(f"{prefix}group_sent_bytes", labels, member.connection.num_sent_bytes))
        return found

    # ---------------------------------------------------------------- moves

    def next_move(self) -> int:
        """Return the number of a new change of mesh or layout."""
        self._num_moves += 1
        return self._num_moves

    def set_preparing(self, is_preparing: bool) -> None:
        """Note whether followers compile while steps go on, and may be silent for longer."""
        self._limits.is_preparing = is_preparing

    def use_peers(self, peers: Peers, has_stages: bool) -> None:
        """Close the connections of stages, and replace them if there are stages; all processes have moved."""
        self._peers = after_move(self._peers, peers, has_stages)

    # ---------------------------------------------------------------- threads

    def _watch(self, member: Member) -> None:
        """Handle the messages of a follower until it ends."""
        try:
            while True:
                message = member.connection.receive()
                problem = member.handle(message)
                if problem is not None:
                    self._lose(member, problem, has_spoken=True)
                elif member.steps.has_diverged:
                    self._diverged(member, member.steps.number)
        except (OSError, ValueError) as error:  # ValueError: this side is closed
            member.has_ended.set()
            if not self._is_ending and not member.has_failed:
                self._lose(member, EngineDeadError(f"{member.name} has ended: {error}"), has_spoken=False)

    def _diverged(self, member: Member, number: int) -> None:
        text = f"{member.name} at step {number}: plans or tokens differ from those of rank 0 ({member.steps.digests})"
        self._lose(member, EngineDeadError(text), has_spoken=False)

    def _lose(self, member: Member, error: JaxserveError, has_spoken: bool) -> None:
        """Note that the group fails because of a follower.

        Args:
            member: The follower.
            error: Why.
            has_spoken: Whether it said so itself: another one that ended without a word may be its reason.
        """
        member.inbox.put(error)
        member.moves.put(error)
        if self._limits.is_running or not has_spoken:
            self._is_failing.set()
            self._reports.put((has_spoken, member.rank, error))

    def _report(self) -> None:
        """Wait for the end of the group; blame the process that ended first."""
        reports = [self._reports.get()]
        until_s = time.monotonic() + _OTHERS_S
        while (left_s := until_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                reports.append(self._reports.get(timeout=left_s))
        if self._is_ending:
            return
        _, rank, error = min(reports, key=lambda report: report[:2])
        self._is_lost.set()
        logger.error("the group ends: %s", error)
        self.end(str(error))
        if self._limits.is_running:  # clients are told this, so no names of hosts
            error = EngineDeadError(f"rank {rank} of its processes ended, failed or is late; the log says more")
        self._on_lost(error)

    def _beat(self) -> None:
        """Show all followers that this process is alive, and look for those that are silent or late."""
        while not self._is_ending:
            for member in self.members:
                member.send(Beat())
            time.sleep(_BEAT_S)
            for member in self.members:
                problem = self._limits.problem(member, _BEAT_S)
                if problem is not None and not self._is_lost.is_set():
                    self._look_at_all(member, problem)

    def _look_at_all(self, late: Member, problem: str) -> None:
        """Let all log their stacks, and blame a follower that does not even do that, else the late one."""
        silent = show_stacks(self.members)
        if silent:
            late, problem = silent[0], "does not answer: it is stopped, or its machine cannot be reached"
        else:  # all wait for the one that has launched the fewest steps
            late = min(self.members, key=lambda member: member.launched)
        text = f"{late.name} {problem}; the latest step that it finished is {late.steps.number}"
        self._lose(late, EngineDeadError(text), has_spoken=False)
