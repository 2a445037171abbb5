"""Norms, RoPE and the write of keys and values to their pages in one Pallas-Triton kernel.

A program handles some key/value heads of one token, and the query heads that read them. It reads each head in up to
three parts: each half of the rotated features, and the rest. A program's shape does not depend on how many
tokens there are, so that neither do a token's results.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_tiles import require_indexable
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.qkv_write import Pools, QkNorms, Rotation

_QUERY_HEADS = 16  # heads per program, approximately
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class TritonQkvWriter:
    """The kernel, compiled for NVIDIA GPUs or interpreted anywhere."""

    is_interpreted: bool = False

    def to_layout(self, pools: Pools) -> Pools:
        """Return the pools: [P, K, p, H] is the layout."""
        return pools

    def from_layout(self, pools: Pools) -> Pools:
        """Return the pools."""
        return pools

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None."""
        del sizes
        if not self.is_interpreted and (platform not in ("gpu", "cuda") or "NVIDIA" not in device_kind):
            return "needs an NVIDIA GPU"
        return None if dtype in _DTYPES else f"keys and values must be {', '.join(_DTYPES)}, not {dtype}"

    def write(
        self,
        qkv: Float[Array, "T width"],
        pools: Pools,
        batch: AttentionBatch,
        *,
        rotation: Rotation | None,
        norms: QkNorms | None,
        num_heads: int,
        num_kv_heads: int,
        page_size: int,
    ) -> tuple[Float[Array, "T N H"], Pools]:
        """Return queries, and pools with the step's keys and values; see ``QkvWriter.write``."""
        key_pool, value_pool = pools
        require_indexable(key_pool, value_pool)
        num_tokens, head_dim = qkv.shape[0], key_pool.shape[3]
        assert key_pool.shape == value_pool.shape and key_pool.shape[1:3] == (num_kv_heads, page_size), key_pool.shape
        half = 0 if rotation is None else rotation[0].shape[1]
        layout = _Layout(num_heads, num_kv_heads, head_dim, half, None if norms is None else norms.eps)
        query = jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), qkv.dtype)
        call = pl.pallas_call(
            functools.partial(_kernel, layout=layout),
            out_shape=(query, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)),
            grid=(num_tokens, pl.cdiv(num_kv_heads, layout.heads_per_program)),
            input_output_aliases={0: 1, 1: 2},
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=self.is_interpreted,
            name="qkv_write",
        )
        by_head = qkv.reshape(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        weights = None if norms is None else (norms.query_weight, norms.key_weight)
        query, key_pool, value_pool = call(
            pools, (batch.token_pages, batch.token_offsets), by_head, rotation or (), weights or ()
        )
        return query, (key_pool, value_pool)


class _Layout(NamedTuple):
    """Compile-time parameters of the kernel; ``eps`` is None without norms."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    half: int
    eps: float | None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def heads_per_program(self) -> int:
        """Number of key/value heads, a power of two."""
        wanted = max(1, _QUERY_HEADS // pl.next_power_of_2(self.group))
        return min(wanted, pl.next_power_of_2(self.num_kv_heads))

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Return first feature and size of each part of a head; the first two are the rotated halves."""
        rest = self.head_dim - 2 * self.half
        spans = [(0, self.half), (self.half, self.half), (2 * self.half, rest)]
        return [span for span in spans if span[1]]


class _Lanes(NamedTuple):
    """The heads and features of a part's lanes, and which of them exist."""

    heads: Int[Array, "C F"]
    features: Int[Array, "C F"]
    are_used: Bool[Array, "C F"]


def _kernel(
    _: Any,  # the input pools: the same memory as the last two
    places: Any,  # pages [T], offsets [T]
    qkv_ref: Any,  # [T, N + 2 K, H]
    rotation: Any,  # cos [T, half], sin [T, half]; empty without rotation
    weights: Any,  # [H], [H]; empty without norms
    query_ref: Any,  # [T, N, H]
    key_ref: Any,  # [P, K, p, H]
    value_ref: Any,  # [P, K, p, H]
    *,
    layout: _Layout,
) -> None:
    token, chunk = pl.program_id(0), pl.program_id(1)
    page, offset = places[0][token], places[1][token]
    num_kv, group = layout.heads_per_program, layout.group
    query_lanes = _lanes(chunk * num_kv * group, num_kv * group, layout.num_heads, layout)
    kv_lanes = _lanes(chunk * num_kv, num_kv, layout.num_kv_heads, layout)
    first_key, first_value = layout.num_heads, layout.num_heads + layout.num_kv_heads
    query = [_load(qkv_ref, token, 0, lanes) for lanes in query_lanes]
    key = [_load(qkv_ref, token, first_key, lanes) for lanes in kv_lanes]
    value = [_load(qkv_ref, token, first_value, lanes) for lanes in kv_lanes]
    if layout.eps is not None:
        query = _normed(query, query_lanes, weights[0], layout)
        key = _normed(key, kv_lanes, weights[1], layout)
    if layout.half:
        query = _rotated(query, query_lanes, token, rotation)
        key = _rotated(key, kv_lanes, token, rotation)
    for part, lanes in zip(query, query_lanes, strict=True):
        place = jnp.broadcast_to(token, part.shape), lanes.heads, lanes.features
        plt.store(query_ref.at[place], part, mask=lanes.are_used)
    for key_part, value_part, lanes in zip(key, value, kv_lanes, strict=True):
        value_part = value_part.astype(value_ref.dtype)
        is_finite = jnp.abs(value_part.astype(jnp.float32)) < jnp.inf
        place = (
            jnp.broadcast_to(page, value_part.shape),
            lanes.heads,
            jnp.broadcast_to(offset, value_part.shape),
            lanes.features,
        )
        key_part = jnp.where(is_finite, key_part.astype(key_ref.dtype), jnp.nan)
        plt.store(key_ref.at[place], key_part, mask=lanes.are_used)
        plt.store(value_ref.at[place], jnp.where(is_finite, value_part, 0.0), mask=lanes.are_used)


def _lanes(first: Int[Array, ""], count: int, total: int, layout: _Layout) -> list[_Lanes]:
    """Return the lanes of ``count`` heads from ``first`` on, out of ``total``, for each part."""
    found = []
    for start, size in layout.parts:
        shape = pl.next_power_of_2(count), pl.next_power_of_2(size)
        head, feature = (lax.broadcasted_iota(jnp.int32, shape, i) for i in (0, 1))
        are_used = (head < count) & (first + head < total) & (feature < size)
        found.append(_Lanes(first + head, start + feature, are_used))
    return found


def _load(qkv_ref: Any, token: Int[Array, ""], first_head: int, lanes: _Lanes) -> Float[Array, "C F"]:
    place = jnp.broadcast_to(token, lanes.heads.shape), first_head + lanes.heads, lanes.features
    return plt.load(qkv_ref.at[place], mask=lanes.are_used, other=0.0)


def _normed(
    parts: list[Float[Array, "C _"]], lanes: list[_Lanes], weight_ref: Any, layout: _Layout
) -> list[Float[Array, "C _"]]:
    """Return each head over its root mean square."""
    wide = [part.astype(jnp.float32) for part in parts]
    assert layout.eps is not None
    total = sum((jnp.sum(part * part, axis=1) for part in wide[1:]), start=jnp.sum(wide[0] * wide[0], axis=1))
    factor = lax.rsqrt(total / layout.head_dim + layout.eps)[:, None]
    weights = [plt.load(weight_ref.at[lane.features], mask=lane.are_used, other=0.0) for lane in lanes]
    return [
        (part * factor * weight.astype(jnp.float32)).astype(old.dtype)
        for part, weight, old in zip(wide, weights, parts, strict=True)
    ]


def _rotated(
    parts: list[Float[Array, "C _"]], lanes: list[_Lanes], token: Int[Array, ""], rotation: Any
) -> list[Float[Array, "C _"]]:
    """Return the first two parts turned by the token's angles."""
    first, second = (part.astype(jnp.float32) for part in parts[:2])
    place = jnp.broadcast_to(token, first.shape), lanes[0].features
    cos, sin = (plt.load(ref.at[place], mask=lanes[0].are_used, other=0.0) for ref in rotation)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return [part.astype(parts[0].dtype) for part in turned] + parts[2:]


TRITON = TritonQkvWriter()
INTERPRETED = TritonQkvWriter(is_interpreted=True)
