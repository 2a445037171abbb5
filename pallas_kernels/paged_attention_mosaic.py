"""Paged attention in Pallas Mosaic GPU, for NVIDIA Hopper; and the same interpreted, for checks on a CPU."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels import qkv_write_triton
from pallas_kernels.decode_attention_mosaic import decode_attention
from pallas_kernels.mosaic_support import cannot_interpret, interpreter, missing_jax, not_hopper, unsupported_operands
from pallas_kernels.paged_attention_pages import PagedKernels
from pallas_kernels.prefill_attention_mosaic import prefill_attention


def _cannot_interpret(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why the interpreted kernels cannot run, or None."""
    del device_kind
    return cannot_interpret(platform) or unsupported_operands(dtype, sizes)


def _unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why the kernels cannot run on this device, or None."""
    return not_hopper(platform, device_kind) or missing_jax() or unsupported_operands(dtype, sizes)


def _interpreted_decode(*arrays: Array, **settings: Any) -> Float[Array, "R N H"]:
    return decode_attention(*arrays, interpret=interpreter(), **settings)


def _interpreted_prefill(*arrays: Any, **settings: Any) -> Float[Array, "T N H"]:
    return prefill_attention(*arrays, interpret=interpreter(), **settings)


MOSAIC = PagedKernels(
    name="mosaic",
    decode=decode_attention,
    prefill=prefill_attention,
    check=_unsupported,
    writer=qkv_write_triton.TRITON,
)
INTERPRET = PagedKernels(
    name="mosaic-interpret",
    decode=_interpreted_decode,
    prefill=_interpreted_prefill,
    check=_cannot_interpret,
    writer=qkv_write_triton.INTERPRETED,
)
