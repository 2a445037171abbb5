"""The life of an engine process, ``python -m jaxserve.server.engine_process``: start the engine, serve, end."""

import argparse
import contextlib
import dataclasses
import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from checkpoints import CheckpointError
from jaxserve.api.config import SERVING_DEFAULTS, EngineConfig
from jaxserve.api.config_checks import MESH_FIELDS
from jaxserve.api.errors import ConfigError, JaxserveError
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.child_process import EXIT_BAD_START, EXIT_FAILED
from jaxserve.engine.loop import Loop
from jaxserve.engine.model_defaults import generation_defaults
from jaxserve.engine.resharding import Resharder
from jaxserve.engine.startup import StartedEngine, start_engine
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.frames import HEADER, FrameError, check_length
from jaxserve.garbage import lasting_objects_replaced, spare_lasting_objects
from jaxserve.group.leader import Leader
from jaxserve.group.settings import GroupPlace
from jaxserve.log_output import LogFormat, end_process, queued_log, stacks_of_threads
from jaxserve.models.drafters.speculators import with_verifier
from jaxserve.server.engine_process.outbox import Outbox
from jaxserve.server.engine_process.serving import Resharded, Serving, max_num_seqs
from jaxserve.server.engine_process.spawn import STACKS_SIGNAL
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.resources import switch_threads_often
from jaxserve.server.wire import (
    MAX_TO_ENGINE_BYTES,
    EngineInfo,
    Failure,
    Start,
    Stop,
    ToEngine,
    sendable_error,
    unpack,
)
from jaxserve.text.chat_prompt import read_template
from sharding import ensure_cpu_devices

logger = logging.getLogger(__name__)

_FLUSH_S = 5.0
_HEARTBEAT_S = 1.0


def main() -> None:
    """Read the command line and run an engine."""
    parser = argparse.ArgumentParser(description="Runs the engine of a server; started by its front end.")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the front end")
    parser.add_argument("--log-level", type=int, default=logging.INFO, help="least level of this package's log")
    parser.add_argument("--log-format", choices=typing.get_args(LogFormat), default="text", help="form of the log")
    parser.add_argument("--log-name", default="engine", help="what the log calls this process")
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("jaxserve").setLevel(options.log_level)
    with queued_log(options.log_format, options.log_name):
        _run(options.fd)


def _run(fd: int) -> NoReturn:
    """Run an engine until the front end stops it or it fails."""
    switch_threads_often()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)  # in C: works also when no Python thread can run
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the front end, which says when to end
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    inbox, outbox = Inbox(connection), Outbox(connection)
    leaders = list[Leader]()
    try:
        start = inbox.read_start()
        loop = _serve(start, inbox, outbox, leaders)
    except Exception as error:
        if not isinstance(error, JaxserveError | CheckpointError):
            logger.exception("the engine could not start")
        if not isinstance(error, JaxserveError):  # a damaged checkpoint or a wrong value is for the user to correct
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            error = ConfigError(text) if isinstance(error, ValueError) else JaxserveError(text)
        for leader in leaders:
            leader.end(str(error))
        outbox.send(Failure(sendable_error(error)))
        _exit(outbox, EXIT_BAD_START)
    loop.wait_ended()
    if loop.failure is None:
        loop.stop()
        _exit(outbox, 0)
    outbox.send(Failure(sendable_error(JaxserveError(f"the engine stopped: {loop.failure}"))))
    _exit(outbox, EXIT_FAILED)


class Inbox:
    """Reads messages on a thread of its own from the beginning, so that the end of the front end is always noticed.

    Args:
        connection: The socket to the front end.
    """

    def __init__(self, connection: socket.socket):
        self._file = connection.makefile("rb")
        self._serving: Serving | None = None

    def read_start(self) -> Start:
        """Read the first message, and let the thread read the others.

        Raises:
            ConfigError: It is not ``Start``.
        """
        for message in self._messages():
            if not isinstance(message, Start):
                raise ConfigError(f"the first message must be Start, got {type(message).__name__}")
            threading.Thread(target=self._run, name="jaxserve-inbox", daemon=True).start()
            return message
        sys.exit(0)

    def hand_to(self, serving: Serving) -> None:
        """Hand all messages to ``serving`` from now on, and stop it when the front end has ended."""
        self._serving = serving

    def _run(self) -> None:
        for message in self._messages():
            if self._serving is not None:
                try:
                    self._serving.handle(message)
                except Exception:  # one message must not end the engine of the others
                    logger.exception("dropped a message of type %s", type(message).__name__)
            elif isinstance(message, Stop):
                break
            else:
                logger.error("dropped a %s that came before the engine was ready", type(message).__name__)
        if self._serving is None:
            os._exit(0)
        self._serving.stop(0.0)

    def _messages(self) -> Iterator[ToEngine]:
        with contextlib.suppress(OSError):
            while len(header := self._file.read(HEADER.size)) == HEADER.size:
                try:
                    length = check_length(HEADER.unpack(header)[0], MAX_TO_ENGINE_BYTES)
                except FrameError:  # the beginning of the next frame is unknown
                    logger.exception("cannot read the front end's messages")
                    return
                body = self._file.read(length)
                if len(body) < length:
                    return
                try:
                    message = unpack(body)
                except Exception:
                    logger.exception("dropped a message that cannot be read")
                    continue
                yield message


def watch(loop: Loop, outbox: Outbox, timeout_s: float) -> NoReturn:
    """Send heartbeats forever, and end the process with all stacks in its log if the engine's thread hangs.

    Only time in which this thread ran is counted: a process that was stopped, or whose machine was paused, goes on.
    If no Python thread can run, no heartbeats are sent, and the front end asks for the stacks and kills the process.

    Args:
        loop: Runs the engine.
        outbox: Sends messages to the front end.
        timeout_s: Seconds without progress; 0: never end the process.
    """
    num_done, hung_s = -1, 0.0
    interval_s = min(_HEARTBEAT_S, timeout_s / 4) if timeout_s else _HEARTBEAT_S
    while True:
        if num_done != loop.num_done or loop.is_idle:
            num_done, hung_s = loop.num_done, 0.0
        elif timeout_s and hung_s >= timeout_s:
            logger.error("no step was completed for %g s; %s", timeout_s, stacks_of_threads())
            end_process(EXIT_FAILED)
        outbox.send_heartbeat()
        time.sleep(interval_s)
        hung_s += interval_s


def _join(place: GroupPlace, outbox: Outbox) -> Leader:
    """Return the leader of the group, which is to join; its failure ends this process."""

    def lost(error: JaxserveError) -> None:
        outbox.send(Failure(sendable_error(error)))
        _exit(outbox, EXIT_FAILED)

    return Leader(place, lost)


def _serve(start: Start, inbox: Inbox, outbox: Outbox, leaders: list[Leader]) -> Loop:
    """Start the engine and everything that serves it; add the leader of its group to ``leaders``."""
    if start.startup_timeout:  # a timer in C, as in `watch`
        faulthandler.dump_traceback_later(start.startup_timeout, exit=True)
    given = EngineConfig.from_arguments(**{"model": "demo", **SERVING_DEFAULTS, **start.engine_arguments})
    config = with_verifier(dataclasses.replace(given, **start.moved))
    leaders += [] if start.group is None else [_join(start.group, outbox)]
    for leader in leaders:
        leader.join(start.moved)
    if start.moved and not leaders:  # it may move back to the mesh of its arguments
        ensure_cpu_devices(math.prod(getattr(given, name) for name in MESH_FIELDS.values()))
    started = start_engine(config, *leaders)
    logger.info("%s", started.ledger)
    stats = None if config.disable_log_stats else StatsLogger(started.ledger.device)
    loop = Loop(started.engine, stats)
    resharder, fields = Resharder(config, started, given), _default_fields(started, config)
    template, tokenizer = read_template(config.chat_template), started.engine.tokenizer

    def describe() -> EngineInfo:
        model = _model(resharder.started, resharder.config)
        limit = max_output_tokens(start.engine_arguments, fields)
        chosen = {"chat_template": template, "parsers": started.parsers, "has_states": started.has_states}
        info = EngineInfo(model, fields, limit, **chosen)
        if tokenizer is None:
            return info
        named = {"chat_templates": tokenizer.chat_templates, "special_tokens": tokenizer.special_tokens}
        return dataclasses.replace(info, **named, text_bound=tokenizer.text_bound)

    def reshard(mesh: str | None, layout: str | None) -> Resharded:
        with lasting_objects_replaced():
            report = resharder.reshard(mesh, layout, loop.run, loop.deliver)
        return dataclasses.asdict(report), describe(), resharder.moved

    serving = Serving(started, loop, outbox, template, reshard)
    spare_lasting_objects()
    inbox.hand_to(serving)
    faulthandler.cancel_dump_traceback_later()
    outbox.send(describe())
    watching = (loop, outbox, start.watchdog_timeout)
    threading.Thread(target=watch, args=watching, name="jaxserve-watchdog", daemon=True).start()
    return loop


def max_output_tokens(arguments: Mapping[str, Any], default_fields: Mapping[str, Any]) -> int | None:
    """Return the operator's ``max_new_tokens``, which is a limit as in vLLM; the model's own is only a default."""
    if arguments.get("generation_config", "auto") not in ("auto", "vllm"):
        return default_fields.get("max_tokens")
    return (arguments.get("override_generation_config") or {}).get("max_new_tokens")


def _default_fields(started: StartedEngine, config: EngineConfig) -> dict[str, Any]:
    """Return the sampling parameters that the model's defaults change, or name although they equal Python's default."""
    changed, python = vars(started.default_params), vars(SamplingParams())
    fields = {name: value for name, value in changed.items() if value is not None and value != python[name]}
    if generation_defaults(config, started.plan.directory).get("max_new_tokens") is not None:
        fields["max_tokens"] = started.default_params.max_tokens
    return fields


def _model(started: StartedEngine, config: EngineConfig) -> model_pb2.Model:
    plan, ledger = started.plan, started.ledger
    sharded = plan.models[0]
    return model_pb2.Model(
        root=config.model,
        max_model_len=plan.max_model_len,
        architecture=plan.config.architecture,
        dtype=sharded.policy.weights,
        vocab_size=plan.config.vocab_size,
        mesh=[model_pb2.MeshAxis(name=name, size=size) for name, size in plan.mesh_sizes.items()],
        device=sharded.mesh.devices.flat[0].device_kind,
        layout=sharded.layout.name,
        attention_backend=sharded.kernel.name,
        kv_cache=model_pb2.KvCache(
            num_pages=ledger.num_pages,
            page_size=ledger.page_size,
            num_tokens=ledger.num_tokens,
            max_concurrency=ledger.max_concurrency,
            dtype=sharded.policy.kv,
            size_bytes=sum(sharded.pool_bytes * sharded.mesh.devices.size for sharded in plan.models),
        ),
        memory=[model_pb2.MemoryUse(name=name, size_bytes=size) for name, size in ledger.lines],
        max_num_seqs=max_num_seqs(started),
        max_num_batched_tokens=plan.max_num_batched_tokens * plan.num_lanes,
    )


def _exit(outbox: Outbox, status: int) -> NoReturn:
    """Send what waits, then exit without waiting for threads that a failed device or a template may hold up."""
    outbox.close(_FLUSH_S)
    end_process(status)
