"""Compiles every GPU kernel and whole steps of real models for an H200, without a GPU, and checks the programs.

    bash scripts/compile_check.sh [--only kernels|steps] [--match TEXT] [--layers N] [--attention-backend NAME]

Kernels: every bench of every operation compiles, none that XLA assembles (Pallas-Triton's) spills registers, none
copies its arguments. Steps: decode and prefill steps of Llama-3.1-8B, Qwen2.5-14B (1, 2 and 8 devices) and
Llama-3.1-70B (8 devices), whole: pages are updated in place, no weight or page is copied, temporaries are bounded, one
CUDA graph on one device and no more than the stated collectives divide on several. Prints a line per program; exit
status 1 when a check failed.

It needs JAX with CUDA wheels and Python >= 3.12, and no card; ``compile_check.sh`` makes that environment.
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# First of all: it sets what JAX's CUDA plugin reads.
from scripts.deviceless import NO_SPILLS, Compilation, NoCudaError, compile_for, compile_traced, h200_mesh  # noqa: E402, I001
import jax  # noqa: E402
from jax.sharding import use_abstract_mesh  # noqa: E402

from jaxserve.device.sharded_model import ShardedModel  # noqa: E402
from jaxserve.device.step_batch import BatchShape  # noqa: E402
from jaxserve.device.steps import trace_step  # noqa: E402
from jaxserve.models.registry import config_from_hf  # noqa: E402
from pallas_kernels.operation import prepared_shapes  # noqa: E402
from pallas_kernels.registry import OPERATIONS, load, operation  # noqa: E402
from scripts.gpu.models import CONFIGS, LLAMA_70B  # noqa: E402
from scripts.gpu.steps import step_program  # noqa: E402
from sharding import get_layout  # noqa: E402
from sharding.plan import stated_collectives  # noqa: E402

_MIB = 1 << 20


class Program(NamedTuple):
    """A compiled program and its faults."""

    name: str
    compilation: Compilation | None
    faults: list[str]


class Model(NamedTuple):
    """A model, its config.json, and the numbers of devices to compile it for."""

    name: str
    config: dict[str, Any]
    tensor: tuple[int, ...]


MODELS = (
    Model("Llama-3.1-8B", CONFIGS["llama-8b"], (1,)),
    Model("Qwen2.5-14B", CONFIGS["qwen-14b"], (1, 2, 8)),
    Model("Llama-3.1-70B", LLAMA_70B, (8,)),
)
_STEPS = {"decode of 1": (1, True), "decode of 64": (64, True), "prefill of 2048": (2048, False)}


def check_kernels(match: str) -> Iterator[Program]:
    """Compile every bench of every GPU implementation."""
    mesh = h200_mesh()
    whole = get_layout("replicated").sharding(mesh)
    for op_name, row in [(op, row) for op, table in OPERATIONS.items() for row in table]:
        op, implementation = operation(op_name), load(op_name, row)
        if row in ("native", "xla") or row.endswith("interpret"):
            continue
        refused = set()
        for bench, case in op.BENCHES.items():
            name = f"{op_name} {row} {bench}"
            reason = implementation.unsupported("gpu", "NVIDIA H200", op.dtype(case), **op.sizes(case))
            if reason is not None:
                refused.add(reason)
            if match not in name or reason is not None:
                continue
            prepared = prepared_shapes(op, implementation, case)
            structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), prepared)
            run = functools.partial(op.run, implementation, case)
            try:
                found = compile_for(mesh, run, structs, donate_argnums=0 if op.IS_IN_PLACE else (), options=NO_SPILLS)
            except Exception as error:  # the compiler raises many types; each is a fault
                yield Program(name, None, [f"{type(error).__name__}: {str(error)[:300]}"])
                continue
            faults = [f"copies {size / _MIB:.0f} MiB" for size in found.copies_from(_MIB)]
            yield Program(name, found, faults)
        for reason in refused:
            yield Program(f"{op_name} {row}", None, [f"refused: {reason}"])


def check_steps(match: str, num_layers: int | None, backend: str | None) -> Iterator[Program]:
    """Compile whole steps of each model."""
    cut = {"num_hidden_layers": num_layers} if num_layers else {}
    for model in MODELS:
        for tensor in model.tensor:
            mesh = h200_mesh(tensor)
            for step, (num_tokens, decode_only) in _STEPS.items():
                name = f"{model.name} on {tensor}: {step}"
                if match not in name:
                    continue
                config = config_from_hf(model.config | cut, model.name)
                program, shape = step_program(config, mesh, backend, num_tokens, decode_only)
                with use_abstract_mesh(mesh.abstract_mesh):
                    traced = trace_step(program, shape, "greedy" if decode_only else "any")
                found = compile_traced(mesh, traced)
                yield Program(name, found, _step_faults(program, shape, tensor, found))


def _step_faults(program: ShardedModel, shape: BatchShape, tensor: int, found: Compilation) -> list[str]:
    """Return the faults of a step: donation, copies, temporaries, graphs, collectives."""
    faults = []
    state_bytes = program.pool_bytes + program.slot_state_bytes
    if found.alias_bytes < state_bytes:
        faults.append(f"only {found.alias_bytes} of {state_bytes} bytes of pages and slots are updated in place")
    logits_bytes = 4 * shape.num_rows * program.config.vocab_size // program.parallel.size
    least = min(program.pool_bytes // program.config.num_layers // 2, 16 * _MIB)
    copies = [
        size for size in found.copies_from(least) if size not in (logits_bytes, logits_bytes * program.parallel.size)
    ]
    faults += [f"copies {size / _MIB:.0f} MiB" for size in copies]
    bound = temporary_bound(program, shape)
    if found.temporary_bytes > bound:
        faults.append(f"takes {found.temporary_bytes / _MIB:.0f} MiB of temporaries, bound {bound / _MIB:.0f}")
    wanted = stated_collectives(program.layout, program.config.num_layers)
    most_graphs = 1 + sum(wanted.values())
    if not 1 <= found.num_graphs <= most_graphs or (tensor == 1 and len(found.segments) > 1):
        faults.append(f"is not {most_graphs} CUDA graph(s): {', '.join(found.segments) or 'nothing'}")
    if found.collectives != wanted:
        faults.append(f"communicates {dict(found.collectives)}, stated {wanted}")
    return faults


def temporary_bound(program: ShardedModel, shape: BatchShape) -> int:
    """Return the bytes of temporaries allowed per step: a few activations per token, a few logits per row."""
    config, tokens, rows = program.config, shape.num_tokens, shape.num_rows
    width = program.abstract_model.layer_width + 4 * config.hidden_size
    return 4 * tokens * width + 6 * 4 * rows * config.vocab_size + 64 * _MIB


def main() -> int:
    """Run the checks and print a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("kernels", "steps"))
    parser.add_argument("--match", default="", help="only programs whose name contains this")
    parser.add_argument("--layers", type=int, help="number of layers, for faster checks (default: all)")
    parser.add_argument("--attention-backend", help="as the engine's option (default: its choice)")
    options = parser.parse_args()
    if options.only == "kernels" and (options.layers or options.attention_backend):
        parser.error("--layers and --attention-backend are for steps")
    checks: list[Iterator[Program]] = []
    if options.only != "steps":
        checks.append(check_kernels(options.match))
    if options.only != "kernels":
        checks.append(check_steps(options.match, options.layers, options.attention_backend))
    num_programs = num_failed = 0
    try:
        for program in (program for check in checks for program in check):
            num_programs += 1
            num_failed += bool(program.faults)
            print(_line(program), flush=True)
    except NoCudaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{num_programs} programs, {num_failed} with faults")
    return 1 if num_failed or not num_programs else 0


def _line(program: Program) -> str:
    verdict = "; ".join(program.faults) or "ok"
    if program.compilation is None:
        return f"{program.name}: {verdict}"
    found = program.compilation
    return (
        f"{program.name}: {verdict} [{found.seconds:.1f} s, {len(found.kernels)} kernels, {found.num_graphs} graph(s) "
        f"in {len(found.segments)} segment(s), temporaries {found.temporary_bytes / _MIB:.1f} MiB]"
    )


if __name__ == "__main__":
    sys.exit(main())
