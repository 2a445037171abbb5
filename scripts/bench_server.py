"""Measures the overhead of a server over its engine, side by side in one run.

    python scripts/bench_server.py --model DIRECTORY --num-prompts 64 --output-json FILE

* Overhead: tokens per second over HTTP and over gRPC against ``LLM.generate``: the same prompts, the same settings, no
  prefix cache (each prompt comes once over each way). Both engines are loaded all the time, each in a process of its
  own, and one works at a time; repetitions are interleaved, so that what else the machine does falls on all alike. The
  client works on the same cores as the server: its time is in the ratio.
* Streams: many at once, each compared with ``LLM.generate``'s output at temperature 0: a token that was dropped,
  doubled or came out of order makes another text.
* Disconnects: how long a short request takes while many streams are cut off, against an idle server.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import numpy as np  # noqa: E402  (after the path)

from jaxserve.bench.serve.grpc import GrpcBackend, grpc_model, open_channels  # noqa: E402
from jaxserve.bench.serve.http import HttpClient  # noqa: E402
from jaxserve.bench.serve.load import run_load  # noqa: E402
from jaxserve.bench.serve.metrics import output_length  # noqa: E402
from jaxserve.bench.serve.openai import OpenAIBackend  # noqa: E402
from jaxserve.bench.serve.records import Backend, BenchRequest, BenchResponse  # noqa: E402
from jaxserve.bench.serve.tokens import plain_range  # noqa: E402
from scripts.server_child import RunningServer, as_flags, running_server  # noqa: E402

APIS = ("http", "grpc")
SAMPLING = {"temperature": 0.0, "ignore_eos": True}
IDLE_REPETITIONS = 20


class OfflineEngine:
    """``LLM`` in a separate process, idle between calls.

    Args:
        arguments: Those of ``LLM``.
        log: File of what it writes to standard error.
    """

    def __init__(self, arguments: dict[str, Any], log: Path):
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--as-offline-engine", json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self.is_ready = self._read()

    def generate(self, requests: list[BenchRequest]) -> dict[str, Any]:
        """Return texts and numbers of tokens of all completions, and the seconds that ``LLM.generate`` took."""
        assert self._process.stdin is not None
        asked = [[request.prompt, request.max_tokens] for request in requests]
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Stop the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the offline engine ended with status {self._process.wait()}")
        return json.loads(line)


def work_offline(arguments: dict[str, Any]) -> None:
    """Run the process of ``OfflineEngine``."""
    from jaxserve import LLM, SamplingParams  # in this process alone: the client needs no JAX

    with LLM(**arguments) as llm:
        print(json.dumps({"is_ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
            params = [SamplingParams(**SAMPLING, max_tokens=count) for _, count in asked]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            texts = [output.outputs[0].text for output in outputs]
            counts = [len(output.outputs[0].token_ids) for output in outputs]
            print(json.dumps({"texts": texts, "num_tokens": counts, "seconds": seconds}), flush=True)


class ApiClients:
    """A server's HTTP and gRPC APIs, as load-test backends."""

    def __init__(self, server: RunningServer, num_streams: int):
        self._server = server
        self._num_channels = -(-num_streams // 100)

    async def run(self, api: str, work: Callable[[Backend], Awaitable[Any]]) -> Any:
        """Run ``work`` with a backend."""
        if api == "http":
            client = HttpClient(self._server.http)
            try:
                return await work(OpenAIBackend(client, "/v1/completions", "", SAMPLING))
            finally:
                await client.close()
        channels = open_channels(self._server.grpc, self._num_channels)
        try:
            return await work(GrpcBackend(channels, "", SAMPLING, {}, {}))
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))

    async def vocab_size(self) -> int:
        """Return the model's."""
        (channel,) = open_channels(self._server.grpc, 1)
        try:
            return int((await grpc_model(channel, "", {})).vocab_size)
        finally:
            await channel.close()


def random_requests(count: int, num_input: int, num_output: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    """Prompts of random token ids."""
    generator = np.random.default_rng(seed)
    ids = plain_range(vocab_size)
    drawn = generator.integers(ids.start, ids.stop, (count, num_input)).tolist()
    return [BenchRequest(prompt, num_output, num_input) for prompt in drawn]


# ---------------------------------------------------------------- overhead


async def measure_overhead(
    options: argparse.Namespace, clients: ApiClients, offline: OfflineEngine, vocab_size: int
) -> dict[str, Any]:
    """Return median output tokens per second of each API, and the fraction of the offline engine's."""
    speeds: dict[str, list[float]] = {name: [] for name in ("offline", *APIS)}
    num_wrong = 0
    for repetition in range(options.repetitions + 1):  # the first is a warm-up
        requests = random_requests(
            options.num_prompts, options.input_len, options.output_len, vocab_size, seed=repetition
        )  # fmt: skip
        expected = offline.generate(requests)
        found = {"offline": sum(expected["num_tokens"]) / expected["seconds"]}
        for api in APIS:
            result = await clients.run(api, lambda backend, asked=requests: _all_at_once(backend, asked))
            found[api] = sum(map(output_length, result.responses)) / result.duration_s
            num_wrong += count_wrong(result.responses, expected)
        if repetition:
            for name, speed in found.items():
                speeds[name].append(speed)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratios = {api: medians[api] / medians["offline"] for api in APIS}
    return {"tokens_per_s": medians, "all": speeds, "ratio_to_offline": ratios, "wrong_texts": num_wrong}


async def _all_at_once(backend: Backend, requests: list[BenchRequest]) -> Any:
    return await run_load(backend, requests, [0.0] * len(requests))


def count_wrong(responses: list[BenchResponse], expected: dict[str, Any]) -> int:
    """Return the number of responses that failed or are wrong."""
    return sum(
        not response.is_success or response.text != text or output_length(response) != count
        for response, text, count in zip(responses, expected["texts"], expected["num_tokens"], strict=True)
    )


# ---------------------------------------------------------------- streams and disconnects


async def measure_streams(
    options: argparse.Namespace, clients: ApiClients, offline: OfflineEngine, vocab_size: int
) -> dict[str, Any]:
    """Run concurrent streams and compare them with the expected texts."""
    requests = random_requests(options.num_streams, 16, options.stream_len, vocab_size, seed=10_000)
    expected = offline.generate(requests)
    found: dict[str, Any] = {"streams": options.num_streams}
    for api in APIS:
        result = await clients.run(api, lambda backend: _all_at_once(backend, requests))
        errors = [response.error for response in result.responses if not response.is_success]
        num_tokens = sum(map(output_length, result.responses))
        found[api] = {
            "wrong": count_wrong(result.responses, expected),
            "failed": len(errors),
            "first_error": errors[0] if errors else "",
            "num_tokens": num_tokens,
            "num_chunks": sum(len(response.chunk_s) for response in result.responses),
            "tokens_per_s": num_tokens / result.duration_s,
        }
    return found


async def measure_disconnects(options: argparse.Namespace, clients: ApiClients, vocab_size: int) -> dict[str, Any]:
    """Measure a short request on an idle server, and while many streams are disconnected."""
    found = {}
    for api in APIS:
        found[api] = await clients.run(api, lambda backend: _disconnect_again_and_again(options, backend, vocab_size))
    return found


async def _disconnect_again_and_again(options: argparse.Namespace, backend: Backend, vocab_size: int) -> dict[str, Any]:
    short = iter(random_requests(1000, 8, options.short_len, vocab_size, seed=20_000))
    idle_s = [await _seconds(backend, next(short)) for _ in range(IDLE_REPETITIONS)]
    busy_s, num_cut = [], []
    for repetition in range(options.disconnect_repetitions):
        many = random_requests(options.num_disconnects, 16, options.stream_len, vocab_size, seed=30_000 + repetition)
        tasks = [asyncio.create_task(backend.send(request)) for request in many]
        await asyncio.sleep(options.disconnect_after_s)
        num_cut.append(sum(task.cancel() for task in tasks))
        busy_s.append(await _seconds(backend, next(short)))
        await asyncio.gather(*tasks, return_exceptions=True)
        await _seconds(backend, next(short))  # all is quiet again
    idle, busy = statistics.median(idle_s), statistics.median(busy_s)
    ratios = {"ratio": busy / idle, "max_ratio": max(busy_s) / idle}
    return {"idle_s": idle, "busy_s": busy, **ratios, "fewest_cut_off": min(num_cut), "all_busy_s": busy_s}


async def _seconds(backend: Backend, request: BenchRequest) -> float:
    start = time.perf_counter()
    response = await backend.send(request)
    if not response.is_success:
        raise RuntimeError(f"a short request failed: {response.error}")
    return time.perf_counter() - start


# ---------------------------------------------------------------- all together


async def measure(options: argparse.Namespace, server: RunningServer, offline: OfflineEngine) -> dict[str, Any]:
    """Run all measurements."""
    clients = ApiClients(server, max(options.num_streams, options.num_prompts))
    vocab_size = await clients.vocab_size()
    return {
        "overhead": await measure_overhead(options, clients, offline, vocab_size),
        "streams": await measure_streams(options, clients, offline, vocab_size),
        "disconnects": await measure_disconnects(options, clients, vocab_size),
    }


def table(found: dict[str, Any]) -> list[str]:
    """Return the figures as a table."""
    overhead, streams, cuts = found["overhead"], found["streams"], found["disconnects"]
    lines = [f"{'':<34}{'offline':>12}{'HTTP':>12}{'gRPC':>12}", f"{'output tokens/s (median)':<34}"]
    lines[1] += "".join(f"{overhead['tokens_per_s'][name]:>12.1f}" for name in ("offline", *APIS))
    lines.append(_row("share of offline", [overhead["ratio_to_offline"][name] for name in APIS], ".3f"))
    lines.append(_row(f"wrong of {streams['streams']} streams", [streams[name]["wrong"] for name in APIS], "d"))
    lines.append(_row("tokens/s of them", [streams[name]["tokens_per_s"] for name in APIS], ".1f"))
    lines.append(_row("short request, idle (ms)", [cuts[name]["idle_s"] * 1000 for name in APIS], ".1f"))
    lines.append(_row("short request, disconnects (ms)", [cuts[name]["busy_s"] * 1000 for name in APIS], ".1f"))
    lines.append(_row("ratio", [cuts[name]["ratio"] for name in APIS], ".2f"))
    return lines


def _row(name: str, values: list[Any], style: str) -> str:
    return f"{name:<34}{'':>12}" + "".join(f"{value:>12{style}}" for value in values)


@contextlib.contextmanager
def offline_engine(arguments: dict[str, Any], log: Path) -> Iterator[OfflineEngine]:
    """Run an engine while the block runs."""
    engine = OfflineEngine(arguments, log)
    try:
        yield engine
    finally:
        engine.close()


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] == ["--as-offline-engine"]:
        work_offline(json.loads(sys.argv[2]))
        return
    options = parser().parse_args()
    engine = {"enable_prefix_caching": False, **json.loads(options.engine)}
    queued = 2 * max(options.num_streams, options.num_prompts, options.num_disconnects)
    flags = [*as_flags(engine), "--max-num-queued-reqs", str(queued), "--disable-access-log"]
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        with (
            offline_engine({"model": options.model, **engine}, logs / "offline.log") as offline,
            running_server(options.model, flags, logs / "server.log") as server,
        ):
            found = asyncio.run(measure(options, server, offline))
    found["settings"] = vars(options)
    print("\n".join(table(found)), flush=True)
    if options.output_json:
        Path(options.output_json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Return the flags."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="demo")
    found.add_argument("--engine", default='{"max_num_seqs": 32, "max_model_len": 512}', help="arguments of LLM, JSON")
    found.add_argument("--num-prompts", type=int, default=64, help="requests per repetition")
    found.add_argument("--input-len", type=int, default=64, help="prompt tokens")
    found.add_argument("--output-len", type=int, default=64, help="new tokens")
    found.add_argument("--repetitions", type=int, default=5, help="counted repetitions")
    found.add_argument("--num-streams", type=int, default=200, help="streams at once")
    found.add_argument("--stream-len", type=int, default=64, help="tokens of each")
    found.add_argument("--num-disconnects", type=int, default=100, help="streams disconnected at once")
    found.add_argument("--disconnect-repetitions", type=int, default=10, help="how often")
    found.add_argument("--disconnect-after-s", type=float, default=0.5, help="seconds until they are disconnected")
    found.add_argument("--short-len", type=int, default=32, help="output tokens of the short request")
    found.add_argument("--output-json", metavar="FILE")
    return found


if __name__ == "__main__":
    main()
