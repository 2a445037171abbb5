"""Measures an engine over several processes: sending plans, and the time of a step against one process.

    python scripts/bench_group.py
    python scripts/bench_group.py --model DIR --tokens 200 --rows 4

The first part encodes plans and sends them to a process that reads them and does nothing else: microseconds until the
sender may go on, and of its CPU, the least of several rounds. The second part serves the model from 2 processes of 2
devices each and from 1 process of 4, in turns, and counts the tokens of streams that run together; ``predicted`` is
what ``jaxserve plan`` says for the same devices, measured by its calibration, and for 2 processes with the collectives
between their devices, measured in a group of two. All devices are those of this machine's CPUs. Prints one line of
JSON.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from jaxserve.group.connection import PeerConnection  # noqa: E402  (after the path)
from jaxserve.group.job import join_job  # noqa: E402
from jaxserve.group.messages import CODEC, MAX_BYTES, Launch  # noqa: E402
from jaxserve.group.ports import PortPair  # noqa: E402
from jaxserve.group.settings import GroupPlace  # noqa: E402
from jaxserve.lab.calibration import calibrate  # noqa: E402
from jaxserve.lab.devices import Device  # noqa: E402
from jaxserve.lab.measure import collective_times  # noqa: E402
from jaxserve.lab.plan.plan import plan  # noqa: E402
from jaxserve.scheduling.plan import StepPlan  # noqa: E402
from jaxserve.scheduling.plan_codec import SentRows, encode_plans  # noqa: E402
from scripts.server_child import RunningServer, running_server  # noqa: E402

MESHES = ("tensor=4", "stage=2,tensor=2")
ROUNDS = 5
CLOCKS = {"elapsed": time.perf_counter, "CPU": time.thread_time}
_READER = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]))\nwhile s.recv(1 << 20): pass"


def decode_plan(number: int, rows: int, same_as: int | None = None) -> StepPlan:
    """A step of decode rows."""
    made = StepPlan(number, same_rows_as=same_as)
    made.add_decode_rows(range(rows))
    return made


def prefill_plan(number: int, num_tokens: int) -> StepPlan:
    """A step of one prompt."""
    made = StepPlan(number)
    made.add_row(0, 0, range(num_tokens), 1)
    return made


def send_times() -> dict[str, dict[str, float]]:
    """Microseconds of encoding and sending a step of each kind."""
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
    theirs.connect(ours.getsockname())
    reader = subprocess.Popen([sys.executable, "-c", _READER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    connection = PeerConnection(ours.accept()[0])
    kinds: dict[str, Callable[[int], StepPlan]] = {
        "64 unchanged rows": lambda number: decode_plan(number, 64, same_as=0),
        "64 changed rows": lambda number: decode_plan(number, 64),
        "prefill of 8192": lambda number: prefill_plan(number, 8192),
    }
    found = {}
    for name, make in kinds.items():
        times = [_times_of(connection, make) for _ in range(ROUNDS)]
        found[name] = {clock: min(each[clock] for each in times) for clock in CLOCKS}
    connection.close()
    reader.wait()
    return found


def _times_of(connection: PeerConnection, make: Callable[[int], StepPlan], count: int = 500) -> dict[str, float]:
    sent = SentRows()
    encode_plans([decode_plan(0, 64)], sent)
    plans, passed_s = [make(number) for number in range(1, count + 1)], dict.fromkeys(CLOCKS, 0.0)
    for number, each in enumerate(plans):
        start_s = {name: clock() for name, clock in CLOCKS.items()}
        connection.send_frame(CODEC.pack(Launch(number, encode_plans([each], sent)), MAX_BYTES))
        for name, clock in CLOCKS.items():
            passed_s[name] += clock() - start_s[name]
        time.sleep(0.0005)  # for the reader
    return {name: 1e6 * seconds / count for name, seconds in passed_s.items()}


def step_ms(server: RunningServer, rows: int, tokens: int) -> float:
    """Milliseconds between tokens of streams that run together."""
    body = {"prompt": "12+30=", "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}

    def ask(_: int) -> None:
        request = urllib.request.Request(
            f"{server.http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            response.read()

    with concurrent.futures.ThreadPoolExecutor(rows) as pool:
        list(pool.map(ask, range(rows)))  # everything has run once
        start_s = time.perf_counter()
        list(pool.map(ask, range(rows)))
    return 1e3 * (time.perf_counter() - start_s) / tokens


def measured(options: argparse.Namespace, mesh: str, count: int) -> float:
    """Milliseconds of a step of a server of ``count`` processes."""
    launcher = ("launch", "--nproc", str(count)) if count > 1 else ()
    flags = ["--mesh", mesh, "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", str(options.rows)]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(options.model, flags, Path(folder) / "log", launcher=launcher) as server,
    ):
        return step_ms(server, options.rows, options.tokens)


def link_times() -> list[tuple[str, int, int, float]]:
    """Times of collectives between the devices of two processes, as ``Link.measured`` has them."""
    ports = PortPair()
    command = [sys.executable, __file__, "--port", str(ports.first), "--rank"]
    ports.close()
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
    children = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    printed = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError("the processes whose collectives are measured have failed")
    *_, line = (line for line in printed[0].splitlines() if line.startswith("[["))  # gloo prints others
    return [(kind, count, num_bytes, time_s) for kind, count, num_bytes, time_s in json.loads(line)]


def measure_links(rank: int, port: int) -> None:
    """Print the times of collectives as one of two processes."""
    join_job(GroupPlace("127.0.0.1", port, 2, rank, b"", join_timeout=60.0, step_timeout=60.0))
    print(json.dumps(list(collective_times(jax.devices()))), flush=True)
    jax.distributed.shutdown()


def with_links(device: Device) -> Device:
    """The device, with collectives between two processes."""
    times = link_times()
    kinds = {kind for kind, *_ in times}
    others = [each for each in device.link.measured if each[0] not in kinds]
    link = dataclasses.replace(device.link, name="two processes", measured=(*times, *others))
    return dataclasses.replace(device, link=link)


def compared(options: argparse.Namespace, mesh: str, device: Device, linked: Device) -> dict[str, float]:
    """Milliseconds of a step in 2 processes and in 1, measured in turns, and predicted.

    Args:
        options: Model, rows and tokens.
        mesh: Of 4 devices.
        device: This machine's, in one process.
        linked: The same in two processes.
    """
    turns = [[measured(options, mesh, count) for count in (2, 1)] for _ in range(options.rounds)]
    two, one = (statistics.median(column) for column in zip(*turns, strict=True))
    settings = {"num_seqs": options.rows, "dtype": "float32", "max_model_len": 512}
    found = {"2x2": two, "1x4": one, "ratio": two / one}
    for name, each in (("predicted 2x2", linked), ("predicted 1x4", device)):
        planned = plan(options.model, mesh, device=each, hosts=1, **settings)
        found[name] = 1e3 * planned.decode_of(options.rows).step_s
    return found


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory of a model with at least 2 layers")
    parser.add_argument("--rows", type=int, default=4, help="streams that run together")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the two servers; 0: only send plans")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure_links(options.rank, options.port)
        return
    found: dict[str, Any] = {"load": os.getloadavg()[0], "send_us": send_times()}
    if options.rounds:
        device = calibrate(4)
        linked = with_links(device)
        found["step_ms"] = {mesh: compared(options, mesh, device, linked) for mesh in MESHES}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
