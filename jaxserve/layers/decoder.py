"""One decoder layer: attention and MLP, each in a residual branch.

Between blocks a device has all T rows of hidden states, or some of them; see :mod:`jaxserve.layers.residual`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, AttentionInputs, AttentionSettings, Pools
from jaxserve.layers.expert_load import count_tokens
from jaxserve.layers.kv_layout import KVSpec, StateSpec
from jaxserve.layers.mlp import GatedMLP, PlainMLP
from jaxserve.layers.norm import LayerNorm, RMSNorm
from jaxserve.layers.rows import map_rows
from jaxserve.layers.sparse_mlp import SparseMLP
from pallas_kernels.qkv_write import Rotation

AnyMLP = GatedMLP | PlainMLP | SparseMLP
Split = TypeVar("Split", bound=tuple[Any, ...])


class LayerOutput(NamedTuple):
    """Outputs of a layer.

    Attributes:
        x: The residual stream after this layer.
        pools: The layer's pools with the step's keys and values.
        expert_tokens: Tokens routed to each expert, if the layer has experts and counts them.
        selected: Positions that each token attended to, if an index selects them; later layers may use them too.
    """

    x: Float[Array, "rows D"]
    pools: Pools
    expert_tokens: Int[Array, " E"] | None = None
    selected: Int[Array, "T k"] | None = None


class Attended(NamedTuple):
    """Attention of a layer, and what it leaves for later steps and layers; see ``LayerOutput``."""

    attended: Float[Array, "T N V"]
    pools: Pools
    selected: Int[Array, "T k"] | None = None


class Layer(nnx.Module, ABC):
    """A layer of a decoder: it adds to the residual stream, and may keep keys and values, a state, both or neither."""

    @property
    @abstractmethod
    def kv_spec(self) -> KVSpec | None:
        """The layer's KV cache per token; None if it has none."""

    @property
    def state_spec(self) -> StateSpec:
        """The layer's state per sequence; empty if it has none."""
        return ()

    @property
    @abstractmethod
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse all its norms with the neighbouring matmuls."""

    @property
    def num_experts(self) -> int:
        """Number of experts that each token is routed to some of; 0 for a layer without a router."""
        return 0

    @abstractmethod
    def __call__(
        self, x: Float[Array, "rows D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> LayerOutput:
        """Run the layer; ``pools`` are its pools of keys and values, then the arrays of its state."""


class DecoderLayer(Layer):
    """Attention and an MLP in residual branches; subclasses declare the MLP and the norms, and place them.

    Args:
        attention: Attention.
    """

    def __init__(self, attention: Attention):
        self.attention = attention

    @property
    def kv_spec(self) -> KVSpec:
        """The layer's KV cache per token."""
        return self.attention.kv_spec

    @abstractmethod
    def projected(self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        """Compute queries, keys and values of the layer's input; rows from ``num_rows`` on are undefined."""

    @abstractmethod
    def after_attention(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        """Return the layer's output from its input and the attention output; ``num_rows`` as in :meth:`projected`."""

    def after_attention_with_experts(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> tuple[Float[Array, "rows D"], Int[Array, "T k"] | None]:
        """Return the layer's output, and the experts of each token if the layer has experts; see
        :meth:`after_attention`."""
        return self.after_attention(x, attended, num_rows), None

    def __call__(
        self, x: Float[Array, "rows D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> LayerOutput:
        """Run the layer."""
        num_tokens, tile = inputs.num_tokens, settings.row_tile
        attended, pools, selected = self._attended(x, pools, inputs, settings)
        used = num_tokens if tile is None else None
        if not settings.counts_expert_tokens:
            after = partial(self.after_attention, num_rows=used)
            return LayerOutput(map_rows(after, (x, attended), num_tokens, tile, len(attended)), pools, None, selected)
        after = partial(self.after_attention_with_experts, num_rows=used)
        x, experts = map_rows(after, (x, attended), num_tokens, tile, len(attended))
        counts = None if experts is None else count_tokens(experts, num_tokens, self.num_experts)
        return LayerOutput(x, pools, counts, selected)

    def _attended(
        self, x: Float[Array, "rows D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> Attended:
        """Return attention, and the layer's pools with the step's keys and values."""
        query, pools = self._written(x, pools, inputs, settings)
        query = self.attention.scaled(query, inputs)
        return Attended(self.attention.attend(query, pools, inputs.batch, settings), pools)

    def _written(
        self, x: Float[Array, "rows D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> tuple[Float[Array, "T N H"], Pools]:
        """Return the queries, and the layer's pools with the step's keys and values, in one fused kernel if available.

        In tiled (deterministic) mode, normalization and RoPE run inside each tile.
        """
        num_tokens, tile = inputs.num_tokens, settings.row_tile
        has_own = self.kv_spec.reads is None
        if settings.kernel.writer is not None and tile is None and has_own:
            return self.attention.write_projected(self.projected(x, num_tokens), pools, inputs, settings)
        heads = self._split(self.attention.heads, x, inputs, settings)
        if not has_own:
            return heads.query, pools
        kernel_pools = cast(Any, pools)  # as many as the kernel's operation has
        written = settings.kernel.write_kv(kernel_pools, heads.key, heads.value, inputs.batch, settings.page_size)
        return heads.query, written

    def _split(
        self,
        split: Callable[[Float[Array, "T width"], Rotation | None], Split],
        x: Float[Array, "rows D"],
        inputs: AttentionInputs,
        settings: AttentionSettings,
    ) -> Split:
        """Return what ``split`` makes of the projection of the layer's input and the rotary embedding."""
        num_tokens, tile = inputs.num_tokens, settings.row_tile
        used = num_tokens if tile is None else None

        def computed(x: Float[Array, "rows D"], *rotation: Float[Array, "T half"]) -> Split:
            return split(self.projected(x, used), cast(Rotation, rotation) if rotation else None)

        rotation = self.attention.rotation(inputs) or ()
        return map_rows(computed, (x, *rotation), num_tokens, tile, len(inputs.batch.token_pages))


class RMSNormLayer(DecoderLayer):
    """A layer with a root-mean-square norm for each branch.

    Args:
        attention_norm: Norm of the attention branch.
        attention: Attention.
        mlp_norm: Norm of the MLP branch.
        mlp: MLP: gated, plain or sparse.
        residual_multiplier: Factor of each branch before it is added.
    """

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: AnyMLP,
        *,
        residual_multiplier: float = 1.0,
    ):
        super().__init__(attention)
        self.attention_norm = attention_norm
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.residual_multiplier = residual_multiplier

    @property
    def num_experts(self) -> int:
        """Number of experts that each token is routed to some of; 0 for a dense layer."""
        return num_experts_of(self.mlp)


class PreNormLayer(RMSNormLayer):
    """Norms precede each branch (Llama)."""

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse all its norms with the neighbouring matmuls."""
        return self.attention.has_fused_norms and self.mlp.has_fused_norms

    def projected(self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        """Compute queries, keys and values of the normalized input."""
        return self.attention.project_input(x, norm=self.attention_norm, num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        """Return the layer's output from its input and the attention output."""
        return self.after_attention_with_experts(x, attended, num_rows)[0]

    def after_attention_with_experts(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> tuple[Float[Array, "rows D"], Int[Array, "T k"] | None]:
        """Return the layer's output, and the experts of each token if the MLP is a mixture of experts."""
        scale, norm = self.residual_multiplier, self.mlp_norm
        attended = self.attention.gated(attended, x, norm=self.attention_norm, num_rows=num_rows)
        x = self.attention.output(attended, residual=x, scale=scale, num_rows=num_rows)
        return run_mlp(self.mlp, x, norm=norm, residual=x, scale=scale, num_rows=num_rows)


class LayerNormLayer(DecoderLayer):
    """A norm precedes each branch, in most models a layer norm (GPT-2); the branches run one after the other, or both
    read the input.

    Args:
        attention_norm: Norm of the attention branch.
        attention: Attention.
        mlp_norm: Norm of the MLP branch; None for that of the attention branch (Cohere 2).
        mlp: MLP: gated, plain or sparse.
        is_parallel: Whether both branches read the layer's input (GPT-NeoX, Cohere 2).
    """

    def __init__(
        self,
        attention_norm: LayerNorm | RMSNorm,
        attention: Attention,
        mlp_norm: LayerNorm | RMSNorm | None,
        mlp: AnyMLP,
        *,
        is_parallel: bool = False,
    ):
        super().__init__(attention)
        self.attention_norm = attention_norm
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.is_parallel = is_parallel

    @property
    def has_fused_norms(self) -> bool:
        """Return False: no kernel fuses a layer norm, or a norm that both branches read."""
        return False

    def projected(self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        """Compute queries, keys and values of the normalized input."""
        return self.attention.project_input(self.attention_norm(x), num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        """Return the layer's output from its input and the attention output."""
        return self.after_attention_with_experts(x, attended, num_rows)[0]

    @property
    def num_experts(self) -> int:
        """Number of experts that each token is routed to some of; 0 for a dense layer."""
        return num_experts_of(self.mlp)

    def after_attention_with_experts(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> tuple[Float[Array, "rows D"], Int[Array, "T k"] | None]:
        """Return the layer's output, and the experts of each token if the MLP is a mixture of experts."""
        after = self.attention.output(attended, residual=x, num_rows=num_rows)
        norm = self.attention_norm if self.mlp_norm is None else self.mlp_norm
        return run_mlp(self.mlp, norm(x if self.is_parallel else after), residual=after, num_rows=num_rows)


def num_experts_of(mlp: AnyMLP) -> int:
    """Return the number of experts of an MLP; 0 for a dense one."""
    return mlp.routing.num_experts if isinstance(mlp, SparseMLP) else 0


def run_mlp(
    mlp: AnyMLP, x: Float[Array, "rows D"], **options: Any
) -> tuple[Float[Array, "rows D"], Int[Array, "T k"] | None]:
    """Return the output of an MLP, and the experts of each token if it is a mixture of experts; ``options`` are those
    of its call."""
    return mlp.with_experts(x, **options) if isinstance(mlp, SparseMLP) else (mlp(x, **options), None)
