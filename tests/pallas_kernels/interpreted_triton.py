"""Runs cases of an operation with its Triton kernels in Triton's own interpreter, for ``test_jax_triton.py``.

A program of its own, since the interpreter has to be chosen before triton is imported: it reads one case a line,
``{"operation": ..., "module": ..., "case": ...}`` ("module" may end in ``:NAME``), and answers each with a line,
``{"error": ..., "place": ..., "failure": ...}``: the largest error of a row as a multiple of what the operation allows
and where that row is, or a traceback. "dtype" may replace the case's; bfloat16, which the interpreter cannot compute
with, becomes float16. "fault" may name one of ``FAULTS``, to run the kernels broken.

``@triton.jit`` functions cannot be patched, so a fault changes what a kernel is launched with: a kernel that reads the
wrong page gets a page table with the wrong page in it.
"""

import functools
import importlib
import json
import os
import sys
import traceback
import zlib
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import torch

from pallas_kernels import jax_triton
from pallas_kernels.attention_scores import MASKED


def added(number, *index):
    """Return a change of an array that adds ``number`` at ``index``."""

    def change(array):
        array[index] += number
        return array

    return change


def filled(number, *index):
    """Return a change of an array that stores ``number`` at ``index``."""

    def change(array):
        array[index] = number
        return array

    return change


def copied(source, target):
    """Return a change of an array that stores the elements at index ``source`` also at index ``target``."""

    def change(array):
        array[target] = array[source]
        return array

    return change


def swapped(axis):
    """Return a change of an array that swaps the first two elements along ``axis``."""

    def change(array):
        first, second, others = np.split(array, [1, 2], axis)
        return np.concatenate([second, first, others], axis)

    return change


def without_pages(row, first, count):
    """Return a change of a page table that removes ``count`` pages of a row and keeps the table's width."""

    def change(table):
        kept = np.delete(table[row], slice(first, first + count))
        table[row] = np.pad(kept, (0, count), mode="edge")
        return table

    return change


def scoring(window):
    """Return a change of the constant SCORING that adds to the sliding window."""
    return lambda constants: (constants[0], constants[1] + window, *constants[2:])


def without_sinks(constants):
    """Return the constant SCORING without sinks."""
    return (*constants[:3], False)


# What each fault changes: the kernel, its parameter, and what becomes of that parameter's value. Rows, pages and sizes
# are those of the cases that test_jax_triton.py breaks: row 0 of "longer_decode" has 2050 tokens in pages of 32, row 2
# of "chunk_inside_a_page" has 300 in pages of 64.
FAULTS = {
    "decode_tile_dropped": {"decode_kernel": {"table_ptr": without_pages(0, 10, 2), "lens_ptr": added(-64, 0)}},
    "decode_token_too_many": {"decode_kernel": {"lens_ptr": added(1, 0)}},
    "decode_token_too_few": {"decode_kernel": {"lens_ptr": added(-1, 0)}},
    "decode_page_of_the_tile_before": {"decode_kernel": {"table_ptr": copied((0, 31), (0, 32))}},
    "decode_page_of_another_row": {"decode_kernel": {"table_ptr": copied((2, 5), (0, 5))}},
    "decode_heads_swapped": {"decode_kernel": {"query_ptr": swapped(1)}},
    "combine_split_dropped": {"combine_kernel": {"logs_ptr": filled(MASKED, ..., 1)}},
    "combine_weight_of_a_split_too_large": {"combine_kernel": {"logs_ptr": added(0.25, ..., 1)}},
    "combine_splits_swapped": {"combine_kernel": {"parts_ptr": swapped(2)}},
    "combine_logs_ignored": {"combine_kernel": {"logs_ptr": np.zeros_like}},
    "prefill_tile_dropped": {
        "prefill_kernel": {"table_ptr": without_pages(2, 1, 1), "context_lens_ptr": added(-64, 2)}
    },
    "prefill_token_too_many": {"prefill_kernel": {"context_lens_ptr": added(1, 2)}},
    "prefill_token_too_few": {"prefill_kernel": {"context_lens_ptr": added(-1, 2)}},
    "prefill_page_of_the_tile_before": {"prefill_kernel": {"table_ptr": copied((2, 1), (2, 2))}},
    "prefill_page_of_another_row": {"prefill_kernel": {"table_ptr": copied((1, 1), (2, 1))}},
    "prefill_heads_swapped": {"prefill_kernel": {"query_ptr": swapped(1)}},
    "decode_sinks_ignored": {"decode_kernel": {"SCORING": without_sinks}},
    "combine_sinks_ignored": {"combine_kernel": {"SINKS": lambda num_heads: 0}},
    **{
        f"{part}_sinks_swapped": {f"{part}_kernel": {"sinks_ptr": swapped(0)}}
        for part in ("decode", "combine", "prefill")
    },
    **{
        f"{part}_window_{name}": {f"{part}_kernel": {"SCORING": scoring(change)}}
        for part in ("decode", "prefill")
        for name, change in (("too_wide", 1), ("too_narrow", -1))
    },
    "features_dropped": {"int4_matmul_kernel": {"x_ptr": filled(0, slice(None), slice(256, 512))}},
    "plane_dropped": {"int4_matmul_kernel": {"x_ptr": filled(0, slice(None), slice(32, 64))}},
    "zero_points_off_by_one": {"int4_matmul_kernel": {"zeros_ptr": added(1, 1)}},
    "scales_of_the_next_group": {"int4_matmul_kernel": {"scales_ptr": copied((1,), (0,))}},
    "words_of_the_next_tile": {"int4_matmul_kernel": {"words_ptr": copied(slice(32, 64), slice(0, 32))}},
    "depth_dropped": {"grouped_matmul_kernel": {"lhs_ptr": filled(0, slice(None), slice(0, 32))}},
    "border_too_early": {"grouped_matmul_kernel": {"sizes_ptr": lambda sizes: added(1, 1)(added(-1, 0)(sizes))}},
    "border_too_late": {"grouped_matmul_kernel": {"sizes_ptr": lambda sizes: added(-1, 1)(added(1, 0)(sizes))}},
    "matrix_of_the_expert_before": {"grouped_matmul_kernel": {"rhs_ptr": copied((0,), (1,))}},
}


def call(kernel, *arrays, out_type, grid, num_warps, num_stages, fault, **constants):
    """What ``jax_triton.call`` does, on the host and at once; what the kernel does not write is NaN."""
    values = dict(
        zip(kernel.arg_names, [a if isinstance(a, int | float) else np.array(a) for a in arrays], strict=False)
    )
    for name, change in FAULTS[fault].get(kernel.fn.__name__, {}).items() if fault else ():
        taken = values if name in values else constants
        taken[name] = change(taken[name])
    inputs = [a if isinstance(a, int | float) else torch.from_numpy(a) for a in values.values()]
    outputs = jax.tree.map(lambda out: torch.full(out.shape, torch.nan, dtype=torch_type(out.dtype)), out_type)
    kernel[grid](*inputs, *jax.tree.leaves(outputs), **constants)
    return jax.tree.map(lambda out: jnp.asarray(out.numpy()), outputs)


def torch_type(dtype):
    return getattr(torch, str(jnp.dtype(dtype)))


class Problem(NamedTuple):
    """A case with its inputs, what the implementation is given, and the reference's result."""

    operation: Any
    implementation: Any
    case: Any
    inputs: Any
    prepared: Any
    expected: Any


@functools.cache
def problem(operation, module, case, dtype):
    operation = importlib.import_module(f"pallas_kernels.{operation}")
    module, _, attribute = module.partition(":")
    implementation = importlib.import_module(f"pallas_kernels.{module}")
    implementation = getattr(implementation, attribute) if attribute else implementation
    key = jax.random.key(zlib.crc32(case.encode()))
    case = operation.CASES[case]
    case = case._replace(dtype="float16" if "bfloat16" in (case.dtype, dtype) else dtype or case.dtype)
    inputs = jax.jit(functools.partial(operation.make_inputs, case))(key)
    prepared = jax.jit(functools.partial(operation.prepare, implementation, case))(inputs)
    expected = jax.jit(functools.partial(operation.expected, case))(inputs)
    return Problem(operation, implementation, case, inputs, prepared, expected)


@functools.cache  # a case as it is stands beside each of its faults
def run(operation, module, case, dtype=None, fault=None):
    """Compare a case with its reference."""
    jax_triton.call = functools.partial(call, fault=fault)
    operation, implementation, case, inputs, prepared, expected = problem(operation, module, case, dtype)
    return operation.compare(case, inputs, operation.run(implementation, case, prepared), expected)


def main():
    for line in sys.stdin:
        try:
            found = run(**json.loads(line))
            answer = {"error": found.worst, "place": found.place, "failure": None}
        except Exception:
            answer = {"error": None, "place": None, "failure": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
