"""``jaxserve launch``: start the processes of a group on this machine, and end all when one ends."""

import argparse
import dataclasses
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from jaxserve.api.errors import ConfigError
from jaxserve.child_process import EXIT_BAD_START, EXIT_FAILED, child_environment, end_of, shell_status
from jaxserve.group.ports import LOOPBACK, PortPair
from jaxserve.group.replicas import mesh_sizes, processes_of_each
from jaxserve.group.settings import SECRET_BYTES, call_when_closed
from jaxserve.log_output import end_process

logger = logging.getLogger(__name__)

HELP = "run a command in several processes on this machine: one engine, or a group for each replica of it"
_POLL_S = 0.1
_PATIENCE_S = 5.0  # for the others once one has ended
_OWN_FLAGS = (
    *("--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless", "--group-secret-file"),
    *("--processes-per-group", "--parent-fd"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The number of processes, and the command that they run."""
    parser.add_argument("--nproc", type=int, required=True, help="number of processes, each with as many devices")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="serve MODEL ...", help="the command")


def run(options: argparse.Namespace) -> None:
    """Run the processes until they have ended; exit with the status of process 0.

    Raises:
        ConfigError: The command or the number of processes is wrong.
    """
    command: list[str] = options.command
    if options.nproc < 1:
        raise ConfigError(f"nproc: expected a number >= 1, got {options.nproc}")
    if command[:1] != ["serve"]:
        raise ConfigError(f"jaxserve launch runs the command serve, got {' '.join(command[:1]) or 'none'}")
    given = next((flag for flag in _OWN_FLAGS if any(part.partition("=")[0] == flag for part in command)), None)
    if given is not None:
        raise ConfigError(f"{given} is for processes that are started one by one; jaxserve launch sets it")
    if options.nproc == 1:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "jaxserve", *command])
    sizes = mesh_sizes(options.with_config(command[1:]))
    if sizes is not None and sizes["data_parallel_size"] > 1:  # the front end starts the processes of each replica
        each = f"--processes-per-group={processes_of_each(options.nproc, sizes)}"
        os.execv(sys.executable, [sys.executable, "-P", "-m", "jaxserve", *command, each])
    sys.exit(Launcher(options.nproc, command).run())


def entry_arguments(port: int, count: int, rank: int, secret_fd: int, command: Sequence[str]) -> list[str]:
    """Return the arguments of Python for a process of a group on this machine.

    Args:
        port: Where process 0 listens.
        count: Number of processes.
        rank: Which of them it is.
        secret_fd: Descriptor of a pipe with the group's secret.
        command: The command of ``jaxserve``.
    """
    place = ["--address", f"{LOOPBACK}:{port}", "--count", str(count), "--rank", str(rank)]
    return ["-P", "-m", "jaxserve.group", *place, "--secret-fd", str(secret_fd), *command]


@dataclasses.dataclass
class _Process:
    """A process of the group; ``pipe`` is the end of its pipe that ends it when this process does."""

    popen: "subprocess.Popen[bytes]"
    pipe: int


def follow(command: Sequence[str]) -> int:
    """Run a headless process, and start it again when its group has failed; return its last status.

    It ends when this process does, however that ends.

    Args:
        command: Its command, with ``--restart-engine``.
    """
    reading, _ = os.pipe()  # the other side is open as long as this process runs
    processes: list[subprocess.Popen[bytes]] = []
    num_signals = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        processes[-1].send_signal(number)

    while True:
        own = ("--no-restart-engine", f"--parent-fd={reading}")
        started = [sys.executable, "-P", "-m", "jaxserve", *command, *own]
        environment = child_environment()
        processes.append(subprocess.Popen(started, pass_fds=(reading,), start_new_session=True, env=environment))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        status = processes[-1].wait()
        if status in (0, EXIT_BAD_START) or num_signals:
            return shell_status(status)
        logger.error("this process of the group %s; it is started again", end_of(status))


def end_with(descriptor: int) -> None:
    """End this process at once when the other side of a pipe is closed.

    Raises:
        ConfigError: There is no such descriptor.
    """

    def end() -> NoReturn:
        logger.error("the process that started this one has ended; this one ends too")
        end_process(EXIT_FAILED)

    call_when_closed("parent_fd", descriptor, end)


class Launcher:
    """Starts, watches and ends the processes of a group.

    Args:
        count: Number of processes.
        command: The command that each runs.
    """

    def __init__(self, count: int, command: Sequence[str]):
        self._count = count
        self._command = list(command)
        self._restarts = "--restart-engine" in command
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._ports = PortPair()
        self._processes: list[_Process] = []
        self._reported = set[int]()
        self._has_failed = False

    def run(self) -> int:
        """Start all processes, and wait until they have ended; return the status of process 0, or 70 if it is 0 and
        another one failed first."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        try:
            self._processes = [self._start(rank) for rank in range(self._count)]
            leader = self._processes[0].popen
            while leader.poll() is None:
                time.sleep(_POLL_S)
                self._look_after_followers()
            self._wait_for_all()
            return shell_status(leader.returncode) or (EXIT_FAILED if self._has_failed else 0)
        finally:
            for process in self._processes:
                if process.popen.poll() is None:
                    process.popen.kill()
                    process.popen.wait()
                os.close(process.pipe)
            self._ports.close()

    def _start(self, rank: int) -> _Process:
        reading, writing = os.pipe()
        os.write(writing, self._secret)
        popen = subprocess.Popen(
            [sys.executable, *entry_arguments(self._ports.first, self._count, rank, reading, self._command)],
            pass_fds=(reading,),
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else sys.stderr.fileno(),  # libraries print; only process 0 says its address
            start_new_session=True,  # a terminal's Ctrl-C comes to this process alone
            env=child_environment(),
        )
        os.close(reading)
        return _Process(popen, writing)

    def _look_after_followers(self) -> None:
        """Start followers that have ended again, if the engine is to be restarted; else give the others some time."""
        for rank in range(1, self._count):
            process = self._processes[rank]
            status = process.popen.poll()
            if status is None:
                continue
            if self._processes[0].popen.poll() is not None:
                return
            self._report(rank, status)
            if not self._restarts:
                self._has_failed = status != 0
                self._end_leader()
                return
            os.close(process.pipe)
            self._processes[rank] = self._start(rank)

    def _end_leader(self) -> None:
        """Give process 0 time to tell its clients; then end it."""
        leader = self._processes[0].popen
        for ask in (None, leader.terminate, leader.kill):
            if ask is not None:
                ask()
            try:
                leader.wait(_PATIENCE_S)
                return
            except subprocess.TimeoutExpired:
                logger.error("rank 0 has not ended %g s after another process", _PATIENCE_S)

    def _wait_for_all(self) -> None:
        until_s = time.monotonic() + _PATIENCE_S
        for rank, process in enumerate(self._processes):
            try:
                status = process.popen.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.error("rank %d has not ended %g s after rank 0; it is killed", rank, _PATIENCE_S)
            else:
                if rank:
                    self._report(rank, status)

    def _report(self, rank: int, status: int) -> None:
        """Log how a process has ended, once and only if it failed."""
        process = self._processes[rank].popen.pid
        if status and process not in self._reported:
            self._reported.add(process)
            logger.error("rank %d (process %d) %s", rank, process, end_of(status))

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to process 0, which drains and lets the others end."""
        for process in self._processes[:1]:
            process.popen.send_signal(number)
