"""Self-attention over paged keys and values."""

import dataclasses
from typing import NamedTuple, cast

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.norm import RMSNorm, split_mean_squares
from jaxserve.layers.parallel import DtypePolicy, Parallel
from jaxserve.layers.rope import apply_rope
from pallas_kernels import AttentionBatch, PagedAttention, select
from sharding.mesh import Device

Pools = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """What is fixed when a step is compiled.

    Attributes:
        kernel: Implementation of paged attention.
        page_size: Tokens a page.
        decode_only: Whether rows have one token each.
        row_tile: Rows that are computed together wherever the number of rows could change a result; None computes all
            at once. See :mod:`jaxserve.layers.rows`.
    """

    kernel: PagedAttention
    page_size: int
    decode_only: bool
    row_tile: int | None = None


def select_attention(device: Device, dtype: str, name: str | None = None) -> PagedAttention:
    """The implementation of paged attention for a device and a type of KV pages; see ``pallas_kernels.select``."""
    found = select("paged_attention", platform=device.platform, device_kind=device.device_kind, dtype=dtype, name=name)
    return cast(PagedAttention, found)


class AttentionInputs(NamedTuple):
    """What all layers of a step share: the batch, its tokens in use, and the rotation of each."""

    batch: AttentionBatch
    num_tokens: Int[Array, ""]
    cos: Float[Array, "T half"]
    sin: Float[Array, "T half"]


class Heads(NamedTuple):
    """Queries, keys and values of tokens, by head."""

    query: Float[Array, "T N H"]
    key: Float[Array, "T K H"]
    value: Float[Array, "T K H"]


class Attention(nnx.Module):
    """Grouped-query attention with a fused projection: on each device its query, key and value heads, in this order."""

    def __init__(self, config: ModelConfig, index: int, *, parallel: Parallel, policy: DtypePolicy):
        self.num_heads = config.num_heads // parallel.size
        self.num_kv_heads = max(1, config.num_kv_heads // parallel.size)
        self.head_dim = head_dim = config.head_dim
        self.scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.soft_cap = config.attention_soft_cap
        self.window = config.sliding_windows[index]
        self.is_rotated = config.rope_layers[index]
        self.qk_norm = config.qk_norm
        self.mesh_axis = parallel.heads
        width = parallel.size * (self.num_heads + 2 * self.num_kv_heads) * head_dim
        self.qkv = ColumnParallelLinear(
            config.hidden_size, width, outer_axis="q_heads", bias=config.qkv_bias, policy=policy
        )
        self.out = RowParallelLinear(
            config.num_heads * head_dim,
            config.hidden_size,
            inner_axis="q_heads",
            mesh_axis=parallel.heads,
            bias=config.out_bias,
            policy=policy,
        )
        if config.qk_norm == "head":
            self.q_norm = RMSNorm(head_dim, eps=config.norm_eps, policy=policy, axis="head_dim")
            self.k_norm = RMSNorm(head_dim, eps=config.norm_eps, policy=policy, axis="head_dim")
        elif config.qk_norm == "width":
            q_width, k_width = (parallel.size * n * head_dim for n in (self.num_heads, self.num_kv_heads))
            self.q_norm = RMSNorm(q_width, eps=config.norm_eps, policy=policy, axis="q_heads")
            self.k_norm = RMSNorm(k_width, eps=config.norm_eps, policy=policy, axis="kv_heads")

    def heads(self, x: Float[Array, "T D"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]) -> Heads:
        """Queries, keys and values of tokens, normed and rotated."""
        num_tokens = x.shape[0]
        q_width, k_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = self.qkv(x)
        query, key, value = qkv[:, :q_width], qkv[:, q_width : q_width + k_width], qkv[:, q_width + k_width :]
        if self.qk_norm == "width":
            query_square, key_square = split_mean_squares(query, key, self.mesh_axis)
            query, key = self.q_norm.scaled(query, query_square), self.k_norm.scaled(key, key_square)
        query, key, value = (a.reshape(num_tokens, -1, self.head_dim) for a in (query, key, value))
        if self.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        if self.is_rotated:
            query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        return Heads(query, key, value)

    def attend(
        self, heads: Heads, pools: Pools, batch: AttentionBatch, settings: AttentionSettings
    ) -> tuple[Float[Array, "T N H"], Pools]:
        """What each head attends to, and this layer's pools with the step's keys and values written."""
        pools = settings.kernel.write_kv(pools, heads.key, heads.value, batch, settings.page_size)
        attended = settings.kernel.attend(
            heads.query,
            pools,
            batch,
            page_size=settings.page_size,
            num_kv_heads=self.num_kv_heads,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            decode_only=settings.decode_only,
            row_tile=settings.row_tile,
        )
        return attended, pools

    def output(self, attended: Float[Array, "T N H"]) -> Float[Array, "T D"]:
        """All heads together, projected."""
        return self.out(attended.reshape(attended.shape[0], -1))
