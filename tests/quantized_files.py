"""Writes quantized checkpoints for tests: quantizes the linear layers of a float one, format by format, in plain NumPy.

Each writer returns the stored tensors of one weight and the float32 weight that they stand for, computed element by
element from the format's description and not with the product's code.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
