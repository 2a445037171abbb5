"""Measure the matrix multiplications of the models' layers as the engine writes them, compiled by XLA."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear import Fused
from pallas_kernels.linear_xla import matmul
from pallas_kernels.operation import Tolerance, compare_rows
from scripts.gpu.compiling import compile_all, compiled_without_autotuning, succeeded
from scripts.gpu.driver import is_device_lost
from scripts.gpu.figures import Figure
from scripts.gpu.models import config_of, head_dim_of
from scripts.gpu.parts import AS_NEEDED, Context, Item, Program, Working
from scripts.gpu.timing import GRAPH_OPTIONS, Rotation, choose_sets, tree_bytes
from scripts.gpu.wrong_results import failure_note, require_right

IS_ALONE: bool = False
ENVIRONMENT: dict[str, str] = AS_NEEDED
DECODE, PREFILL = (2, 8, 16, 64, 256), (2048, 8192)
GOAL_BYTES = 64 << 20


def items(context: Context) -> list[Item]:
    """List each model's decode and prefill shapes."""
    models = ("llama-8b",) if context.is_quick else ("llama-8b", "qwen-14b")
    return [Item(f"{model} {kind}", 30.0) for kind in ("decode", "prefill") for model in models]


def run(item: str, context: Context) -> Iterator[Figure | Working]:
    """Compile an item's multiplications side by side, then compare and time one after the other."""
    rotations = _rotations(item, context)
    compiled = yield from compile_all({name: rotation.compile for name, rotation in rotations.items()})
    for name, rotation in rotations.items():
        yield Working(f"timing {name}")
        try:
            yield _measured(name, rotation, succeeded(compiled[name]), context)
        except Exception as error:
            yield Figure(part="gemms", name=name, value="fail", note=failure_note(error))
            if is_device_lost(error):
                raise


def programs(context: Context) -> Iterator[Program]:
    """List every multiplication."""
    for item in items(context):
        for name, rotation in _rotations(item.name, context).items():
            few = dataclasses.replace(rotation, num_sets=2)
            yield Program(name, few.program, few.arguments, options=GRAPH_OPTIONS)


def weights_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the shapes of the fused weights, [out, in]."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], head_dim_of(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "out": (hidden, heads * head_dim),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
        "head": (config["vocab_size"], hidden),
    }


def _product(pair: tuple[jax.Array, jax.Array], is_head: bool) -> jax.Array:
    x, weight = pair
    result = matmul(x, weight, weight.shape[0], fused=Fused())
    return result if is_head else result.astype(x.dtype)


def _reference(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Multiply in float32."""
    x, weight = (array.astype(jnp.float32) for array in pair)
    return jnp.dot(x, weight.T, precision=jax.lax.Precision.HIGHEST)


def _rotations(item: str, context: Context) -> dict[str, Rotation]:
    model, kind = item.split()
    rows = DECODE if kind == "decode" else PREFILL
    if context.is_quick or context.is_tiny:
        rows = rows[:1]
    found = {}
    for name, (outer, inner) in weights_of(config_of(model, context.is_tiny)).items():
        if kind == "prefill" and name == "head":
            continue  # only the last token of a chunk goes through it
        for num_rows in rows:
            pair = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((num_rows, inner), (outer, inner)))
            held = tree_bytes(pair) + 4 * num_rows * outer
            num_sets = choose_sets(tree_bytes(pair), held)
            assert num_sets is not None, pair
            call = jax.jit(functools.partial(_product, is_head=name == "head"))
            found[f"{model} {name} {num_rows}x{inner}x{outer}"] = Rotation(call, pair, num_sets)
    return found


def _measured(name: str, rotation: Rotation, compiled: Any, context: Context) -> Figure:
    activations, weight = rotation.struct

    @jax.jit
    def make(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        left, right = jax.random.split(jax.random.fold_in(jax.random.key(context.seed % 1_000_003), i))
        x = jax.random.normal(left, activations.shape, jnp.bfloat16)
        return x, jax.random.normal(right, weight.shape, jnp.bfloat16) * 0.02

    def check(found: jax.Array) -> None:
        pair = make(0)
        expected = compiled_without_autotuning(_reference, rotation.struct)(pair)
        is_real = np.ones(found.shape[0], bool)
        tolerance = Tolerance(1e-2, 1e-3 * found.shape[1] ** 0.5)
        require_right(compare_rows(("product",), found, expected, is_real, tolerance))

    timing = rotation.measure(compiled, make, check)
    (num_rows, inner), outer = activations.shape, weight.shape[0]
    num_bytes = tree_bytes(rotation.struct) + tree_bytes(jax.eval_shape(rotation.function, rotation.struct))
    flops = 2 * num_rows * inner * outer
    note = f"{num_bytes / timing.seconds / 1e9:.0f} GB/s, {flops / timing.seconds / 1e12:.1f} TFLOP/s"
    note += f"; {timing.num_sets} sets in turn, repeats within {timing.spread:.1%}"
    is_goal = num_rows <= max(DECODE) and tree_bytes(weight) >= GOAL_BYTES
    goal = "88 %, then 93 %" if is_goal else ""
    return Figure.timed("gemms", name, timing.seconds, context.least_s(num_bytes, flops), note=note, goal=goal)
