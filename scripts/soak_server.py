"""Runs a server under mixed load for a long time and looks for leaks, hangs and wrong results.

    python scripts/soak_server.py --minutes 30 --output-json FILE

Workers send requests over HTTP and gRPC: streams, whole responses, chats, tools, logprobs, grammars, embeddings, and
invalid input of every kind. They cut some of them off at random times, read slowly and leave connections half open;
child processes with streams are killed. Completions are compared with known ones; memory, descriptors and threads of
both processes, pages and queues are watched. At the end the server must be idle, nothing may have grown beyond the
limits in ``scripts/soak/report.py``, and every request must have received its response or the expected error. Only then
is the exit status 0.

    python scripts/soak_server.py --mix hostile --minutes 5 --output-json FILE

measures instead what one API key costs another (``scripts/soak/two_keys.py``), and looks for the same after it.

    python scripts/soak_server.py --mix faults --minutes 60 --output-json FILE

runs the engine in two processes of two devices each, and kills or stops one of them every minute
(``scripts/soak/faults.py``).
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from jaxserve.bench.serve.http import HttpClient  # noqa: E402  (after the path)
from scripts.server_child import RunningServer, as_flags, running_server  # noqa: E402
from scripts.soak.faults import INTERVAL_S, run_faults  # noqa: E402
from scripts.soak.load import Load  # noqa: E402
from scripts.soak.report import Report  # noqa: E402
from scripts.soak.requests import KnownPrompt, prompts  # noqa: E402
from scripts.soak.two_keys import KEYS, compare, write_auth_file  # noqa: E402
from scripts.soak.watch import wait_until_quiet, watch  # noqa: E402

ENGINE: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20
}  # fmt: skip
SERVER: dict[str, Any] = {"stall_timeout": 5, "disable_access_log": True, "max_num_queued_reqs": 256}
HOSTILE_SERVER: dict[str, Any] = {
    "stall_timeout": 15, "body_timeout": 20, "disable_access_log": True, "trust_request_chat_template": True,
    "max_admitted_bytes": 256 << 20,
}  # fmt: skip
GROUP: dict[str, Any] = {"mesh": "stage=2,tensor=2", "restart_engine": True, "step_timeout": 5}
NUM_WORKERS = 16
MAX_SAMPLES = 2000
QUIET_LIMIT_S = 60.0
SETTLE_S = 7.0
"""Longer than the server keeps idle connections."""


async def run_soak(server: RunningServer, duration_s: float, seed: int = 0, num_workers: int = NUM_WORKERS) -> Report:
    """Put a server under load for some time, and report the results.

    The server must be idle, have the demo model or another that knows no end of text where ``ignore_eos`` is set,
    contexts of at least 256 tokens, and let everybody in.
    """
    report = Report()
    known = await known_responses(server, prompts(seed))
    await fill_pools(server)
    load = Load(server, known, report, seed)
    try:
        warm_s = time.monotonic() + min(20.0, duration_s / 6)  # what is made once is there from here on
        await asyncio.gather(*(load.work(-1 - worker, warm_s) for worker in range(num_workers)))
        report.before = await wait_until_quiet(server, QUIET_LIMIT_S, SETTLE_S)
        watcher = asyncio.create_task(watch(server, report.samples, max(0.5, duration_s / MAX_SAMPLES)))
        start_s = time.monotonic()
        await asyncio.gather(*(load.work(worker, start_s + duration_s) for worker in range(num_workers)))
        report.duration_s = time.monotonic() - start_s
        watcher.cancel()
        if isinstance(error := (await asyncio.gather(watcher, return_exceptions=True))[0], Exception):
            report.complain(f"the server could not be watched to the end: {error!r}")
    finally:
        await load.close()
    report.after = await wait_until_quiet(server, QUIET_LIMIT_S, SETTLE_S)
    report.judge()
    await known_responses(server, known, report)
    return report


async def run_two_keys(server: RunningServer, duration_s: float, seed: int = 0) -> tuple[Report, dict[str, Any]]:
    """Measure what a hostile key costs another one; return the report, and the times by themselves.

    The server must be idle, have the demo model, and the settings ``HOSTILE_SERVER`` and ``two_key_flags``.
    """
    server.headers = {"Authorization": f"Bearer {KEYS['watcher']}"}
    report = Report()
    known = await known_responses(server, prompts(seed))
    await fill_pools(server)
    times = await compare(server, known, report, duration_s, seed, HOSTILE_SERVER["max_admitted_bytes"])
    await known_responses(server, known, report)
    return report, times


async def run_group(
    server: RunningServer,
    duration_s: float,
    seed: int = 0,
    num_workers: int = NUM_WORKERS,
    interval_s: float = INTERVAL_S,
) -> tuple[Report, dict[str, Any]]:
    """Let faults befall a group of processes under load; return the report, and the faults by themselves.

    The server must be idle, have the demo model, and the settings ``GROUP``.
    """
    report = Report()
    known = await known_responses(server, prompts(seed))
    faults = await run_faults(server, known, report, duration_s, seed, num_workers, interval_s)
    await known_responses(server, known, report)
    return report, faults


async def fill_pools(server: RunningServer) -> None:
    """Have the engine start all processes for grammars and templates that it keeps, before it is watched."""
    client = HttpClient(server.http, server.headers)
    plain = {"max_tokens": 1, "temperature": 0}
    grammars = [{"prompt": "1+1=", "structured_outputs": {"regex": f"[0-9]{{1,{i}}}"}, **plain} for i in range(2, 10)]
    chats = [{"messages": [{"role": "user", "content": str(i)}], **plain} for i in range(8)]
    calls = [client.request("POST", "/v1/completions", body) for body in grammars]
    calls += [client.request("POST", "/v1/chat/completions", body) for body in chats]
    await asyncio.gather(*calls)
    await client.close()


async def known_responses(
    server: RunningServer, asked: Sequence[KnownPrompt], report: Report | None = None
) -> list[KnownPrompt]:
    """Return the prompts with the completions of an idle server; differences from earlier ones go to ``report``."""
    client = HttpClient(server.http, server.headers)
    found = []
    for prompt in asked:
        completion = await client.request("POST", "/v1/completions", prompt.completion())
        chat = await client.request("POST", "/v1/chat/completions", prompt.chat_completion())
        for response in (completion, chat):
            if response.status != 200:
                raise RuntimeError(f"an idle server responded with status {response.status}: {response.body[:300]!r}")
        text = completion.json()["choices"][0]["text"]
        message = chat.json()["choices"][0]["message"]["content"]
        found.append(prompt._replace(text=text, chat=message))
        if report is not None and found[-1] != prompt:
            report.complain(f"after the load {prompt.prompt!r} gets {text!r}, {message!r}")
    await client.close()
    return found


def main() -> None:
    """Start a server, put it under load, and exit with 0 where all went well."""
    options = parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="jaxserve-soak-"))
    mix = {"plain": SERVER, "hostile": HOSTILE_SERVER, "faults": {**SERVER, **GROUP}}[options.mix]
    settings = {**ENGINE, **mix, **json.loads(options.settings)}
    if options.mix == "hostile":
        settings["auth_file"] = write_auth_file(folder)
    launcher = ("launch", "--nproc", "2") if options.mix == "faults" else ()
    log = Path(options.log) if options.log else folder / "server.log"
    found: dict[str, Any] = {}
    flags, duration_s = [*as_flags(settings), *options.flag], options.minutes * 60
    with running_server(options.model, flags, log, launcher=launcher) as server:
        print(f"server ready at {server.http}; its log is {log}", flush=True)
        if options.mix == "hostile":
            report, found["times"] = asyncio.run(run_two_keys(server, duration_s, options.seed))
        elif options.mix == "faults":
            report, found["faults"] = asyncio.run(run_group(server, duration_s, options.seed, options.workers))
        else:
            report = asyncio.run(run_soak(server, duration_s, options.seed, options.workers))
    if server.process.returncode != 0:
        report.complain(f"the server ended with status {server.process.returncode} when it was told to end")
    print("\n".join([*report.lines(), *(json.dumps(value, indent=1) for value in found.values())]), flush=True)
    if options.output_json:
        found = {**report.as_json(), **found}
        Path(options.output_json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if report.is_clean else 1)


def parser() -> argparse.ArgumentParser:
    """Return the flags."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="demo")
    found.add_argument("--mix", choices=("plain", "hostile", "faults"), default="plain")
    found.add_argument("--minutes", type=float, default=30.0)
    found.add_argument("--workers", type=int, default=NUM_WORKERS, help="requests at a time")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--settings", default="{}", help="settings of engine and server that win over these, JSON")
    found.add_argument("--flag", action="append", default=[], help="a further flag of the server, with its dashes")
    found.add_argument("--log", metavar="FILE", help="what the server writes")
    found.add_argument("--output-json", metavar="FILE")
    return found


if __name__ == "__main__":
    main()
