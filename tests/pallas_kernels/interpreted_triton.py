"""Runs cases of an operation with its Triton kernels in Triton's own interpreter, for ``test_jax_triton.py``.

A program of its own, since the interpreter has to be chosen before triton is imported: it reads one case a line,
``{"operation": ..., "module": ..., "case": ...}`` ("module" may end in ``:NAME``), and answers each with a line,
``{"error": ..., "failure": ...}``: the largest difference from the reference as a share of what the operation
tolerates, or a traceback. Cases in bfloat16, which the interpreter cannot compute with, are run in float16.
"""

import functools
import importlib
import json
import os
import sys
import traceback
import zlib

os.environ["TRITON_INTERPRET"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import torch

from pallas_kernels import jax_triton
from pallas_kernels.operation import largest_error


def call(kernel, *arrays, out_type, grid, num_warps, num_stages, **constants):
    """What ``jax_triton.call`` does, on the host and at once; what the kernel does not write is NaN."""
    inputs = [a if isinstance(a, int | float) else torch.from_numpy(np.array(a)) for a in arrays]
    outputs = jax.tree.map(lambda out: torch.full(out.shape, torch.nan, dtype=torch_type(out.dtype)), out_type)
    kernel[grid](*inputs, *jax.tree.leaves(outputs), **constants)
    return jax.tree.map(lambda out: jnp.asarray(out.numpy()), outputs)


def torch_type(dtype):
    return getattr(torch, str(jnp.dtype(dtype)))


def run(operation, module, case):
    """Largest difference from the reference, as a share of what the operation tolerates."""
    operation = importlib.import_module(f"pallas_kernels.{operation}")
    module, _, attribute = module.partition(":")
    implementation = importlib.import_module(f"pallas_kernels.{module}")
    implementation = getattr(implementation, attribute) if attribute else implementation
    key = jax.random.key(zlib.crc32(case.encode()))
    case = operation.CASES[case]
    case = case._replace(dtype="float16") if case.dtype == "bfloat16" else case
    inputs = jax.jit(functools.partial(operation.make_inputs, case))(key)
    prepared = jax.jit(functools.partial(operation.prepare, implementation, case))(inputs)
    found = operation.run(implementation, case, prepared)
    expected = jax.jit(functools.partial(operation.expected, case))(inputs)
    return largest_error(found, expected) / operation.tolerance(case)


def main():
    jax_triton.call = call
    for line in sys.stdin:
        try:
            answer = {"error": run(**json.loads(line)), "failure": None}
        except Exception:
            answer = {"error": None, "failure": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
