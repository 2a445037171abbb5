#!/usr/bin/env python3
"""Check results and measure speed on one NVIDIA GPU, in one command: kernels, GEMMs, peers, the engine end to end.

    python scripts/gpu_check.py
    python scripts/gpu_check.py --only numerics,kernels --time-limit 540
    python scripts/gpu_check.py --only engine --resume --work /big/disk --time-limit 540
    python scripts/gpu_check.py --dry-run

``scripts/gpu_first_run.sh`` has the commands of a first run in order.

Parts, in this order: ceilings (copy bandwidth and matrix rate; always measured, all else is a share of them), probe
(the smallest case of every implementation), numerics (every implementation of every operation against its reference,
over all cases, with a fixed seed and a fresh one, 20 times each), kernels (benches in a CUDA graph, over rotating
inputs larger than the L2 cache; each compares its result first), gemms (the layers' matrix multiplications as XLA makes
them), compile (what XLA's tuning costs at a start and gives in a step), engine (random-weight checkpoints written to
disk: starts, decode, the gap between steps, prefill, throughput), drafts (speculative decoding: each method's answers
against those without drafts, and the speed with drafts of known acceptance), peers (JAX's own paged attention, PyTorch
and cuDNN attention, transformers' static-cache generation).

Each part runs in processes of its own: one that fails, hangs or loses the device does not stop the others. A process
that says nothing for too long is taken to hang; items that hung or crashed their process are not run again, and
items with wrong results are not timed. The JSON file and the Markdown table beside it are rewritten after every figure,
so that a killed run keeps its results. Items that do not fit into ``--time-limit`` (470 s, of which each part has
a share) are skipped and listed. ``--resume`` goes on from the files there: what is done or failed is not repeated
(``--retry-failed`` repeats what failed), the ceilings are measured again, and compiled programs and checkpoints are
found in ``--work``, which is kept until a run has skipped nothing. Where commands have a time limit of their own, give
``--time-limit`` some 30 seconds less.

Needs this repository (it runs from its root without being installed). Packages that a part needs and that are missing
are listed at the start; on a machine without a network, unpack their wheels with ``pip install --no-index --no-deps
--target DIR *.whl`` and put DIR on PYTHONPATH (jax-triton 0.4.1 asks for Triton 3.7 but compiles with 3.6). The engine
part needs 34 GB of disk for the larger checkpoint.

``--dry-run`` needs no GPU: it builds every shape, lowers every program for CUDA, and compiles it for an H200 where
JAX's CUDA wheels are installed (Python 3.12 or newer; ``--lower-only`` leaves that out). The engine's steps have two
layers there; ``scripts/compile_check.py`` compiles whole ones.

Exit status: 0 if everything that ran succeeded, 1 if a result was wrong or an item failed, 2 without a GPU.
"""

import argparse
import dataclasses
import datetime
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.gpu import toolchain  # noqa: E402  (after the path that it lies on)
from scripts.gpu.driver import Driver, serve  # noqa: E402
from scripts.gpu.figures import Deadline, Results  # noqa: E402
from scripts.gpu.parts import Context, Part  # noqa: E402

# Each part and its share of a limited time; what one leaves goes to those after it. Ceilings take what they need.
PARTS = {
    "ceilings": 0.0,
    "probe": 0.1,
    "numerics": 0.25,
    "kernels": 0.2,
    "gemms": 0.1,
    "compile": 0.2,
    "engine": 0.4,
    "drafts": 0.2,
    "peers": 0.15,
}
TIME_LIMIT_S = 470.0
NO_GPU = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = parse(arguments)
    if options.child is not None:
        return serve(load_part(options.child), sys.stdin, say)
    if options.dry_run:
        return dry_run(options)
    found = ("cpu (sizes for trying the check itself)", "none") if options.size == "tiny" else find_gpu()
    if found is None:
        print(
            "error: no NVIDIA GPU found (nvidia-smi shows none); --dry-run checks what can be without one",
            file=sys.stderr,
        )
        return NO_GPU
    return check(options, *found)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=_parts, default=tuple(PARTS), metavar="PART[,PART]", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes, one model")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT_S,
        metavar="SECONDS",
        help="skip items that would exceed it; 0 for no limit (default: %(default)g)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: scripts/gpu_results, or build/gpu_check of a dry run"
    )
    parser.add_argument("--name", help="base name of the files (default: gpu_check, or dry_run)")
    parser.add_argument(
        "--resume", action="store_true", help="continue from existing files without repeating finished items"
    )
    parser.add_argument("--retry-failed", action="store_true", help="with --resume: run failed items again")
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="directory of checkpoints and compiled programs (default: build/gpu_check/work)",
    )
    parser.add_argument("--keep", action="store_true", help="keep --work after a complete run")
    parser.add_argument("--seed", type=int, help="seed of the fresh inputs (default: from the clock)")
    parser.add_argument("--commit", help="commit of the repository, if git is not available")
    parser.add_argument(
        "--dry-run", action="store_true", help="without a GPU: lower, and compile if the CUDA wheels are installed"
    )
    parser.add_argument("--lower-only", action="store_true", help="with --dry-run: do not compile")
    parser.add_argument("--size", choices=("real", "tiny"), default="real", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.retry_failed and not options.resume:
        parser.error("--retry-failed needs --resume")
    if options.lower_only and not options.dry_run:
        parser.error("--lower-only needs --dry-run")
    if options.dry_run and (options.resume or options.work or options.keep or options.seed is not None):
        parser.error("--dry-run runs nothing, so --resume, --work, --keep and --seed do not apply")
    return options


def check(options: argparse.Namespace, device: str, driver_version: str) -> int:
    """Run the parts on this machine's GPU."""
    assembler = toolchain.find_assembler(os.environ)
    os.environ.update(toolchain.variables(os.environ, assembler))  # before any part imports JAX
    seed = time.time_ns() % 2**31 if options.seed is None else options.seed
    facts = {**about(options, device, driver_version, toolchain.versions(assembler)), "seed": seed}
    directory = options.output or ROOT / "scripts" / "gpu_results"
    results = Results(directory, options.name or "gpu_check", facts, options.resume, options.retry_failed)
    results.done = [item for item in results.done if not item.startswith("ceilings/")]
    deadline = Deadline(options.time_limit or None)
    work = options.work or ROOT / "build" / "gpu_check" / "work"
    if not options.resume:
        clean(work)
    work.mkdir(parents=True, exist_ok=True)
    context = Context(is_quick=options.quick, is_tiny=options.size == "tiny", seed=seed, work=str(work.resolve()))
    say(f"{device}; fresh inputs from seed {seed}; results in {results.json_path}")
    for text in toolchain.missing(facts["versions"]):
        say(text)
    signal.signal(signal.SIGTERM, leave)  # so that running processes are stopped too
    driver = Driver(results, (sys.executable, str(Path(sys.argv[0]).resolve()), "--child"), say)
    waiting = [part for part in PARTS if part in options.only or part == "ceilings"]
    try:
        while waiting:
            share = PARTS[waiting[0]] / (sum(PARTS[part] for part in waiting) or 1.0)
            part = waiting.pop(0)
            driver.run_part(part, load_part(part), with_results(context, results), deadline.part(share or 1.0))
    finally:
        if not options.keep and not results.skipped:
            clean(work)
        results.write()
    say(f"{len(results.figures)} figures, {len(results.failed)} failed, {len(results.skipped)} items skipped")
    for item, reason in results.failed.items():
        say(f"FAILED {item}: {reason}")
    return 1 if results.failed else 0


def dry_run(options: argparse.Namespace) -> int:
    """Lower or compile everything that the parts would run."""
    # The environment for compiling without a device is set by an import, which has to come before that of JAX.
    if not options.lower_only and sys.version_info >= (3, 12):
        importlib.import_module("scripts.deviceless")
    runner = importlib.import_module("scripts.gpu.dry_run")
    compiler = runner.find_compiler(options.lower_only)
    kind = f"none: {compiler.word} for an NVIDIA H200 that was not there"
    directory = options.output or ROOT / "build" / "gpu_check"
    found = toolchain.versions(toolchain.find_assembler(os.environ))
    results = Results(directory, options.name or "dry_run", about(options, kind, "none", found))
    parts = {name: load_part(name) for name in PARTS if name in options.only}
    runner.run(parts, Context(is_quick=options.quick), compiler, results, say)
    return 1 if results.failed else 0


def leave(number: int, frame: object) -> NoReturn:
    """Exit on a signal, running all cleanup handlers."""
    sys.exit(128 + number)


def with_results(context: Context, results: Results) -> Context:
    """Return the context with results of earlier parts: ceilings, and implementations that failed."""
    checked = ("probe/", "numerics/")
    broken, wrong = (
        {item.partition("/")[2]: reason for item, reason in found.items() if item.startswith(checked)}
        for found in (results.broken_items(), results.wrong_items())
    )
    context = dataclasses.replace(context, broken=broken, wrong=wrong)
    values = {
        name: results.value("ceilings", figure)
        for name, figure in (("copy", "copy bandwidth"), ("rate", "bf16 matrix rate"))
    }
    if not all(isinstance(value, float | int) for value in values.values()):
        return context
    copy, rate = (float(cast(float, values[name])) for name in ("copy", "rate"))
    return dataclasses.replace(context, copy_bytes_s=copy * 1e9, flops_s=rate * 1e12)


def clean(work: Path) -> None:
    """Remove the checkpoints and compiled programs that a run keeps for the next one."""
    for pattern in ("model-*", "cache-*", "xdg"):
        for path in work.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def load_part(name: str) -> Part:
    """Import a part's module."""
    return cast(Part, importlib.import_module(f"scripts.gpu.{name}"))


def about(options: argparse.Namespace, device: str, driver_version: str, versions: dict[str, str]) -> dict[str, Any]:
    """Return the versions and settings that the figures depend on."""
    return {
        "device": device,
        "driver": driver_version,
        "versions": versions,
        "commit": options.commit or _output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]) or "unknown",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "quick": options.quick,
    }


def find_gpu() -> tuple[str, str] | None:
    """Return the name and the driver of the first GPU, or None without a GPU."""
    found = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    if not found:
        return None
    name, _, driver = found.splitlines()[0].partition(",")
    return name.strip(), driver.strip()


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def _output(command: list[str]) -> str:
    """Return a command's output; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"unknown part {', '.join(unknown) or repr(text)}; parts: {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
