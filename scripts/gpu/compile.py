"""Measure what XLA's ways of tuning cost at a start and give in a step.

An engine with four layers of the 8B's shapes and as few programs as can be starts once with each set of XLA's flags.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from scripts.gpu import device_events
from scripts.gpu.engine import require_llguidance, start_engine
from scripts.gpu.figures import Figure, rounded
from scripts.gpu.models import config_of, has_checkpoint, write_checkpoint
from scripts.gpu.parts import Context, Item, Program, Working
from scripts.gpu.workload import Workload, decode, longest_kernels, prefill_s

IS_ALONE: bool = True
ENVIRONMENT: dict[str, str] = {"XLA_FLAGS": device_events.XLA_FLAGS, "JAX_COMPILATION_CACHE_DIR": ""}
FLAGS = {
    "as it comes": "",
    "fusions untuned": "--xla_gpu_experimental_enable_fusion_autotuner=false",
    "cuBLAS alone": "--xla_gpu_experimental_enable_fusion_autotuner=false --xla_gpu_enable_triton_gemm=false",
    "nothing tuned": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}
_NUM_LAYERS = 4
_START_LIMIT_S = 200.0


def items(context: Context) -> list[Item]:
    """List the sets of flags; the cheapest start first, the engine's own last."""
    names = [*reversed(FLAGS)]
    return [Item(name, 60.0) for name in (names[:1] if context.is_tiny else names)]


def run(item: str, context: Context) -> Iterator[Figure | Working]:
    """Start an engine with an item's flags, and time a step of each kind."""
    require_llguidance()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS[item]}".strip()
    workload = Workload.first_of(context)
    yield Working("starting an engine", _START_LIMIT_S)
    cache = context.folder / f"cache-{item.replace(' ', '-')}"
    begun = start_engine(_checkpoint(context), "xla" if context.is_tiny else None, workload, cache, context)
    llm = begun.llm
    try:
        note = f"an engine with {_NUM_LAYERS} layers of the 8B's shapes, ready after {begun.ready_s:.1f} s"
        yield Figure(part="compile", name=f"{item}: compiling", value=rounded(llm.compile_s), unit="s", note=note)
        yield Working("measuring decode")
        batch, tokens = workload.decodes[0]
        found = decode(llm, batch, tokens, workload.steps)
        label = f"{item}: decode, batch {batch}, context {tokens}"
        value, note = rounded(found.step_s * 1e3), longest_kernels(found)
        yield Figure(part="compile", name=label, value=value, unit="ms", note=note)
        for length in workload.prefills:
            yield Working("measuring prefill")
            seconds = prefill_s(llm, length)
            yield Figure(part="compile", name=f"{item}: prefill of {length}", value=rounded(seconds * 1e3), unit="ms")
    finally:
        llm.close()


def programs(context: Context) -> Iterator[Program]:
    """List none: a dry run traces whole steps (``steps``)."""
    yield from ()


def _checkpoint(context: Context) -> Path:
    """Return the folder of the checkpoint, written before it is first used."""
    folder = context.folder / f"model-llama-8b-of-{_NUM_LAYERS}{'-tiny' if context.is_tiny else ''}"
    if not has_checkpoint(folder):
        write_checkpoint(folder, config_of("llama-8b", context.is_tiny) | {"num_hidden_layers": _NUM_LAYERS})
    return folder
