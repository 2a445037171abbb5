"""Triton kernels: right answers in Triton's interpreter, Triton's compiler for Hopper, and what surrounds them."""

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    grouped_matmul,
    grouped_matmul_triton,
    int4_matmul,
    int4_matmul_triton,
    int4_matmul_xla,
    jax_triton,
    paged_attention,
    paged_attention_jax_triton,
    registry,
)
from pallas_kernels.operation import prepared_shapes

REPOSITORY = Path(__file__).parents[2]
ATTENTION_CASES = (
    "edges",
    "edges_of_page_64",
    "longer_decode",
    "chunk_inside_a_page",
    "mixed",
    "mixed_full",
    "multi_query",
    "group_of_twenty",
    "head_of_80",
    "window",
    "window_one",
    "soft_cap_and_window",
    "bfloat16_mixed",
    "sinks",
    "sinks_decode",
    "sinks_window",
)
INTERPRETED = [
    *[("int4_matmul", "int4_matmul_triton", case) for case in int4_matmul.CASES],
    *[("grouped_matmul", "grouped_matmul_triton", case) for case in grouped_matmul.CASES],
    *[("paged_attention", "paged_attention_jax_triton:JAX_TRITON", case) for case in ATTENTION_CASES],
]
# What interpreted_triton.py breaks, by the cases that it breaks them in.
BROKEN = {
    ("paged_attention", "paged_attention_jax_triton:JAX_TRITON"): {
        "longer_decode": (
            "decode_tile_dropped",
            "decode_token_too_many",
            "decode_token_too_few",
            "decode_page_of_the_tile_before",
            "decode_page_of_another_row",
            "decode_heads_swapped",
            "combine_split_dropped",
            "combine_weight_of_a_split_too_large",
            "combine_splits_swapped",
            "combine_logs_ignored",
        ),
        "chunk_inside_a_page": (
            "prefill_tile_dropped",
            "prefill_token_too_many",
            "prefill_token_too_few",
            "prefill_page_of_the_tile_before",
            "prefill_page_of_another_row",
            "prefill_heads_swapped",
        ),
        "window": (
            "decode_window_too_wide",
            "decode_window_too_narrow",
            "prefill_window_too_wide",
            "prefill_window_too_narrow",
        ),
        "sinks_window": ("decode_sinks_swapped", "decode_sinks_ignored", "prefill_sinks_swapped"),
        "sinks_decode": ("combine_sinks_swapped", "combine_sinks_ignored"),
    },
    ("int4_matmul", "int4_matmul_triton"): {
        "many_splits": (
            "features_dropped",
            "plane_dropped",
            "zero_points_off_by_one",
            "scales_of_the_next_group",
            "words_of_the_next_tile",
        ),
    },
    ("grouped_matmul", "grouped_matmul_triton"): {
        "tile_borders": ("depth_dropped", "border_too_early", "border_too_late", "matrix_of_the_expert_before"),
        "gated_rows_behind": ("depth_dropped", "matrix_of_the_expert_before"),
    },
}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")


@pytest.fixture(scope="module")
def interpreter():
    """Asks a process that has Triton's interpreter; see ``interpreted_triton.py``."""
    for package in ("triton", "torch"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"Triton's interpreter needs the package {package}")
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("interpreted_triton.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    questions, answers = process.stdin, process.stdout

    def ask(**question):
        questions.write(json.dumps(question) + "\n")
        questions.flush()
        return json.loads(answers.readline())

    yield ask
    questions.close()
    process.wait(timeout=60)
    answers.close()


@pytest.mark.parametrize("operation, module, case", INTERPRETED)
def test_interpreted_kernel_matches_reference(interpreter, operation, module, case):
    answer = interpreter(operation=operation, module=module, case=case)
    assert answer["failure"] is None, answer["failure"]
    assert answer["error"] <= 1, answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation, module, case, fault",
    [(*kernel, case, fault) for kernel, cases in BROKEN.items() for case, faults in cases.items() for fault in faults],
)
def test_comparison_notices_a_broken_kernel(interpreter, operation, module, case, fault):
    """Run the kernel in float16; the error of the broken one must exceed even what bfloat16 is allowed."""
    ask = functools.partial(interpreter, operation=operation, module=module, case=case, dtype="float16")
    right, broken = ask(), ask(fault=fault)
    assert right["failure"] is None and broken["failure"] is None, (right, broken)
    op: Any = registry.operation(operation)
    shares = [op.tolerance(op.CASES[case]._replace(dtype=dtype)).share for dtype in ("float16", "bfloat16")]
    assert right["error"] <= 1 and broken["error"] * shares[0] > shares[1], (right, broken)


def run_ptx(code, registers):
    """What a nibble's PTX gives, instruction by instruction on arrays of 32-bit words."""
    registers = dict(registers)
    for step in code.strip("{} ").split(";"):
        name, *operands = step.replace(",", " ").split() or [""]
        if name in ("", ".reg"):
            continue
        target, *sources = operands
        values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
        if name == "prmt.b32":
            both = np.stack([(word >> (8 * byte)) & 255 for word in values[:2] for byte in range(4)])
            chosen = [both[(int(values[2]) >> (4 * byte)) & 15] << (8 * byte) for byte in range(4)]
            registers[target] = chosen[0] | chosen[1] | chosen[2] | chosen[3]
        elif name == "shr.u32":
            registers[target] = values[0] >> values[1]
        elif name == "lop3.b32":
            assert values[3] == 0xEA  # (a & b) | c
            registers[target] = (values[0] & values[1]) | values[2]
        else:
            function, _, kind = name.split(".")
            dtype = {"bf16x2": jnp.bfloat16, "f16x2": jnp.float16}[kind]
            left, right = (np.asarray(v, np.uint32).view(dtype) for v in values)
            registers[target] = {"sub": np.subtract, "mul": np.multiply}[function](left, right).view(np.uint32)
    return registers["$0"]


@needs_triton
@pytest.mark.parametrize("kind, magic, dtype", [("bf16x2", 0x4300, jnp.bfloat16), ("f16x2", 0x6400, jnp.float16)])
def test_ptx_unpacks_as_the_interpreted_code_does(kind, magic, dtype):
    """The interpreter knows no PTX, so these instructions are checked for themselves."""
    kernels = jax_triton.kernels("int4_matmul_kernels")
    random = np.random.default_rng(0)
    words = random.integers(0, 2**32, (2, 500), np.uint32)
    zero = random.integers(0, 128, 500)
    scale = random.uniform(0.001, 0.1, 500).astype(dtype)
    lifted = ((magic | zero) * 0x10001).astype(np.uint32)
    scales = np.stack([scale, scale], 1).reshape(-1).view(np.uint32)
    for nibble in range(8):
        code = kernels.nibble_ptx(kind, magic, nibble)
        found = run_ptx(code, {"$1": words[0], "$2": words[1], "$3": lifted, "$4": scales})
        values = (words >> (4 * nibble)) & 15
        wanted = ((values.astype(np.int64) - zero).astype(dtype) * scale).T.reshape(-1)
        np.testing.assert_array_equal(found.view(dtype), wanted)


COMPILED = [
    (int4_matmul, int4_matmul_triton, "llama_8b_gate_up_16"),
    (int4_matmul, int4_matmul_triton, "llama_8b_down_64"),
    (int4_matmul, int4_matmul_triton, "qwen_14b_out_256"),
    (grouped_matmul, grouped_matmul_triton, "qwen3_30b_a3b_gate_up_64"),
    (grouped_matmul, grouped_matmul_triton, "mixtral_8x7b_down_8192"),
    (paged_attention, paged_attention_jax_triton.JAX_TRITON, "prefill_2k_after_0_page_64"),
    (paged_attention, paged_attention_jax_triton.JAX_TRITON, "sinks_prefill_2k_after_8k_page_64"),
]


@needs_triton
@pytest.mark.parametrize("operation, implementation, bench", COMPILED, ids=[row[2] for row in COMPILED])
def test_compiles_for_an_h200_without_spills(monkeypatch, tmp_path, operation, implementation, bench):
    """Triton's own compiler and assembler: tensor cores, nothing in local memory, shared memory that fits."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = {}
    monkeypatch.setattr(jax_triton, "call", lambda *args, **options: compile_call(compiled, *args, **options))
    case = operation.BENCHES[bench]
    prepared = prepared_shapes(operation, implementation, case)
    jax.eval_shape(lambda prepared: operation.run(implementation, case, prepared), prepared)
    assert compiled
    for name, kernel in compiled.items():
        resources, assembly = dump_cubin(kernel, tmp_path)
        assert re.search(r"STACK:0 .*LOCAL:0", resources), (name, resources)
        assert not re.search(r"\b(LDL|STL)\b", assembly), name
        assert kernel.metadata.shared <= 232448, name
        assert name == "combine_kernel" or "HGMMA" in assembly or "HMMA" in assembly


def compile_call(compiled, kernel, *arrays, out_type, grid, num_warps, num_stages, **constants):
    """Compiles what ``jax_triton.call`` would launch, and gives shapes alone."""
    import triton
    from triton.backends.compiler import GPUTarget

    kinds = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "uint8": "*u8"}
    values = iter([*arrays, *jax.tree.leaves(out_type)])
    signature, attributes = {}, {}
    for position, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            continue
        value = next(values)
        signature[parameter.name] = "i32" if isinstance(value, int) else kinds[str(value.dtype)]
        if not isinstance(value, int):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    options = jax_triton.backend_options(num_warps, num_stages)
    compiled[kernel.fn.__name__] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_type)


def dump_cubin(kernel, folder):
    """Resources and instructions of a compiled kernel, by the tool that comes with Triton."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"
    return [
        subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
        for option in ("--dump-resource-usage", "--dump-sass")
    ]


def test_missing_packages_are_named(monkeypatch):
    for device in (("cpu", "cpu"), ("gpu", "NVIDIA A100-SXM4-80GB"), ("gpu", "NVIDIA B200")):
        assert f"for NVIDIA Hopper GPUs, not for {device[1]}" in str(jax_triton.unsupported(*device))
    jax_triton._missing.cache_clear()
    versions = {"triton": "3.9.0"}

    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    for found, reason in ((None, "needs the package jax-triton"), ("0.3.1", "needs jax-triton 0.4.1 or newer")):
        if found is not None:
            versions["jax-triton"] = found
        assert reason in str(jax_triton.unsupported("gpu", "NVIDIA H200"))
        jax_triton._missing.cache_clear()
    del versions["triton"]
    for implementation in (int4_matmul_triton, grouped_matmul_triton, paged_attention_jax_triton.JAX_TRITON):
        assert "needs the package triton" in str(implementation.unsupported("gpu", "NVIDIA H200", "bfloat16"))
        assert "float32, not int8" in str(implementation.unsupported("gpu", "NVIDIA H200", "int8"))
    jax_triton._missing.cache_clear()


def quantised(num_in=384, num_out=40, group=32, seed=0):
    random = np.random.default_rng(seed)
    values = random.integers(0, 16, (num_in, num_out), np.uint8)
    scales = random.uniform(0.1, 1, (num_in // group, num_out)).astype(np.float32)
    return values, scales, random.integers(0, 17, scales.shape, np.uint8)


def test_packed_weights_are_what_was_packed():
    values, scales, zeros = quantised()
    wanted = (values - np.repeat(zeros, 32, 0).astype(np.float32)) * np.repeat(scales, 32, 0)
    packed = int4_matmul.pack(values, scales, zeros)
    assert packed.words.shape == (64, 40) and packed.words.dtype == jnp.int32
    np.testing.assert_array_equal(int4_matmul.dequantise(packed, 384), wanted)
    symmetric = int4_matmul.dequantise(int4_matmul.pack(values, scales), 384)
    np.testing.assert_array_equal(symmetric, (values.astype(np.float32) - 8) * np.repeat(scales, 32, 0))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_words_along_the_input_are_packed_alike(dtype):
    """Eight values a word, lowest bits first: the order of GPTQ's qweight."""
    values, scales, zeros = quantised()
    words = np.zeros((48, 40), np.uint32)
    for place in range(8):
        words |= values[place::8].astype(np.uint32) << np.uint32(4 * place)
    packed = int4_matmul.pack(words.view(dtype), scales, zeros, g_idx=np.arange(384) // 32)
    np.testing.assert_array_equal(packed.words, int4_matmul.pack(values, scales, zeros).words)


def test_weights_that_cannot_be_packed_are_refused():
    values, scales, zeros = quantised()
    with pytest.raises(ValueError, match=r"groups in activation order \(g_idx, act-order / desc_act\) are not supp"):
        int4_matmul.pack(values, scales, zeros, g_idx=np.arange(384)[::-1] // 32)
    with pytest.raises(ValueError, match="groups of 32, 64, 128 or a multiple of 256 .* not 48"):
        int4_matmul.pack(values, np.ones((8, 40), np.float32))
    with pytest.raises(ValueError, match=r"got values \(384, 40\), scales \(12, 40\), zeros \(12, 39\)"):
        int4_matmul.pack(values, scales, zeros[:, 1:])
    with pytest.raises(ValueError, match="8-bit elements or 32-bit words, not int16"):
        int4_matmul.pack(values.astype(np.int16), scales, zeros)
    assert "not 16" in str(int4_matmul_xla.unsupported("cpu", "cpu", "float32", group_size=16))
    assert "not 16" in str(int4_matmul_triton.unsupported("gpu", "NVIDIA H200", "float16", group_size=16))


@pytest.mark.parametrize("widths", [(4096, 4096), (14336, 4096), (4096, 28672), (96, 32), (2944, 80)])
def test_tiling_depends_on_rows_by_their_tile_alone(widths):
    tilings = [int4_matmul_triton.choose_tiling(num_rows, *widths) for num_rows in range(1, 512)]
    assert len(set(tilings)) == 4
    for tiling in tilings:
        tiles = -(-widths[0] // int4_matmul.TILE)
        assert (tiling.splits - 1) * -(-tiles // tiling.splits) < tiles  # no split is empty
