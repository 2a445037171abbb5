"""Paged attention in Pallas-Triton, for NVIDIA GPUs since Ampere; and the same interpreted, for checks anywhere."""

import functools
import re

from pallas_kernels import qkv_write_triton
from pallas_kernels.decode_attention_triton import decode_attention
from pallas_kernels.paged_attention_pages import PagedKernels
from pallas_kernels.prefill_attention_triton import prefill_attention

_DTYPES = ("bfloat16", "float16", "float32")
_MOST_HEAD_DIM = 256
_BEFORE_AMPERE = re.compile(r"\b([KMPV]\d{1,3}|T4|GTX|RTX [2T]\d{3}|Quadro|TITAN|Jetson)\b", re.IGNORECASE)


def _sizes_unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why the kernels cannot run on any device, or None."""
    del platform, device_kind
    if dtype not in _DTYPES:
        return f"keys and values must be {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}, not {dtype}"
    head_dim = sizes.get("head_dim", 1)
    if head_dim > _MOST_HEAD_DIM:
        return f"heads of {head_dim} are wider than {_MOST_HEAD_DIM}"
    return None


def _unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why the kernels cannot run on this device, or None."""
    if platform not in ("gpu", "cuda") or "NVIDIA" not in device_kind:
        return "needs an NVIDIA GPU"
    if _BEFORE_AMPERE.search(device_kind):
        return f"needs compute capability 8.0 (Ampere) or newer, which {device_kind} does not have"
    return _sizes_unsupported(platform, device_kind, dtype, **sizes)


TRITON = PagedKernels(
    name="triton",
    decode=decode_attention,
    prefill=prefill_attention,
    check=_unsupported,
    writer=qkv_write_triton.TRITON,
)
INTERPRET = PagedKernels(
    name="pallas-interpret",
    decode=functools.partial(decode_attention, interpret=True),
    prefill=functools.partial(prefill_attention, interpret=True),
    check=_sizes_unsupported,
    writer=qkv_write_triton.INTERPRETED,
)
