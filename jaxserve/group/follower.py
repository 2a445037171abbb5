"""A follower of a group: every process but number 0. It plans nothing; it launches the steps that it is sent."""

import contextlib
import dataclasses
import logging
import queue
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import jax

from jaxserve.api.config import SERVING_DEFAULTS, EngineConfig
from jaxserve.child_process import EXIT_BAD_START, EXIT_FAILED
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.device.program_cache import check_entries, use_compilation_cache
from jaxserve.device.runner import LocalRunner
from jaxserve.device.start import make_runners
from jaxserve.garbage import lasting_objects_replaced, spare_lasting_objects
from jaxserve.group.connection import join_leader
from jaxserve.group.digests import Digests
from jaxserve.group.facts import agreed_plan, early_facts, plan_facts
from jaxserve.group.job import join_job
from jaxserve.group.messages import (
    Addresses,
    Agreed,
    Beat,
    Dismiss,
    Done,
    End,
    Facts,
    Failed,
    Joined,
    Launch,
    Move,
    MoveAgreed,
    Prepare,
    Ready,
    Reset,
    Results,
    Settle,
    ShowStacks,
    Stacks,
    ToLeader,
    WarmUp,
    Write,
)
from jaxserve.group.moving_follower import FollowerMoves
from jaxserve.group.peers import Peers
from jaxserve.group.relays import Relay, has_relays
from jaxserve.group.results import encode_results
from jaxserve.group.settings import GroupPlace
from jaxserve.group.stage_ranks import all_partners, slice_ranks
from jaxserve.log_output import end_process, stacks_of_threads
from jaxserve.models.drafters.speculators import with_verifier
from jaxserve.models.loading import check_weights
from jaxserve.scheduling.plan_codec import SentRows, decode_plans
from sharding.processes import Processes

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
_SILENT_S = 15.0  # the leader notices a silent follower before
_SILENT_AT_START_S = 90.0
_FAREWELL_S = 3.0  # for the leader's reason


def run_follower(arguments: Mapping[str, Any], place: GroupPlace) -> NoReturn:
    """Join a group, and launch its steps until it ends; ends this process.

    Args:
        arguments: Arguments of ``LLM``, the same as those of process 0.
        place: The place of this process in the group.

    Raises:
        ConfigError: Process 0 cannot be reached, or does not want this process.
    """
    link = LeaderLink(place)
    try:  # also of the arguments: process 0 would wait for one that has ended because of a setting
        config = EngineConfig.from_arguments(**{"model": "demo", **SERVING_DEFAULTS, **arguments})
        follower = Follower(link, place)
        follower.start(with_verifier(config))
        follower.run()
    except BaseException as error:
        link.fail(error)


class LeaderLink:
    """The connection of a follower to process 0.

    Attributes:
        inbox: The messages to the thread that launches steps.
        number: The latest step that was launched; -1: none.
        is_running: Whether this process is compiled and loaded.
        is_preparing: Whether it compiles for another mesh or layout, which keeps other threads waiting.

    Args:
        place: The place of this process in the group.

    Raises:
        ConfigError: Process 0 cannot be reached, or does not want this process.
    """

    def __init__(self, place: GroupPlace):
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.number = -1
        self.is_running = False
        self.is_preparing = False
        self._relay: Relay | None = None
        self._silent_s = 0.0
        self._num_signals = 0
        self._connection = join_leader(place)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)
        threading.Thread(target=self._read, name="jaxserve-leader", daemon=True).start()
        threading.Thread(target=self._beat, name="jaxserve-group", daemon=True).start()

    @property
    def own_address(self) -> str:
        """Address of this machine at which process 0 sees it."""
        return self._connection.own_address

    def send(self, message: ToLeader) -> None:
        """Send a message; the end of the leader is noticed by the thread that reads."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def use_relays(self, place: GroupPlace) -> None:
        """Connect to the processes that what process 0 sends to all is passed on to, or to the one that passes it on.

        Raises:
            ConfigError: One cannot be reached.
        """
        relay = Relay(place, self.own_address, self.inbox.put, self.fail)
        self.send(relay.address)
        relay.connect(self.expect(Addresses))
        self._relay = relay

    def expect(self, kind: type[Any]) -> Any:
        """Wait for a message of a class, and return it."""
        found = self.inbox.get()
        assert isinstance(found, kind), f"expected {kind.__name__}, got {type(found).__name__}"
        return found

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the leader that this process has failed, and end it; the leader may know a better reason."""
        text = "".join(traceback.format_exception(error))
        is_setting = isinstance(error, ValueError) and not self.is_running
        said = str(error) if is_setting else f"{type(error).__name__}: {error}"
        self.send(Failed(said, is_setting, text))
        if not is_setting:
            logger.error("%s", text)
        time.sleep(_FAREWELL_S)  # ends earlier, with the leader's reason
        end_process(EXIT_BAD_START if is_setting else EXIT_FAILED)

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                self._silent_s = 0.0
                if isinstance(message, End):
                    self._end(message.reason)
                elif isinstance(message, ShowStacks):
                    logger.error("%s", stacks_of_threads())
                    self.send(Stacks(self.number))
                elif not isinstance(message, Beat):
                    if self._relay is not None:
                        self._relay.pass_on(message)
                    self.inbox.put(message)
        except OSError as error:
            logger.error("the group ends: process 0 has ended: %s", error)
            end_process(EXIT_FAILED)

    def _end(self, reason: str) -> NoReturn:
        if reason:
            logger.error("the group ends: %s", reason)
        end_process((EXIT_FAILED if self.is_running else EXIT_BAD_START) if reason else 0)

    def _beat(self) -> None:
        while True:
            self.send(Beat())
            time.sleep(_BEAT_S)
            self._silent_s += _BEAT_S
            is_patient = self.is_preparing or not self.is_running
            if self._silent_s > (_SILENT_AT_START_S if is_patient else _SILENT_S):
                logger.error("the group ends: process 0 has sent nothing for %g s", self._silent_s)
                end_process(EXIT_FAILED)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """Leave the end to process 0, which drains; after a second signal, end this process and so the group."""
        self._num_signals += 1
        if self._num_signals > 1:
            end_process(EXIT_FAILED)
        logger.warning(
            "%s: this process ends when process 0 does; a second signal ends the group", signal.strsignal(number)
        )


class Follower:
    """Plans the same engine as process 0, and launches its steps.

    Args:
        link: The connection to process 0.
        place: The place of this process in the group.
    """

    def __init__(self, link: LeaderLink, place: GroupPlace):
        self._link = link
        self._place = place
        self._steps: queue.Queue[Launch] = queue.Queue()

    def start(self, config: EngineConfig) -> None:
        """Agree on what to run, join the JAX job, compile and load.

        Raises:
            ConfigError: A setting is wrong, or the processes differ.
            CheckpointError: The checkpoint cannot be read.
        """
        joined = self._link.expect(Joined)
        config = dataclasses.replace(config, **joined.moved)
        processes = Processes(self._place.count, joined.num_on_host, has_slices=bool(joined.moved))
        if has_relays(self._place.count):
            self._link.use_relays(self._place)
        self._link.send(Facts(early_facts(config)))
        self._link.expect(Agreed)
        join_job(self._place)
        plan = plan_engine(config, processes=processes)
        self._link.send(Facts(plan_facts(plan)))
        plan = agreed_plan(config, plan, self._link.expect(Agreed).values, processes)
        peers = self._stage_link(plan)
        self._use(self._load(config, plan, peers), plan)
        self._moves = FollowerMoves(self._link, self._place, processes, config, plan, peers)
        self._link.send(Ready())
        self._link.is_running = True

    def _stage_link(self, plan: EnginePlan) -> Peers | None:
        """Connect to the processes that have neighboring pipeline stages; None without stages."""
        if plan.num_stages == 1:
            return None
        peers = Peers(self._place, self._link.own_address, self._link.fail)
        self._link.send(peers.address)
        peers.connect(self._link.expect(Addresses), all_partners(plan, self._place.rank))
        return peers

    def _load(self, config: EngineConfig, plan: EnginePlan, peers: Peers | None) -> list[LocalRunner]:
        check_weights(plan.directory, plan.models[0].whole_model(), plan.load_format)
        device = plan.models[0].mesh.devices.flat[0]
        programs = use_compilation_cache(config.compilation_cache_dir, device, config.compilation_cache_max_bytes)
        runners = make_runners(plan, peers)[0]
        if programs is not None:
            check_entries(programs)
        logger.info("%s is ready with %d devices", f"rank {self._place.rank}", jax.local_device_count())
        return runners

    def _use(self, runners: Sequence[LocalRunner], plan: EnginePlan) -> None:
        """Launch the steps of a plan from now on, each data slice's on a runner."""
        self._runners, self._ranks = runners, slice_ranks(plan)
        self._sent, self._digests = [SentRows() for _ in runners], [Digests() for _ in runners]

    def run(self) -> NoReturn:
        """Launch steps until the process ends."""
        threading.Thread(target=self._collect, name="jaxserve-results", daemon=True).start()
        while True:
            message = self._link.inbox.get()
            if isinstance(message, Launch):
                plans = self._sent[message.replica].restore(decode_plans(message.plans))
                self._runners[message.replica].launch(plans)
                self._link.number = message.number
                self._steps.put(message)
            elif isinstance(message, WarmUp):
                self._runners[message.replica].warm_up()
                spare_lasting_objects()
            elif isinstance(message, Prepare | MoveAgreed | Dismiss):
                self._moves.prepare(message)
            elif isinstance(message, Move):
                self._steps.join()
                with lasting_objects_replaced():
                    self._use(self._moves.move(self._runners, message), self._moves.plan)
            elif isinstance(message, Write):
                self._moves.write(message)
            elif isinstance(message, Settle):
                self._moves.settle()
            else:
                assert isinstance(message, Reset), f"unexpected message {type(message).__name__}"
                self._steps.join()
                self._runners[message.replica].reset()
                self._sent[message.replica], self._digests[message.replica] = SentRows(), Digests()

    def _collect(self) -> None:
        """Wait for each step, and send its digest to the leader."""
        try:
            while True:
                step = self._steps.get()
                results = self._runners[step.replica].collect()
                self._link.send(Done(step.number, self._digests[step.replica].add(step.plans, results)))
                if self._place.rank in self._ranks[step.replica].reporters:
                    self._link.send(Results(step.number, encode_results(results)))
                self._steps.task_done()
        except BaseException as error:
            self._link.fail(error)
