"""Trace steps of the models the engine part runs for a GPU that need not be there.

They have few layers: ``scripts/compile_check.py`` compiles whole ones.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, use_abstract_mesh

from jaxserve.device.buckets import Buckets
from jaxserve.device.kernel_choice import attention_sizes
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import trace_step
from jaxserve.layers.attention import choose_attention
from jaxserve.layers.kv_layout import attended
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel, Scope
from jaxserve.models.abstract import outline
from jaxserve.models.registry import config_from_hf
from scripts.gpu.models import CONFIGS
from scripts.gpu.parts import Context
from scripts.gpu.rows import H200, rows
from sharding import MeshShape, get_layout, make_mesh

_NUM_LAYERS = 2
_PAGE_SIZE = 64


class Step(NamedTuple):
    """A step's name, and what traces it."""

    name: str
    trace: Callable[[], Any]


class _Device(NamedTuple):
    """What choosing a kernel needs of a device."""

    platform: str
    device_kind: str


def steps(context: Context, mesh: Mesh | None) -> Iterator[Step]:
    """Yield decode and prefill steps of every model and attention backend.

    Args:
        context: How many shapes.
        mesh: A GPU's, from ``deviceless.h200_mesh``; None takes this machine's own device and XLA's attention, whose
            lowering needs no GPU to ask.
    """
    names = [row for operation, row in rows(is_tiny=False) if operation == "paged_attention"]
    for backend in names if mesh is not None else ["xla"]:
        for model in ("llama-8b",) if context.is_quick else CONFIGS:
            for num_tokens, decode_only in ((64, True), (2048, False)):
                kind = "decode" if decode_only else "prefill"
                yield Step(
                    f"{model} {backend}: {kind} of {num_tokens}", _tracer(model, backend, num_tokens, decode_only, mesh)
                )


def step_program(
    config: ModelConfig, mesh: Mesh, backend: str | None, num_tokens: int, decode_only: bool
) -> tuple[ShardedModel, BatchShape]:
    """Return the program of a step on H200s and its batch shape, chosen as the engine chooses.

    Args:
        config: The model.
        mesh: Devices to trace for.
        backend: Attention backend; None for the engine's own choice.
        num_tokens: Query tokens.
        decode_only: Whether each row has one token.
    """
    policy = DtypePolicy.for_platform("bfloat16", "gpu")
    layout = get_layout("tensor_parallel").on(mesh)
    parallel = Parallel.on_mesh(layout, mesh)
    sizes, *_ = attention_sizes(attended(outline(config, Scope(parallel=parallel)).kv_specs), parallel, _PAGE_SIZE)
    kernel = choose_attention(_Device(*H200), policy.kv, backend, "paged_attention", **sizes).implementation
    sharded = ShardedModel(config, mesh, layout, policy, kernel, _PAGE_SIZE, num_pages=4096, num_slots=256)
    return sharded, Buckets.make(256, 8192, 512, multiple=2).shape_for(num_tokens, decode_only)


def _tracer(model: str, backend: str, num_tokens: int, decode_only: bool, mesh: Mesh | None) -> Callable[[], Any]:
    def trace() -> Any:
        own = make_mesh(MeshShape()) if mesh is None else mesh
        config = config_from_hf(CONFIGS[model] | {"num_hidden_layers": _NUM_LAYERS}, model)
        sharded, shape = step_program(config, own, backend, num_tokens, decode_only)
        with contextlib.nullcontext() if mesh is None else use_abstract_mesh(mesh.abstract_mesh):
            return trace_step(sharded, shape, "greedy" if decode_only else "any")

    return trace


def lower_step(traced: jax.stages.Traced) -> None:
    """Lower a step for CUDA from a machine that has no GPU."""
    traced.lower(lowering_platforms=("cuda",))
