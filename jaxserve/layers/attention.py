"""Self-attention over paged keys and values."""

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention_chunks import Chunk
from jaxserve.layers.kv_layout import KVIndices, KVSpec
from jaxserve.layers.linear import RowParallelLinear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Split
from jaxserve.layers.residual import block_input
from jaxserve.layers.rows import map_rows
from pallas_kernels import AttentionBatch, Choice, LatentAttention, PagedAttention, choose
from pallas_kernels.attention_parts import Part, PartAttention, combine_parts
from pallas_kernels.qkv_write import Heads, QkNorms, Rotation, split_heads
from pallas_kernels.recurrent_states import StateRows
from sharding.collectives import all_gather, all_to_all, axis_index, axis_size
from sharding.mesh import Device

Pools = tuple[jax.Array, ...]
"""A layer's pools: of keys and of values, or one of latents."""

AttentionKernel = PagedAttention | LatentAttention


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Attention settings that are fixed when a step is compiled.

    Attributes:
        kernel: Implementation of paged attention.
        page_size: Tokens per page on each device.
        decode_only: Whether every row has one token.
        row_tile: Rows per tile wherever the number of rows could change a result; None computes all rows at once. See
            :mod:`jaxserve.layers.rows`.
        layer_indices: Pools and page table of each layer; None: layer i uses pool i, and all layers share table 0.
        rows_axis: Mesh axis of devices that have rows of their own and share experts; None for none.
        counts_expert_tokens: Whether layers with experts count the tokens of each.
        combine_tile: As ``row_tile``, for what devices that share the tokens of pages compute from each other's
            results.
        chunks: For each page table, the chunks within which its layers attend, None for the whole context; empty if no
            layer attends within chunks.
    """

    kernel: AttentionKernel
    page_size: int
    decode_only: bool
    row_tile: int | None = None
    layer_indices: tuple[KVIndices, ...] | None = None
    rows_axis: str | None = None
    counts_expert_tokens: bool = False
    combine_tile: int | None = None
    chunks: tuple[Chunk | None, ...] = ()


def choose_attention(
    device: Device, dtype: str, name: str | None = None, operation: str = "paged_attention", **sizes: int
) -> Choice:
    """Choose the implementation of attention for a device and a dtype of KV pages; see ``pallas_kernels.choose``."""
    return choose(operation, platform=device.platform, device_kind=device.device_kind, dtype=dtype, name=name, **sizes)


class AttentionInputs(NamedTuple):
    """Inputs shared by all layers with the same page table, and one that is the layer's own.

    Attributes:
        batch: The batch.
        num_tokens: Tokens in use.
        positions: Position of each token.
        rotations: Cosines and sines of each of the model's rotary embeddings.
        layer_input: What this layer adds for each token; None for nothing (Gemma 4's per-layer embeddings).
        selected: Positions that an earlier layer's index selected for each token; None without an index.
        states: Where rows have their states; None unless the model has recurrent layers.
    """

    batch: AttentionBatch
    num_tokens: Int[Array, ""]
    positions: Int[Array, " T"]
    rotations: tuple[Rotation, ...]
    layer_input: Float[Array, "rows P"] | None = None
    selected: Int[Array, "T k"] | None = None
    states: StateRows | None = None


class PositionScale(NamedTuple):
    """A factor of queries that grows with their position (Llama 4, Ministral 3): ``1 + beta * log(1 + floor((position +
    offset) / interval))``."""

    beta: float
    interval: int
    offset: int = 0

    def __call__(self, positions: Int[Array, " T"]) -> Float[Array, " T"]:
        """Return the factor of each position, in float32."""
        intervals = jnp.floor((positions + self.offset).astype(jnp.float32) / self.interval)
        return 1.0 + self.beta * jnp.log(1.0 + intervals)


class Attention(nnx.Module, ABC):
    """Base class of attention over paged keys and values; subclasses compute the heads.

    A subclass declares its parameters, among them ``out``, the output projection of all heads. It splits query heads
    over ``mesh_axis`` and key/value heads over ``kv_axis``; where that is None, every device has all of them.

    Args:
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; divides N.
        head_dim: H.
        scope: Scope of the module.
        scale: Factor of the query-key scores; None means 1 / sqrt(H).
        soft_cap: Scores become cap * tanh(score / cap); None means no cap.
        window: Number of latest tokens that a query sees, itself included; None for all.
        chunk: Tokens of a chunk of the context, of which a query sees its own up to itself; None for no chunks.
        rope: Index of the rotary embedding applied to queries and keys; None for none.
        position_scale: Factor of queries by their position; None for none.
    """

    out: RowParallelLinear

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scope: Scope,
        scale: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        rope: int | None = 0,
        position_scale: PositionScale | None = None,
    ):
        parallel = scope.parallel
        heads = (
            Split(num_heads, f"{num_heads} query heads"),
            Split(num_kv_heads, f"{num_kv_heads} key/value heads", may_repeat=True),
        )
        self.splits = () if parallel.has_whole_attention else heads if parallel.tokens is None else heads[:1]
        self.num_heads, self.num_kv_heads = parallel.heads_per_device(num_heads, num_kv_heads)
        readers = self.num_heads if parallel.tokens is None else num_heads
        span = window if chunk is None else chunk
        self.kv_spec = KVSpec(readers, self.num_kv_heads, head_dim, scope.policy.kv, span, in_chunks=chunk is not None)
        self.head_dim, self.window, self.soft_cap = head_dim, window, soft_cap
        self.scale = head_dim**-0.5 if scale is None else scale
        self.rope, self.mesh_axis, self.residual_axis = rope, parallel.heads, parallel.residual_axis
        self.kv_axis, self.tokens_axis, self.position_scale = parallel.kv_heads, parallel.tokens, position_scale

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse its norms with the neighbouring matmuls."""
        return self.residual_axis is None

    @property
    def head_norms(self) -> QkNorms | None:
        """Norms over each head of queries and keys."""
        return None

    @property
    def head_sinks(self) -> Float[Array, " N"] | None:
        """Logit of each query head that is one more term of its softmax's denominator, without a value."""
        return None

    @abstractmethod
    def project(
        self, x: Float[Array, "T D"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Project normalized tokens to queries, keys and values, each with its heads one after the other.

        With ``num_rows``, the values of later rows are undefined.
        """

    def project_input(
        self, x: Float[Array, "rows D"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Normalize and project a layer's input: all rows, or those of this device, which are gathered first."""
        x, norm = block_input(x, norm, self.residual_axis)
        return self.project(x, norm=norm, num_rows=num_rows)

    def rotation(self, inputs: AttentionInputs) -> Rotation | None:
        """Return the cosines and sines of this layer's rotary embedding, if it has one."""
        return None if self.rope is None else inputs.rotations[self.rope]

    def heads(self, qkv: Float[Array, "T width"], rotation: Rotation | None) -> Heads:
        """Split the projection into heads, normalize them and apply RoPE; a layer that reads the keys and values of
        another has queries alone."""
        num_kv_heads = self.num_kv_heads if self.kv_spec.reads is None else 0
        return split_heads(qkv, rotation, self.head_norms, self.num_heads, num_kv_heads)

    def write_projected(
        self, qkv: Float[Array, "T width"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> tuple[Float[Array, "T N H"], Pools]:
        """Return the queries, and this layer's pools with the step's keys and values, using the kernel's own writer."""
        return self.write_ready(qkv, pools, inputs, settings, self.rotation(inputs), self.head_norms)

    def write_ready(
        self,
        qkv: Float[Array, "T width"],
        pools: Pools,
        inputs: AttentionInputs,
        settings: AttentionSettings,
        rotation: Rotation | None = None,
        norms: QkNorms | None = None,
    ) -> tuple[Float[Array, "T N H"], Pools]:
        """Return the same, with a rotary embedding and norms that the writer has yet to apply."""
        assert settings.kernel.writer is not None
        return settings.kernel.writer.write(
            qkv,
            pools,
            inputs.batch,
            rotation=rotation,
            norms=norms,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            page_size=settings.page_size,
        )

    def scaled(self, query: Float[Array, "T N H"], inputs: AttentionInputs) -> Float[Array, "T N H"]:
        """Multiply queries by the factor of their positions, if there is one."""
        if self.position_scale is None:
            return query
        return (query * self.position_scale(inputs.positions)[:, None, None]).astype(query.dtype)

    def attend(
        self, query: Float[Array, "T N H"], pools: Pools, batch: AttentionBatch, settings: AttentionSettings
    ) -> Float[Array, "T N H"]:
        """Attend to pools that already have the step's keys and values."""
        key_value = cast(tuple[jax.Array, jax.Array], pools)
        options: dict[str, Any] = {
            "page_size": settings.page_size,
            "num_kv_heads": self.num_kv_heads,
            "scale": self.scale,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "decode_only": settings.decode_only,
            "row_tile": settings.row_tile,
        }
        if self.tokens_axis is None:
            kernel = cast(PagedAttention, settings.kernel)
            return kernel.attend(query, key_value, batch, sinks=self.head_sinks, **options)
        kernel, part = cast(PartAttention, settings.kernel), self.token_part()
        partial = kernel.attend_part(self.all_heads(query), key_value, batch, part, **options)
        return self.combined(partial, batch, settings).astype(query.dtype)

    def token_part(self) -> Part:
        """Return the part of every context that this device holds; called inside a program."""
        return Part(axis_index(self.tokens_axis), axis_size(self.tokens_axis))

    def all_heads(self, query: Float[Array, "T local H"]) -> Float[Array, "T N H"]:
        """Gather the queries of all heads on every device that shares tokens."""
        return all_gather(query, self.tokens_axis, 1)

    def combined(
        self, partial: Float[Array, "T N partial"], batch: AttentionBatch, settings: AttentionSettings
    ) -> Float[Array, "T local V"]:
        """Return the attention of this device's heads over all devices' tokens, from the partial attention of all heads
        on each device; see ``pallas_kernels.attention_parts``."""
        num_tokens, _, width = partial.shape
        sent = partial.reshape(num_tokens, -1, self.num_heads, width).swapaxes(0, 1)
        received = tuple(all_to_all(sent, self.tokens_axis))

        def finish(*parts: Float[Array, "T local partial"]) -> Float[Array, "T local V"]:
            return combine_parts(parts, self.head_sinks)

        return map_rows(finish, received, batch.query_lens.sum(), settings.combine_tile)

    def gated(
        self,
        attended: Float[Array, "T N H"],
        x: Float[Array, "rows D"],
        *,
        norm: RMSNorm | None = None,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "T N H"]:
        """Multiply the attention output by the gates of the layer's input, if there are any.

        Args:
            attended: Attention output of this device's heads.
            x: The layer's input: all rows, or those of this device.
            norm: Norm of that input.
            num_rows: Rows in use; later rows of the result are undefined.
        """
        del x, norm, num_rows
        return attended

    def output(
        self,
        attended: Float[Array, "T N H"],
        *,
        residual: Float[Array, "rows D"] | None = None,
        scale: float = 1.0,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "rows D"]:
        """Compute ``residual + scale * projection`` of all heads; later rows than ``num_rows`` are undefined."""
        attended = attended.reshape(attended.shape[0], -1)
        return self.out(attended, residual=residual, scale=scale, num_rows=num_rows)
