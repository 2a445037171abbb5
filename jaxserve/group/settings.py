"""The settings of a group of processes that run one engine."""

import contextlib
import dataclasses
import importlib.metadata
import ipaddress
import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxserve.api.errors import ConfigError
from jaxserve.group.launchers import launched_settings
from jaxserve.group.replicas import ReplicaGroups, processes_of_each, sizes_of

SECRET_BYTES = 32
_MAX_PORT = 65534  # JAX's coordinator has the next one


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Settings of one engine over several processes, each on its own host or beside the others on one.

    Attributes:
        nnodes: Number of processes that run the engine together, each with as many devices; all get the same flags.
            With data_parallel_size, each replica is a group of as many of them, in the order of node_rank.
        node_rank: Index of this process, from 0; process 0 plans the steps, and serves HTTP and gRPC.
        master_addr: Address of process 0, which the others connect to.
        master_port: Port at that address for the plans of steps; JAX's coordinator uses the next one.
        headless: Serve neither HTTP nor gRPC, as every process but number 0 does.
        launcher: What has started the processes and says in the environment of each how many there are, which one it
            is, and where process 0 is: slurm (srun) or lws (a LeaderWorkerSet of Kubernetes).
        distributed_executor_backend: What starts the nnodes processes of one command: ray starts each in a process of a
            Ray cluster's actor. Others have no effect.
        group_secret_file: File with at least 32 secret bytes that only its owner can read, the same for all processes.
        group_secret_fd: Descriptor of a pipe from which the secret is read; the process ends when the pipe does.
        group_certfile: File with the certificate of this process, in PEM, for connections over TLS within the group;
            that of process 0 must be for master_addr. Requires group_keyfile and group_ca_certs.
        group_keyfile: File with the key of group_certfile.
        group_ca_certs: File with the certificate of the authority that signs those of all processes of the group.
        processes_per_group: Number of processes of each of the data_parallel_size replicas, which are then groups with
            processes of this machine, a scheduler and pages of their own, so that the end of one is not that of the
            others; 0: one process runs all replicas. ``jaxserve launch`` sets it.
        parent_fd: Descriptor of a pipe; this process ends at once when its other side is closed. With restart_engine,
            headless processes set it for those that they start.
        join_timeout: Seconds within which all processes must have joined.
        step_timeout: Seconds after which a process that has not finished a step ends the group.
    """

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    headless: bool = False
    launcher: Literal["slurm", "lws"] | None = None
    distributed_executor_backend: Literal["mp", "uni", "ray"] | None = None
    group_secret_file: str | None = None
    group_secret_fd: int | None = None
    group_certfile: str | None = None
    group_keyfile: str | None = None
    group_ca_certs: str | None = None
    processes_per_group: int = 0
    parent_fd: int | None = None
    join_timeout: float = 300.0
    step_timeout: float = 60.0

    @classmethod
    def from_arguments(
        cls, given: Mapping[str, Any], is_insecure: bool, environment: Mapping[str, str] = os.environ
    ) -> "GroupConfig":
        """Return the given settings, checked.

        Args:
            given: Settings by name.
            is_insecure: Whether the network is trusted (``insecure`` of the server).
            environment: Where ``launcher`` finds the place of this process.

        Raises:
            ConfigError: A setting is missing, wrong, or does not go with the others.
        """
        if given.get("launcher"):
            given = launched_settings(given, environment)
        config = cls(**given)
        config._check_numbers()
        if config.is_on_ray:
            config._check_ray(given)
            return config
        if config.nnodes == 1 and config.launcher is not None:
            return config
        if config.nnodes == 1:
            harmless = (
                "nnodes node_rank join_timeout step_timeout distributed_executor_backend processes_per_group".split()
            )
            extra = [name for name in given if name not in harmless]
            extra = [name for name in extra if given[name] is not False]
            if extra:
                raise ConfigError(f"{extra[0]} is for an engine of several processes: set nnodes to their number")
            return config
        if config.processes_per_group:
            raise ConfigError(
                f"processes_per_group={config.processes_per_group}: the command of all replicas starts their "
                f"processes, but nnodes={config.nnodes}; use one"
            )
        config._check_place(is_insecure)
        return config

    def _check_numbers(self) -> None:
        if self.nnodes < 1:
            raise ConfigError(f"nnodes: expected a number >= 1, got {self.nnodes}")
        if self.processes_per_group < 0:
            raise ConfigError(f"processes_per_group: expected a number >= 0, got {self.processes_per_group}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"node_rank: expected 0 to {self.nnodes - 1} for nnodes={self.nnodes}, got {self.node_rank}"
            )
        if self.master_port is not None and not 1 <= self.master_port <= _MAX_PORT:
            raise ConfigError(f"master_port: expected a port from 1 to {_MAX_PORT}, got {self.master_port}")
        for name in ("join_timeout", "step_timeout"):
            if not 1 <= getattr(self, name) <= 86400:
                raise ConfigError(f"{name}: expected seconds from 1 to 86400, got {getattr(self, name):g}")

    def _check_place(self, is_insecure: bool) -> None:
        """Raise ConfigError unless the processes can reach each other safely."""
        if self.master_addr is None or self.master_port is None:
            missing = "master_addr" if self.master_addr is None else "master_port"
            raise ConfigError(f"nnodes={self.nnodes} requires {missing}: where process 0 listens for the others")
        if self.headless != (self.node_rank > 0):
            expected = "set headless" if self.node_rank else "headless is for the others"
            raise ConfigError(f"node_rank={self.node_rank}: only process 0 serves HTTP and gRPC: {expected}")
        if (self.group_secret_file is None) == (self.group_secret_fd is None):
            raise ConfigError(
                f"nnodes={self.nnodes} requires group_secret_file, which processes show each other that they have: "
                f"head -c {SECRET_BYTES} /dev/urandom > FILE; chmod 600 FILE"
            )
        self.check_encryption(self.master_addr, is_insecure)

    def check_encryption(self, address: str, is_insecure: bool) -> None:
        """Raise ConfigError if others could listen to a group whose process 0 is at an address."""
        files = (self.group_certfile, self.group_keyfile, self.group_ca_certs)
        if any(files) and not all(files):
            raise ConfigError("group_certfile, group_keyfile and group_ca_certs go together")
        if is_insecure or _is_loopback(address):
            return
        if not any(files):
            raise ConfigError(
                f"master_addr: other machines can reach {address}, and a group's connections are not encrypted: set "
                "group_certfile, group_keyfile and group_ca_certs, or set insecure if its network is isolated"
            )
        if not jax_has_mtls():
            version = importlib.metadata.version("jax")
            raise ConfigError(
                f"master_addr: other machines can reach {address}, and JAX {version} does not encrypt its own "
                "connections, as 0.11.2 does: set insecure if its network is isolated"
            )

    def _check_ray(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError if what is given is for processes that are started one by one."""
        own = "nnodes master_port join_timeout step_timeout distributed_executor_backend".split()
        own += ["group_certfile", "group_keyfile", "group_ca_certs"]
        extra = [name for name in given if name not in own and given[name]]
        if extra:
            raise ConfigError(f"{extra[0]} does not go with distributed_executor_backend=ray, which sets it")

    @property
    def is_on_ray(self) -> bool:
        """Whether the processes are to be started in a Ray cluster."""
        return self.distributed_executor_backend == "ray"

    @property
    def is_alone(self) -> bool:
        """Whether one process runs the engine."""
        return self.nnodes == 1

    def replicas(self, command: Sequence[str], arguments: Mapping[str, Any]) -> ReplicaGroups | None:
        """Return how the replicas run as groups; None if they do not.

        Args:
            command: The command of ``jaxserve`` that serves them all.
            arguments: Arguments of ``LLM``.

        Raises:
            ConfigError: The replicas cannot have equal numbers of the ``nnodes`` processes.
        """
        each = self.processes_per_group
        if self.nnodes > 1 and (sizes := sizes_of(arguments))["data_parallel_size"] > 1:
            each = processes_of_each(self.nnodes, sizes, "nnodes")
        return ReplicaGroups(each, command, self.join_timeout, self.step_timeout) if each else None

    def place(self, end: Callable[[], None]) -> "GroupPlace":
        """Read the secret; return what this process needs to join.

        Args:
            end: Called once the process that started this one has ended, if it gave the secret's descriptor.

        Raises:
            ConfigError: The secret cannot be read, is too short, or others can read it.
        """
        assert self.master_addr is not None and self.master_port is not None
        if self.group_secret_fd is not None:
            secret = _read_pipe(self.group_secret_fd, end)
        else:
            secret = _read_file(self.group_secret_file or "")
        if len(secret) < SECRET_BYTES:
            raise ConfigError(f"the group's secret has {len(secret)} bytes; expected at least {SECRET_BYTES}")
        return GroupPlace(
            self.master_addr,
            self.master_port,
            self.nnodes,
            self.node_rank,
            secret,
            self.join_timeout,
            self.step_timeout,
            self.group_certfile,
            self.group_keyfile,
            self.group_ca_certs,
        )


@dataclasses.dataclass(frozen=True)
class GroupPlace:
    """What a process needs to join a group: an address, the number of processes, its rank, and the secret."""

    address: str
    port: int
    count: int
    rank: int
    secret: bytes = dataclasses.field(repr=False)
    join_timeout: float
    step_timeout: float
    certfile: str | None = None
    keyfile: str | None = None
    ca_certs: str | None = None

    def in_group(self, address: str, port: int, count: int, rank: int, secret: bytes) -> "GroupPlace":
        """Return the place of this node in a group that is one of several."""
        return dataclasses.replace(self, address=address, port=port, count=count, rank=rank, secret=secret)

    @property
    def log_name(self) -> str:
        """What logs call this process."""
        return f"rank {self.rank} {host_name()}"

    @property
    def coordinator_port(self) -> int:
        """Port of JAX's coordinator."""
        return self.port + 1


def jax_has_mtls() -> bool:
    """Return whether JAX's coordinator and its clients can show each other certificates."""
    return tuple(map(int, re.findall(r"\d+", importlib.metadata.version("jax"))[:3])) >= (0, 11, 2)


def _is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            # Kubernetes gives a Secret's files to root, for the pod's group to read.
            is_mounted = found.st_uid == 0 and os.geteuid() != 0
            if stat.S_IMODE(found.st_mode) & (0o037 if is_mounted else 0o077):
                raise ConfigError(f"group_secret_file: others can read {path}: chmod 600 {path}")
            return file.read(1 << 16)
    except OSError as error:
        raise ConfigError(f"group_secret_file: cannot read {path}: {error.strerror}") from error


def _read_pipe(descriptor: int, end: Callable[[], None]) -> bytes:
    """Read the secret from a pipe, and call ``end`` once its other side is closed."""
    try:
        secret = os.read(descriptor, SECRET_BYTES)
    except OSError as error:
        raise ConfigError(f"group_secret_fd: cannot read descriptor {descriptor}: {error.strerror}") from error
    call_when_closed("group_secret_fd", descriptor, end)
    return secret


def call_when_closed(setting: str, descriptor: int, end: Callable[[], None]) -> None:
    """Call a function, on a thread of its own, once the other side of a pipe is closed. Children do not get the pipe.

    Args:
        setting: Where the descriptor comes from, for messages.
        descriptor: This side of the pipe.
        end: What to call.

    Raises:
        ConfigError: There is no such descriptor.
    """
    try:
        os.set_inheritable(descriptor, False)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read descriptor {descriptor}: {error.strerror}") from error

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, 1):
                pass
        end()

    threading.Thread(target=wait, name="jaxserve-launcher", daemon=True).start()


def host_name() -> str:
    """Return the name of this machine, for messages."""
    return socket.gethostname()
