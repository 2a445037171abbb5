"""Measure the engine end to end on random weights: starts, decode, the gap between steps, prefill, throughput.

An engine with as few programs as can be gives the first figures; one with the shapes that count replaces them.
"""

import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.registry import OPERATIONS
from scripts.gpu import device_events
from scripts.gpu.figures import Figure, rounded
from scripts.gpu.models import config_of, has_checkpoint, make_room, sizes_of, write_checkpoint
from scripts.gpu.parts import Context, Item, Program, SkippedError, Working
from scripts.gpu.workload import Decode, Workload, decode, longest_kernels, prefill_s, throughput

IS_ALONE: bool = True
# Memory and the cache of programs are as the engine's users have them.
ENVIRONMENT: dict[str, str] = {"XLA_FLAGS": device_events.XLA_FLAGS, "JAX_COMPILATION_CACHE_DIR": ""}
BACKENDS = ("triton", "mosaic")
GOALS = {
    ("llama-8b", "decode 1"): "4.6 ms, then 4.0 (vLLM's H100 curve predicts about 5.1)",
    ("llama-8b", "decode 256"): "70 % of what weights and keys and values allow",
    ("", "gap"): "50 us",
    ("", "warm"): "10 s",
}


_START_LIMIT_S = 300.0  # without a word: reading weights and compiling all programs
_MEASURE_LIMIT_S = 120.0  # filling pages with prompts, and steps of an engine whose first run is slow


class Begun(NamedTuple):
    """An engine that has generated its first token, and when."""

    llm: Any
    first_token_s: float
    ready_s: float


def items(context: Context) -> list[Item]:
    """List the 8B with the default backend first, then the other backend, then the 14B."""
    models = ("llama-8b",) if context.is_quick else ("llama-8b", "qwen-14b")
    # In the registry's order: the first is the engine's own choice.
    backends = ["xla"] if context.is_tiny else [row for row in OPERATIONS["paged_attention"] if row in BACKENDS]
    found = []
    for model in models:
        first_s, measure_s = (200.0, 320.0) if model == "qwen-14b" else (150.0, 250.0)
        found.append(Item(f"{model} write", 30.0 + first_s))  # writing is worth nothing without a figure
        for backend in backends:
            found += [
                Item(f"{model} {backend} first", first_s),
                Item(f"{model} {backend} measure", measure_s),
                Item(f"{model} {backend} warm", 20.0),
            ]
    return found


def run(item: str, context: Context) -> Iterator[Figure | Working]:
    """Do one process's work: write a checkpoint, or start an engine on it and measure."""
    require_llguidance()
    if item.endswith("write"):
        yield Working("writing the checkpoint", _MEASURE_LIMIT_S)
        yield _write(item.split()[0], context)
        return
    model, backend, what = item.split()
    context.refuse_untimed(f"paged_attention/{backend}")
    if not has_checkpoint(_directory(model, context)):
        raise SkippedError("there is no checkpoint: the item before it did not run")
    cache = context.folder / f"cache-{model}-{backend}{'-first' * (what == 'first')}"
    has_programs = any(cache.rglob("*"))
    if what == "warm" and not has_programs:
        raise SkippedError("nothing was compiled before: the item before it did not run")
    workload = Workload.first_of(context) if what == "first" else Workload.of(context)
    yield Working("starting the engine", _START_LIMIT_S)
    begun = start_engine(_directory(model, context), backend, workload, cache, context)
    name = f"{model} {backend}"
    start = "start with the fewest programs" if what == "first" else "start"
    yield _start_figure(f"{name}: {start} {'warm' if has_programs else 'cold'}", has_programs, begun)
    try:
        if what != "warm":
            yield from _measure(name, begun.llm, workload, context, is_whole=what == "measure")
    finally:
        begun.llm.close()


def programs(context: Context) -> Iterator[Program]:
    """List none: a dry run traces whole steps (``steps``)."""
    yield from ()


def _directory(model: str, context: Context) -> Path:
    return context.folder / f"model-{model}{'-tiny' if context.is_tiny else ''}"


def _write(model: str, context: Context) -> Figure:
    """Write the checkpoint."""
    directory, config = _directory(model, context), config_of(model, context.is_tiny)
    num_bytes = sizes_of(config).weight_bytes
    if not make_room(context.folder, num_bytes, directory):
        raise SkippedError(f"{num_bytes / 1e9:.0f} GB do not fit on the disk of {context.folder}")
    start = time.perf_counter()
    write_checkpoint(directory, config)
    seconds = time.perf_counter() - start
    note = f"{num_bytes / 1e9:.2f} GB of safetensors; the disk's speed, not the engine's"
    return Figure(part="engine", name=f"{model}: write", value=rounded(seconds), unit="s", note=note)


def require_llguidance() -> None:
    """Skip an item that starts an engine where an engine cannot start.

    Raises:
        SkippedError: It cannot.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise SkippedError("llguidance is not installed")


def start_engine(directory: Path, backend: str | None, workload: Workload, cache: Path, context: Context) -> Begun:
    """Start an engine and generate one token; the times count from the start of this process."""
    os.environ.setdefault("XDG_CACHE_HOME", str(context.folder / "xdg"))
    from jaxserve import LLM, SamplingParams

    llm = LLM(
        str(directory),
        attention_backend=backend,
        enable_prefix_caching=False,
        compilation_cache_dir=str(cache),
        **workload.engine,
    )
    ready_s = time.time() - context.spawned
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate({"prompt_token_ids": [llm.vocab_size // 2] * 8}, params, use_tqdm=False)
    return Begun(llm, time.time() - context.spawned, ready_s)


def _start_figure(label: str, is_warm: bool, begun: Begun) -> Figure:
    """Make a figure of a start; one with programs of an earlier start, or of a run that was killed, is a warm one."""
    note = f"new process to first token; ready after {begun.ready_s:.1f} s, loading {begun.llm.load_s:.1f} s, "
    note += f"compiling {begun.llm.compile_s:.1f} s beside it; the files are in the page cache"
    goal = GOALS["", "warm"] if is_warm else ""
    return Figure(part="engine", name=label, value=rounded(begun.first_token_s), unit="s", goal=goal, note=note)


def _measure(
    name: str, llm: Any, workload: Workload, context: Context, *, is_whole: bool
) -> Iterator[Figure | Working]:
    """Measure all that one engine can show, the most important first, as far as the time goes."""
    for batch, tokens in workload.decodes:
        label = f"{name}: decode, batch {batch}, context {tokens}"
        if context.left_s() < 15:
            yield _no_time(label)
            continue
        yield Working(f"measuring {label}", _MEASURE_LIMIT_S)
        yield from _decode_figures(name, decode(llm, batch, tokens, workload.steps), context)
    for tokens in workload.prefills:
        if context.left_s() < 10:
            yield _no_time(f"{name}: prefill of {tokens}")
            continue
        yield Working(f"measuring a prefill of {tokens}", _MEASURE_LIMIT_S)
        yield _prefill_figure(name, tokens, prefill_s(llm, tokens), context)
    if not is_whole:
        return
    label = f"{name}: offline, {workload.offline_in} in and {workload.offline_out} out"
    if context.left_s() < workload.offline_s:
        yield _no_time(label)
        return
    yield Working("measuring offline throughput", 3 * _MEASURE_LIMIT_S)
    num, seconds = throughput(llm, workload)
    note = f"{num} requests at once in {seconds:.1f} s; prompt tokens beside them"
    value = rounded(num * workload.offline_out / seconds)
    yield Figure(part="engine", name=label, value=value, unit="output tokens/s", note=note)


def _decode_figures(name: str, found: Decode, context: Context) -> Iterator[Figure]:
    """Make figures of a decode step's time, and of the time in which the device waited for the host."""
    model = name.split()[0]
    sizes = sizes_of(config_of(model, context.is_tiny))
    num_bytes = sizes.read_bytes + found.batch * found.context * sizes.kv_bytes
    flops = found.batch * (sizes.matmul_flops + found.context * sizes.attention_flops)
    best = context.least_s(num_bytes, flops)
    step_ms = found.step_s * 1e3
    label = f"{name}: decode, batch {found.batch}, context {found.context}"
    note = f"median of {found.num_steps} steps, 10 to 90 % of them {found.low_s * 1e3:.3f} to {found.high_s * 1e3:.3f}"
    note += f"; {found.batch / found.step_s:.0f} tokens/s; {num_bytes / 1e9:.1f} GB of weights and keys and values"
    goal = GOALS.get((model, f"decode {found.batch}"), "")
    yield Figure(
        part="engine",
        name=label,
        value=rounded(step_ms),
        unit="ms",
        roofline=None if best is None else rounded(best * 1e3),
        share=None if best is None else best / found.step_s,
        goal=goal if found.batch > 1 or found.context <= 1024 else "",
        note=note,
    )
    yield _gap_figure(label, found)


def _gap_figure(label: str, found: Decode) -> Figure:
    """Make a figure of the device's idle time per step beyond that inside a step, by the device's own clock."""
    stepping, replaying, count = found.stepping, found.replaying, found.num_profiled
    if stepping is None or replaying is None:
        return Figure(part="engine", name=f"{label}: gap", value=None, note="the profiler saw no event of a device")
    gap = rounded((stepping.idle_s - replaying.idle_s) / count * 1e6)
    note = f"device events of {count} steps: idle {stepping.idle_s / count * 1e6:.0f} us per step, busy "
    note += f"{stepping.busy_s / count * 1e3:.3f} ms; the same step run {count} times without a host between: idle "
    note += f"{replaying.idle_s / count * 1e6:.0f} us, busy {replaying.busy_s / count * 1e3:.3f} ms"
    note += f"; most of a step's time: {longest_kernels(found)}"
    return Figure(part="engine", name=f"{label}: gap", value=gap, unit="us", goal=GOALS["", "gap"], note=note)


def _prefill_figure(name: str, num_tokens: int, seconds: float, context: Context) -> Figure:
    sizes = sizes_of(config_of(name.split()[0], context.is_tiny))
    flops = num_tokens * sizes.matmul_flops + num_tokens * num_tokens // 2 * sizes.attention_flops
    best = context.least_s(sizes.read_bytes, flops)
    return Figure(
        part="engine",
        name=f"{name}: prefill of {num_tokens}",
        value=rounded(num_tokens / seconds),
        unit="tokens/s",
        roofline=None if best is None else rounded(num_tokens / best),
        share=None if best is None else best / seconds,
        note=f"one prompt, submission to first token {seconds * 1e3:.1f} ms, median; "
        f"{np.round(flops / seconds / 1e12, 1)} TFLOP/s",
    )


def _no_time(label: str) -> Figure:
    return Figure(part="engine", name=label, value=None, note="skipped: the time limit was reached")
