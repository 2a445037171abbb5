"""Writes quantized checkpoints for tests: quantizes the linear layers of a float one, format by format, in plain NumPy.

Each writer returns the stored tensors of one weight and the float32 weight that they stand for, computed element by
element from the format's description and not with the product's code.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Written(NamedTuple):
    """The stored tensors of one module by their suffix, and the weight [out, in] that they stand for."""

    stored: dict[str, np.ndarray]
    weight: np.ndarray


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack each row of codes into int32 words, as one stream of bits, the lowest first; the rest of a word is zero."""
    num_rows, count = codes.shape
    words = np.zeros((num_rows, -(-count * bits // 32)), np.uint64)
    for index in range(count):
        at = index * bits
        shifted = codes[:, index].astype(np.uint64) << np.uint64(at % 32)
        words[:, at // 32] |= shifted & np.uint64(0xFFFFFFFF)
        if at % 32 + bits > 32:
            words[:, at // 32 + 1] |= shifted >> np.uint64(32)
    return words.astype(np.uint32).view(np.int32)


def random_affine(
    rng: np.random.Generator, shape: tuple[int, int], bits: int, group_of: np.ndarray, zero: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return random codes [out, in], scales and zeros [out, groups], and the weight that they stand for."""
    num_outputs, num_inputs = shape
    num_groups = int(group_of.max()) + 1
    codes = rng.integers(0, 1 << bits, shape)
    zeros = (
        rng.integers(0, 1 << bits, (num_outputs, num_groups))
        if zero is None
        else np.full((num_outputs, num_groups), zero)
    )
    scales = (rng.uniform(0.5, 2.0, (num_outputs, num_groups)) / (np.sqrt(num_inputs) * (1 << bits))).astype(np.float16)
    weight = (codes - zeros[:, group_of]).astype(np.float32) * scales[:, group_of].astype(np.float32)
    return codes, scales, zeros, weight


def write_awq(rng: np.random.Generator, shape: tuple[int, int], group: int) -> Written:
    """Write a weight as AWQ's version "gemm" does."""
    size = shape[1] if group == -1 else group
    codes, scales, zeros, weight = random_affine(rng, shape, 4, np.arange(shape[1]) // size, None)

    def packed(values: np.ndarray) -> np.ndarray:
        """[rows, outputs] to words of eight outputs in AWQ's order."""
        ordered = values.reshape(len(values), -1, 8)[:, :, AWQ_ORDER].reshape(len(values), -1)
        return pack_bits(ordered, 4)

    return Written(
        {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": np.ascontiguousarray(scales.T)}, weight
    )


def write_gptq(
    rng: np.random.Generator,
    shape: tuple[int, int],
    group: int,
    bits: int,
    *,
    is_symmetric: bool,
    has_act_order: bool,
    version: str,
) -> Written:
    """Write a weight as GPTQ does, version "gptq" or "gptq_v2"."""
    size = shape[1] if group == -1 else group
    group_of = np.arange(shape[1]) // size
    if has_act_order:
        group_of = rng.permutation(group_of)
    zero = 1 << (bits - 1) if is_symmetric else None
    codes, scales, zeros, weight = random_affine(rng, shape, bits, group_of, zero)
    stored_zeros = zeros if version == "gptq_v2" else (zeros - 1) % (1 << bits)
    return Written(
        {
            "qweight": np.ascontiguousarray(pack_bits(codes, bits).T),
            "qzeros": pack_bits(stored_zeros.T, bits),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": group_of.astype(np.int32),
        },
        weight,
    )


def write_packed(
    rng: np.random.Generator, shape: tuple[int, int], group: int, bits: int, *, is_symmetric: bool
) -> Written:
    """Write a weight as compressed-tensors' pack-quantized does; group -1: one scale for each row."""
    size = shape[1] if group == -1 else group
    zero = 1 << (bits - 1) if is_symmetric else None
    codes, scales, zeros, weight = random_affine(rng, shape, bits, np.arange(shape[1]) // size, zero)
    stored = {
        "weight_packed": pack_bits(codes, bits),
        "weight_scale": scales,
        "weight_shape": np.array(shape, np.int64),
    }
    if not is_symmetric:
        stored["weight_zero_point"] = np.ascontiguousarray(pack_bits(zeros.T, bits).T)
    return Written(stored, weight)


def write_one_byte(
    rng: np.random.Generator,
    shape: tuple[int, int],
    dtype: Any,
    block: tuple[int, int] | None = None,
    *,
    scale_name: str = "weight_scale",
    is_per_row: bool = False,
) -> Written:
    """Write a weight in int8 or float8 with scales of blocks, of rows or of all."""
    rows, columns = shape
    if np.dtype(dtype) == np.int8:
        numbers = rng.integers(-127, 128, shape).astype(np.int8)
    else:
        numbers = rng.standard_normal(shape).astype(np.float32).astype(dtype)
    if block is not None:
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        scales = rng.uniform(0.01, 0.02, grid).astype(np.float32)
        each = np.repeat(np.repeat(scales, block[0], 0)[:rows], block[1], 1)[:, :columns]
    else:
        scales = rng.uniform(0.01, 0.02, (rows, 1) if is_per_row else (1,)).astype(np.float32)
        each = scales
    stored = {"weight": numbers, scale_name: scales, "input_scale": np.ones(1, np.float32)}
    return Written(stored, numbers.astype(np.float32) * each)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def random_float4(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return random bytes of two four-bit floats [..., K / 2], the even one low, and their values [..., K]."""
    codes = rng.integers(0, 16, shape)
    values = np.array(E2M1, np.float32)[codes % 8] * np.where(codes < 8, 1, -1).astype(np.float32)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8), values


def write_mxfp4(rng: np.random.Generator, shape: tuple[int, int]) -> Written:
    """Write a weight as compressed-tensors' mxfp4-pack-quantized does."""
    packed, values = random_float4(rng, shape)
    exponents = rng.integers(118, 124, (shape[0], shape[1] // 32)).astype(np.uint8)
    scales = np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, 1).astype(np.float32)
    return Written({"weight_packed": packed, "weight_scale": exponents}, values * scales)


def write_nvfp4(rng: np.random.Generator, shape: tuple[int, int], *, is_modelopt: bool) -> Written:
    """Write a weight as compressed-tensors' nvfp4-pack-quantized does, or as ModelOpt."""
    packed, values = random_float4(rng, shape)
    scales = rng.uniform(10, 400, (shape[0], shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    overall = np.float32(0.0003 if is_modelopt else 3000.0)
    each = scales.astype(np.float32) * overall if is_modelopt else scales.astype(np.float32) / overall
    weight = values * np.repeat(each, 16, 1)
    if is_modelopt:
        return Written({"weight": packed, "weight_scale": scales, "weight_scale_2": np.array(overall)}, weight)
    return Written({"weight_packed": packed, "weight_scale": scales, "weight_global_scale": overall.reshape(1)}, weight)


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def write_nf4(rng: np.random.Generator, shape: tuple[int, int], *, is_double: bool, block: int = 64) -> Written:
    """Write a weight as bitsandbytes does with 4 bits, its scales quantized again or not."""
    count = shape[0] * shape[1]
    codes = rng.integers(0, 16, count)
    table = np.array(NF4, np.float32)
    num_blocks = -(-count // block)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": list(shape)}
    stored: dict[str, np.ndarray] = {}
    if is_double:
        nested = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        outer = rng.uniform(0.001, 0.003, -(-num_blocks // 256)).astype(np.float32)
        inner = rng.integers(0, 256, num_blocks).astype(np.uint8)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.02}
        scales = nested[inner] * outer[np.arange(num_blocks) // 256] + np.float32(0.02)
        stored = {"weight.absmax": inner, "weight.nested_quant_map": nested, "weight.nested_absmax": outer}
    else:
        scales = rng.uniform(0.01, 0.05, num_blocks).astype(np.float32)
        stored = {"weight.absmax": scales}
    padded = np.append(codes, 0)[: count + count % 2]
    stored["weight"] = (padded[0::2] << 4 | padded[1::2]).astype(np.uint8)[:, None]
    stored["weight.quant_map"] = table
    stored["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return Written(stored, (table[codes] * scales[np.arange(count) // block]).reshape(shape))


def write_bnb_int8(rng: np.random.Generator, shape: tuple[int, int]) -> Written:
    """Write a weight as bitsandbytes does with 8 bits."""
    numbers = rng.integers(-127, 128, shape).astype(np.int8)
    largest = rng.uniform(0.5, 2, shape[0]).astype(np.float32)
    weight = numbers.astype(np.float32) * (largest / np.float32(127))[:, None]
    return Written({"weight": numbers, "SCB": largest, "weight_format": np.zeros((), np.uint8)}, weight)


def write_mlx(rng: np.random.Generator, shape: tuple[int, int], group: int, bits: int) -> Written:
    """Write a weight as MLX does."""
    codes = rng.integers(0, 1 << bits, shape)
    scales, biases = (rng.uniform(-0.1, 0.1, (shape[0], shape[1] // group)).astype(np.float16) for _ in range(2))
    each, offsets = (np.repeat(grid.astype(np.float32), group, 1) for grid in (scales, biases))
    stored = {"weight": pack_bits(codes, bits).view(np.uint32), "scales": scales, "biases": biases}
    return Written(stored, codes.astype(np.float32) * each + offsets)


Writer = Callable[[np.random.Generator, tuple[int, int]], Written]


def quantize(
    tensors: Mapping[str, np.ndarray], write: Writer, is_quantized: Callable[[str], bool], seed: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a checkpoint's tensors with the linear weights replaced by quantized ones, and the float ones of the same
    values.

    Args:
        tensors: The tensors of a float checkpoint; only the shapes of quantized ones count.
        write: Writes one weight.
        is_quantized: Whether to quantize the weight of this name.
        seed: Seed of the random values.
    """
    rng = np.random.default_rng(seed)
    stored: dict[str, np.ndarray] = {}
    floats: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if not is_quantized(name):
            stored[name] = floats[name] = array
            continue
        written = write(rng, (array.shape[0], array.shape[1]))
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{suffix}" if suffix else name: part for suffix, part in written.stored.items()}
        floats[name] = written.weight
    return stored, floats


def section(method: str, **fields: Any) -> dict[str, Any]:
    """Return the ``quantization_config`` of a config.json."""
    return {"quant_method": method, **fields}
