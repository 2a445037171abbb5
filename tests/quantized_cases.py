"""The quantized formats with the settings that tests write, read and load."""

from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.quantized_files import (
    Writer,
    section,
    write_awq,
    write_bnb_int8,
    write_gptq,
    write_mlx,
    write_mxfp4,
    write_nf4,
    write_nvfp4,
    write_one_byte,
    write_packed,
)


class Case(NamedTuple):
    """A format with settings: how to write a weight, and the section of config.json that says so."""

    write: Writer
    section: dict[str, Any]
    shape: tuple[int, int] = (48, 64)


def gptq(bits: int, group: int = 16, version: str = "gptq", *, sym: bool = False, act_order: bool = False) -> Case:
    write = partial(write_gptq, group=group, bits=bits, is_symmetric=sym, has_act_order=act_order, version=version)
    fields = {"bits": bits, "group_size": group, "sym": sym, "desc_act": act_order, "checkpoint_format": version}
    return Case(write, section("gptq", **fields), (64, 96))


def compressed(write: Writer, shape: tuple[int, int] = (48, 64), **weights: Any) -> Case:
    return Case(write, section("compressed-tensors", config_groups={"group_0": {"weights": weights}}), shape)


def packed(bits: int, group: int, *, sym: bool) -> Case:
    write = partial(write_packed, group=group, bits=bits, is_symmetric=sym)
    return compressed(write, (64, 96), num_bits=bits, group_size=group, symmetric=sym)


def fp8(block: tuple[int, int] | None, name: str, **fields: Any) -> Case:
    write = partial(write_one_byte, dtype=ml_dtypes.float8_e4m3fn, block=block, scale_name=name)
    return Case(write, section("fp8", **fields), (40, 50))


def mlx(bits: int, group: int = 32) -> Case:
    return Case(partial(write_mlx, group=group, bits=bits), {"group_size": group, "bits": bits}, (24, 128))


FP8 = ml_dtypes.float8_e4m3fn
BITS4, BITS8 = section("bitsandbytes", load_in_4bit=True), section("bitsandbytes", load_in_8bit=True)
CASES = {
    **{f"compressed-tensors {bits} bits": packed(bits, 32, sym=True) for bits in (2, 3, 4, 5, 8)},
    **{f"compressed-tensors {bits} bits with zeros": packed(bits, 16, sym=False) for bits in (3, 4, 8)},
    "compressed-tensors per row": packed(4, -1, sym=True),
    "compressed-tensors int8": compressed(partial(write_one_byte, dtype=np.int8, is_per_row=True), num_bits=8),
    "compressed-tensors int8, one scale": compressed(partial(write_one_byte, dtype=np.int8), num_bits=8),
    "compressed-tensors int8 groups": compressed(partial(write_one_byte, dtype=np.int8, block=(1, 16)), group_size=16),
    "compressed-tensors fp8": compressed(partial(write_one_byte, dtype=FP8, is_per_row=True), type="float"),
    "compressed-tensors fp8 blocks": compressed(
        partial(write_one_byte, dtype=FP8, block=(16, 32)), (40, 50), type="float", block_structure=[16, 32]
    ),
    "compressed-tensors mxfp4": compressed(write_mxfp4, num_bits=4, type="float", group_size=32),
    "compressed-tensors nvfp4": compressed(partial(write_nvfp4, is_modelopt=False), num_bits=4, type="float"),
    "fp8": fp8(None, "weight_scale"),
    "fp8 blocks, ragged": fp8((16, 16), "weight_scale_inv", weight_block_size=[16, 16], activation_scheme="dynamic"),
    "fp8 e5m2": Case(partial(write_one_byte, dtype=ml_dtypes.float8_e5m2), section("fp8", fmt="e5m2")),
    "fbgemm fp8": Case(partial(write_one_byte, dtype=FP8, is_per_row=True), section("fbgemm_fp8")),
    "modelopt fp8": Case(partial(write_one_byte, dtype=FP8), section("modelopt", quant_algo="FP8")),
    "modelopt nvfp4": Case(partial(write_nvfp4, is_modelopt=True), section("modelopt", quant_algo="NVFP4")),
    "nf4": Case(partial(write_nf4, is_double=False), BITS4, (10, 128)),
    "nf4 double": Case(partial(write_nf4, is_double=True), BITS4, (300, 64)),
    "nf4, blocks across rows": Case(partial(write_nf4, is_double=True), BITS4, (21, 25)),
    "bitsandbytes int8": Case(write_bnb_int8, BITS8),
    **{f"mlx {bits} bits": mlx(bits) for bits in (2, 3, 4, 5, 6, 8)},
    "auto-round": Case(gptq(4).write, section("auto-round", bits=4, group_size=16), (64, 96)),
    "awq": Case(partial(write_awq, group=16), section("awq", bits=4, group_size=16, zero_point=True, version="gemm")),
    "awq whole inputs": Case(partial(write_awq, group=-1), section("awq", w_bit=4, q_group_size=-1)),
    **{f"gptq {bits} bits": gptq(bits) for bits in (2, 3, 4, 8)},
    "gptq v2": gptq(4, version="gptq_v2"),
    "gptq symmetric": gptq(4, sym=True),
    "gptq act-order": gptq(4, act_order=True),
    "gptq act-order, 3 bits": gptq(3, act_order=True),
    "gptq whole inputs": gptq(4, -1),
    "gptq ragged group": gptq(4, 40),
}
