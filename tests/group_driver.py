"""An engine in several processes without a server: process 0 runs every kind of request, and prints the outcomes."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import tensorstore

from checkpoints.orbax_io import OrbaxReader
from jaxserve.api.config import SERVING_DEFAULTS, EngineConfig
from jaxserve.api.errors import JaxserveError
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.request import parse_prompt
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.engine.resharding import Resharder
from jaxserve.engine.startup import StartedEngine, start_engine
from jaxserve.group.follower import run_follower
from jaxserve.group.leader import Leader
from jaxserve.group.settings import GroupPlace
from jaxserve.models.drafters.speculators import with_verifier
from tests.free_ports import free_ports

NUM_REQUESTS = 24
LIMIT_S = 300
STEPS_BETWEEN_MOVES = 12
_WANTED, _FOUND = "compile_requests_use_cache", "cache_hits"


def run_requests(started: StartedEngine, move: Callable[[], object] = lambda: None) -> list[Any]:
    """Outcome, scores and vector of requests of all kinds in a random order, some of which are preempted; ``move`` is
    called after some steps each."""
    from tests.jaxserve.test_request_mix import REQUESTS, outcome, scores  # starts JAX: not before a group has joined

    order, prepared = random.Random(1), []
    for prompt, params in order.choices(REQUESTS, k=NUM_REQUESTS):
        default = PoolingParams() if order.random() < 0.15 else SamplingParams(**params)
        prepared.append(started.engine.submit(parse_prompt(prompt, default=default)))
    num_steps = 0
    while started.engine.num_unfinished:
        started.engine.step()
        num_steps += 1
        if num_steps % STEPS_BETWEEN_MOVES == 0:
            move()
    outputs = [request.output() for request in prepared]
    return [[outcome(output), scores(output), output.embedding] for output in outputs]


def start(arguments: Mapping[str, Any], leader: Leader | None = None) -> StartedEngine:
    """An engine with a server's defaults."""
    config = EngineConfig.from_arguments(**{**SERVING_DEFAULTS, **arguments})
    return start_engine(with_verifier(config), leader)


def outcomes_of_group(
    arguments: Mapping[str, Any], count: int, directory: Path, moves: Sequence[tuple[str, str | None]] = ()
) -> list[Any]:
    """What the processes of a group give; each has an equal part of the devices.

    Args:
        arguments: Those of ``LLM``.
        count: Number of processes.
        directory: For their files; ``counts`` will have preemptions, prefix hits and late compiles, ``moves`` the
            reports of the moves.
        moves: Meshes and layouts to which the engine moves while requests run.
    """
    (directory / "secret").write_bytes(os.urandom(32))
    given = [json.dumps(dict(arguments)), str(count), str(free_ports()), str(directory)]
    given.append(json.dumps(moves))
    processes = []
    for rank in range(count):
        with (directory / f"log{rank}").open("wb") as log:
            command = [sys.executable, "-m", __name__, str(rank), *given]
            environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        statuses = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(directory / f"log{rank}").read_text() for rank in range(count)]
    assert statuses == [0] * count, "\n".join(logs)
    return json.loads((directory / "outcomes").read_text())


def num_compiled(directory: Path, rank: int) -> tuple[int, int]:
    """Number of programs that a process needed, and of those that it had to compile."""
    events = (directory / f"programs{rank}").read_text().split()
    wanted, found = (events.count(f"/jax/compilation_cache/{name}") for name in (_WANTED, _FOUND))
    return wanted, wanted - found


def num_read(directory: Path, rank: int) -> int:
    """Bytes of checkpoints that a process has read for its parameters."""
    return int((directory / f"bytes{rank}").read_text())


def _count_reads(path: Path) -> None:
    """Write the bytes that this process has read of checkpoints to a file, those that tensorstore reads included."""
    read, read_box, total = os.preadv, OrbaxReader.read, 0

    def write() -> None:
        found = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        path.write_text(str(total + sum(each["values"][0]["value"] for each in found)))

    def counted(*arguments: Any) -> int:
        nonlocal total
        count = read(*arguments)
        total += count
        write()
        return count

    def counted_box(*arguments: Any) -> Any:
        box = read_box(*arguments)
        write()
        return box

    os.preadv, OrbaxReader.read = counted, counted_box  # pyright: ignore[reportAttributeAccessIssue]


def _note(path: Path, event: str) -> None:
    with path.open("a") as file:
        file.write(f"{event}\n")


def _fail(error: JaxserveError) -> NoReturn:
    print(error, file=sys.stderr, flush=True)
    os._exit(70)


def main() -> None:
    """Run one process."""
    rank, count, port, directory = int(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
    arguments = json.loads(sys.argv[2])
    secret = (directory / "secret").read_bytes()
    jax.monitoring.register_event_listener(lambda event, **_: _note(directory / f"programs{rank}", event))
    place = GroupPlace("127.0.0.1", port, count, rank, secret, join_timeout=120.0, step_timeout=60.0)
    _count_reads(directory / f"bytes{rank}")
    if rank:
        run_follower(arguments, place)
    leader = Leader(place, _fail)
    try:
        _lead(leader, arguments, directory)
    except BaseException as error:
        traceback.print_exc()
        leader.end(str(error))
        os._exit(70)
    os._exit(0)


def _lead(leader: Leader, arguments: Mapping[str, Any], directory: Path) -> None:
    leader.join()
    started = start(arguments, leader)
    config = with_verifier(EngineConfig.from_arguments(**{**SERVING_DEFAULTS, **arguments}))
    resharder, moves, reports = Resharder(config, started), json.loads(sys.argv[6]), list[Any]()

    def move() -> None:
        for each in moves[len(reports) : len(reports) + 1]:
            try:
                reports.append(dataclasses.asdict(resharder.reshard(*each)))
            except ValueError as error:  # the engine goes on as it was
                reports.append(str(error))

    found = run_requests(started, move)
    (directory / "moves").write_text(json.dumps(reports))
    (directory / "outcomes").write_text(json.dumps(found))
    shards = [
        sum(
            each.weight_bytes
            for each in started.plan.models
            for device in each.mesh.devices.flat
            if device.process_index == rank
        )
        for rank in range(leader.place.count)
    ]
    (directory / "shards").write_text(json.dumps(shards))
    names = ("num_preemptions", "prefix_cache_hits", "compiles_after_ready")
    counts = {metric.name: metric.value for metric in started.engine.metrics() if metric.name.endswith(names)}
    (directory / "counts").write_text(json.dumps(counts))
    started.engine.close()


if __name__ == "__main__":
    main()
