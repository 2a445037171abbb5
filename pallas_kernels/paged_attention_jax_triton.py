"""Paged attention in Triton kernels called through jax-triton, independent of Pallas-Triton.

Keys and values are written by XLA's scatter, in place; the fused writer is a Pallas-Triton kernel.
"""

from pallas_kernels import jax_triton
from pallas_kernels.decode_attention_jax_triton import decode_attention
from pallas_kernels.paged_attention_pages import PagedKernels
from pallas_kernels.prefill_attention_jax_triton import prefill_attention

_DTYPES = ("bfloat16", "float16", "float32")
_MOST_HEAD_DIM = 256


def _unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    if dtype not in _DTYPES:
        return f"keys and values must be {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}, not {dtype}"
    head_dim = sizes.get("head_dim", 1)
    if head_dim > _MOST_HEAD_DIM:
        return f"heads of {head_dim} are wider than {_MOST_HEAD_DIM}"
    return jax_triton.unsupported(platform, device_kind)


JAX_TRITON = PagedKernels(name="jax-triton", decode=decode_attention, prefill=prefill_attention, check=_unsupported)
