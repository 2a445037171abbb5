"""A group whose processes are started by actors of a Ray cluster; the only file that imports ray.

Ray places the processes and notices lost nodes; nothing of the engine runs inside an actor, which starts
``python -m jaxserve.group`` as its child and watches it. Only strings and numbers go through Ray. The processes of a
group end together; of several groups, each ends alone, and process 0, which serves for all, ends all.
"""

import contextlib
import importlib
import ipaddress
import json
import logging
import math
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

from jaxserve.api.config_checks import parse_mesh
from jaxserve.api.errors import ConfigError
from jaxserve.child_process import EXIT_BAD_START, EXIT_FAILED, child_environment, end_of, shell_status
from jaxserve.group.ports import LOOPBACK, PortPair
from jaxserve.group.replicas import sizes_of
from jaxserve.group.settings import SECRET_BYTES, GroupConfig

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_ANSWER_S = 20.0  # for an actor; one that does not answer is lost with its node
_PATIENCE_S = 5.0  # for the others once one process has failed
_CLEAN_END_S = 30.0  # likewise once one has ended well
_SIZES = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size", "expert_parallel_size")


class GroupProcess:
    """Starts a process of a group as a child, and passes on what it writes. An actor, with strings and numbers only."""

    def __init__(self):
        self._child: subprocess.Popen[str] | None = None
        self._pipe = -1
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def node(self) -> str:
        """Return the id of this node."""
        return importlib.import_module("ray").get_runtime_context().get_node_id()

    def keep_ports(self, address: str) -> int:
        """Keep two consecutive ports of this node for the group as long as this actor lives; return the first."""
        self._ports = PortPair(address)
        return self._ports.first

    def start(self, address: str, count: int, rank: int, secret: str, command: str) -> int:
        """Start the process, or another one in place of the one that has ended; return its id.

        Args:
            address: Where process 0 listens, with the port.
            count: Number of processes.
            rank: Which of them this is.
            secret: The group's secret, in hexadecimal digits.
            command: The command of ``jaxserve`` as a JSON list.
        """
        if self._pipe >= 0:  # of a process that has ended
            os.close(self._pipe)
        reading, self._pipe = os.pipe()
        os.write(self._pipe, bytes.fromhex(secret))
        place = ["--address", address, "--count", str(count), "--rank", str(rank), "--secret-fd", str(reading)]
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxserve.group", *place, *json.loads(command)],
            pass_fds=(reading,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=_without_ray(child_environment()),
        )
        os.close(reading)
        for number, stream in enumerate((self._child.stdout, self._child.stderr), 1):
            assert stream is not None
            threading.Thread(target=self._read, args=(number, stream), daemon=True).start()
        return self._child.pid

    def _read(self, number: int, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put((number, line))

    def poll(self) -> str:
        """Return as JSON the exit status, null while the process runs, and the new lines that it has written, each with
        the number of its stream."""
        assert self._child is not None
        status = self._child.poll()
        lines = []
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
        return json.dumps([status, lines])

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self._child is not None:
            self._child.send_signal(number)


class RayLauncher:
    """Starts, watches and ends the processes of a group in a Ray cluster.

    Args:
        command: The command that each runs.
        config: The settings of the group.
        arguments: Arguments of ``LLM``.
        is_restarting: Whether to start all again when they have failed.
        may_leave: Whether the network is trusted (``insecure`` of the server), so that they may be on several nodes.

    Attributes:
        has_groups: Whether process 0 is the front end of several groups, whose ends it outlives.

    Raises:
        ConfigError: Ray is absent, there is no cluster, or anybody could use it.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: GroupConfig,
        arguments: Mapping[str, Any],
        is_restarting: bool,
        may_leave: bool,
    ):
        self._ray = _connected()
        self._command = [*command, "--distributed-executor-backend=mp"]
        self._config = config
        self.has_groups = sizes_of(arguments)["data_parallel_size"] > 1
        self._gpus = num_devices(arguments) / config.nnodes if self._ray.cluster_resources().get("GPU") else 0
        self._restarts = is_restarting
        self._may_leave = may_leave
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_told = False

    def run(self) -> int:
        """Run the processes until they have ended; return the status of process 0.

        Raises:
            ConfigError: The cluster has no room for them.
        """
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray's own handlers would end this process at once
            signal.signal(number, self._signalled)
        try:
            while True:
                with self._placed() as actors:
                    status = _Gang(self._ray, actors, self).run(self._place(actors))
                if status in (0, EXIT_BAD_START) or self._is_told or not self._restarts:
                    return shell_status(status)
                logger.error("rank 0 of the group %s; all processes are started again", end_of(status))
        finally:
            self._ray.shutdown()

    def command_of(self, rank: int) -> list[str]:
        """Return the command of a process. Only the front end of several groups has any of them started again."""
        return [*self._command, f"--{'' if rank == 0 and self.restarts_groups else 'no-'}restart-engine"]

    @property
    def restarts_groups(self) -> bool:
        """Whether a process of a group is started again while the others go on."""
        return self.has_groups and self._restarts and not self._is_told

    def take_signal(self) -> int | None:
        """Return a signal that this process has got, if there is another one."""
        with contextlib.suppress(queue.Empty):
            return self._signals.get_nowait()
        return None

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True
        self._signals.put(number)

    @contextlib.contextmanager
    def _placed(self) -> Iterator[list[Any]]:
        """Make an actor for each process, in a placement group that is removed at the end, or in the current one."""
        ray, count = self._ray, self._config.nnodes
        placement = importlib.import_module("ray.util.placement_group")
        group, is_own = placement.get_current_placement_group(), False
        each = {"CPU": 1.0, **({"GPU": self._gpus} if self._gpus else {})}
        if group is None:
            here = f"node:{ray.util.get_node_ip_address()}"
            bundles = [each | ({here: 0.001} if rank == 0 else {}) for rank in range(count)]
            group, is_own = placement.placement_group(bundles, strategy="SPREAD"), True
        elif group.bundle_count < count:
            raise ConfigError(f"Ray's current placement group has {group.bundle_count} bundles, nnodes={count}")
        actors = list[Any]()
        try:
            if not group.wait(self._config.join_timeout):
                raise ConfigError(
                    f"the Ray cluster has no room for {count} processes with {each} each within "
                    f"join_timeout={self._config.join_timeout:g} s; it has {ray.cluster_resources()}"
                )
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            made = ray.remote(max_restarts=0, num_cpus=1, num_gpus=self._gpus)(GroupProcess)
            for rank in range(count):
                where = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
                actors.append(made.options(scheduling_strategy=where).remote())
            yield actors
        finally:
            for actor in actors:
                ray.kill(actor)
            if is_own:
                placement.remove_placement_group(group)

    def _place(self, actors: Sequence[Any]) -> str:
        """Return where process 0 listens."""
        nodes = {each["NodeID"]: each["NodeManagerAddress"] for each in self._ray.nodes()}
        hosts = self._ray.get([actor.node.remote() for actor in actors], timeout=self._config.join_timeout)
        address = LOOPBACK if len({*hosts}) == 1 else nodes[hosts[0]]
        try:
            self._config.check_encryption(address, self._may_leave)
        except ConfigError as error:
            count = len({*hosts})
            raise ConfigError(f"the group's processes are on {count} nodes of the Ray cluster. {error}") from None
        port = self._config.master_port or self._ray.get(actors[0].keep_ports.remote(address), timeout=_ANSWER_S)
        return f"{address}:{port}"


class _Gang:
    """The processes from one start to the end of all, or of process 0 if they are several groups.

    Args:
        ray: The module.
        actors: A ``GroupProcess`` for each rank.
        launcher: Gets signals.
    """

    def __init__(self, ray: Any, actors: Sequence[Any], launcher: RayLauncher):
        self._ray = ray
        self._actors = actors
        self._launcher = launcher
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._statuses: dict[int, int] = {}

    def run(self, address: str) -> int:
        """Run all processes until they have ended; return the status of process 0, or that another failed before.

        Args:
            address: Where process 0 listens.
        """
        count = len(self._actors)
        self._address = address
        self._ray.get([self._start(rank) for rank in range(count)], timeout=_ANSWER_S)
        deciding = {0} if self._launcher.has_groups else {*range(count)}
        while not deciding & self._statuses.keys():
            self._poll()
        has_failed = any(self._statuses.get(rank) for rank in deciding)
        # For process 0 to tell its clients; without a failure, for all to end by themselves.
        patience_s = _PATIENCE_S if has_failed else _CLEAN_END_S
        until_s = time.monotonic() + patience_s
        while len(self._statuses) < count and time.monotonic() < until_s:
            self._poll()
        for rank in set(range(count)) - self._statuses.keys():
            logger.error("rank %d has not ended %g s after another process; it is killed", rank, patience_s)
            self._send(rank, signal.SIGKILL)
        return self._statuses.get(0, EXIT_FAILED) or (EXIT_FAILED if has_failed else 0)

    def _start(self, rank: int) -> Any:
        """Let an actor start its process; return what to wait for."""
        place = (self._address, len(self._actors), rank, self._secret)
        return self._actors[rank].start.remote(*place, json.dumps(self._launcher.command_of(rank)))

    def _poll(self) -> None:
        """Wait a moment; pass on signals, and what the processes have written; note which have ended."""
        time.sleep(_POLL_S)
        while (number := self._launcher.take_signal()) is not None:
            self._send(0, number)
        for rank in sorted(set(range(len(self._actors))) - self._statuses.keys()):
            try:
                status, lines = json.loads(self._ray.get(self._actors[rank].poll.remote(), timeout=_ANSWER_S))
            except self._ray.exceptions.RayError as error:
                logger.error("rank %d is lost with its actor: %s", rank, type(error).__name__)
                self._statuses[rank] = EXIT_FAILED
                continue
            for number, line in lines:
                stream = sys.stdout if (rank, number) == (0, 1) else sys.stderr
                print(line, end="", file=stream, flush=True)
            if status is None:
                continue
            if status:
                logger.error("rank %d %s", rank, end_of(status))
            goes_on = self._launcher.restarts_groups and 0 not in self._statuses
            if rank and goes_on and status not in (0, EXIT_BAD_START):
                logger.error("rank %d is started again", rank)
                self._start(rank)
            else:
                self._statuses[rank] = status

    def _send(self, rank: int, number: int) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actors[rank].send_signal.remote(number), timeout=_ANSWER_S)


def num_devices(arguments: Mapping[str, Any]) -> int:
    """Return the number of devices that an engine of these arguments has."""
    sizes = {name: int(arguments.get(name) or 1) for name in _SIZES}
    if arguments.get("mesh") is not None:
        sizes |= parse_mesh(arguments["mesh"], {})
    return math.prod(sizes.values())


def _connected() -> Any:
    """Return the module ``ray``, connected to a cluster that only those with its token use, or only this machine.

    Raises:
        ConfigError: Ray is absent, there is no cluster, or anybody could use it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change to come
    flag = "distributed_executor_backend=ray"
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"{flag} requires the package ray >= 2.54: pip install 'jaxserve[ray]' ({error})") from error
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        raise ConfigError(
            f"{flag}: no Ray cluster at {address}: start one with ray start, or set RAY_ADDRESS"
        ) from error
    open_nodes = [each["NodeManagerAddress"] for each in ray.nodes() if each["Alive"]]
    open_nodes = [each for each in open_nodes if not ipaddress.ip_address(each).is_loopback]
    if open_nodes and os.environ.get("RAY_AUTH_MODE") != "token":
        ray.shutdown()
        raise ConfigError(
            f"{flag}: other machines can reach the Ray cluster at {open_nodes[0]}, and it asks them for no token: set "
            "RAY_AUTH_MODE=token for it and for this command"
        )
    return ray


def _without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what Ray sets for its own workers: one thread, its address and its token."""
    kept = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
    if kept.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]
    return kept
