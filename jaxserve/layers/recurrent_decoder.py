"""Layers of hybrid decoders: a recurrent mixer, attention or an MLP alone, or both mixers side by side."""

from functools import partial
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, AttentionInputs, AttentionSettings, Pools
from jaxserve.layers.decoder import AnyMLP, DecoderLayer, Layer, LayerOutput, num_experts_of, run_mlp
from jaxserve.layers.expert_load import count_tokens
from jaxserve.layers.kv_layout import KVSpec, StateSpec
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.recurrent import Mixed, Recurrent
from jaxserve.layers.rows import map_rows

Chosen = Int[Array, "T k"] | None


class RecurrentLayer(Layer):
    """A recurrent mixer and, in most models, an MLP, each in a residual branch after its norm.

    Args:
        mixer_norm: Norm of the mixer's branch.
        mixer: The mixer.
        mlp_norm: Norm of the MLP's branch; None without an MLP.
        mlp: MLP: gated, plain or sparse; None for none.
        residual_multiplier: Factor of each branch before it is added.
    """

    def __init__(
        self,
        mixer_norm: RMSNorm,
        mixer: Recurrent,
        mlp_norm: RMSNorm | None = None,
        mlp: AnyMLP | None = None,
        *,
        residual_multiplier: float = 1.0,
    ):
        self.mixer_norm, self.mixer = mixer_norm, mixer
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.residual_multiplier = residual_multiplier

    @property
    def kv_spec(self) -> KVSpec | None:
        """None: it has no keys and values."""
        return None

    @property
    def state_spec(self) -> StateSpec:
        """The mixer's state per sequence."""
        return self.mixer.state_spec

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse all its norms with the neighbouring matmuls."""
        return self.mixer.has_fused_norms and (self.mlp is None or self.mlp.has_fused_norms)

    @property
    def num_experts(self) -> int:
        """Number of experts that each token is routed to some of; 0 for a dense layer."""
        return 0 if self.mlp is None else num_experts_of(self.mlp)

    def __call__(
        self, x: Float[Array, "rows D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> LayerOutput:
        """Run the layer."""
        num_tokens, tile = inputs.num_tokens, settings.row_tile
        used = num_tokens if tile is None else None
        mixed, states = run_mixer(self.mixer, self.mixer_norm, x, pools, inputs, settings)
        after = partial(self._after, num_rows=used)
        x, experts = map_rows(after, (x, mixed), num_tokens, tile, len(mixed))
        return counted_output(x, states, experts, self.num_experts, inputs, settings)

    def _after(
        self, x: Float[Array, "rows D"], mixed: Float[Array, "T _"], num_rows: Int[Array, ""] | None
    ) -> tuple[Float[Array, "rows D"], Chosen]:
        """Return the layer's output from its input and what the mixer computed, and the experts of each token."""
        scale = self.residual_multiplier
        x = self.mixer.output(mixed, residual=x, scale=scale, num_rows=num_rows)
        if self.mlp is None:
            return x, None
        return run_mlp(self.mlp, x, norm=self.mlp_norm, residual=x, scale=scale, num_rows=num_rows)


def run_mixer(
    mixer: Recurrent,
    norm: RMSNorm,
    x: Float[Array, "rows D"],
    states: Pools,
    inputs: AttentionInputs,
    settings: AttentionSettings,
) -> Mixed:
    """Project a layer's normalized input, and take it into the states of its rows."""
    num_tokens, tile = inputs.num_tokens, settings.row_tile
    project = partial(mixer.project_input, norm=norm, num_rows=num_tokens if tile is None else None)
    projected = map_rows(project, (x,), num_tokens, tile, len(inputs.batch.token_pages))
    assert inputs.states is not None, "the batch of a recurrent model has states"
    return mixer.update(projected, states, inputs.states)


def counted_output(
    x: Float[Array, "rows D"],
    pools: Pools,
    experts: Chosen,
    num_experts: int,
    inputs: AttentionInputs,
    settings: AttentionSettings,
) -> LayerOutput:
    """Return a layer's output, with the tokens of each expert if the layer has experts and counts them."""
    if experts is None or not settings.counts_expert_tokens:
        return LayerOutput(x, pools)
    return LayerOutput(x, pools, count_tokens(experts, inputs.num_tokens, num_experts))


class MLPLayer(Layer):
    """An MLP alone after its norm; it keeps nothing.

    Args:
        norm: Norm of its input.
        mlp: MLP: gated, plain or sparse.
    """

    def __init__(self, norm: RMSNorm, mlp: AnyMLP):
        self.norm, self.mlp = norm, mlp

    @property
    def kv_spec(self) -> KVSpec | None:
        """None: it has no keys and values."""
        return None

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse its norm with the neighbouring matmul."""
        return self.mlp.has_fused_norms

    @property
    def num_experts(self) -> int:
        """Number of experts that each token is routed to some of; 0 for a dense layer."""
        return num_experts_of(self.mlp)

    def __call__(
        self, x: Float[Array, "rows D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> LayerOutput:
        """Run the layer."""
        num_tokens, tile = inputs.num_tokens, settings.row_tile
        after = partial(self._after, num_rows=num_tokens if tile is None else None)
        x, experts = map_rows(after, (x,), num_tokens, tile, len(inputs.batch.token_pages))
        return counted_output(x, pools, experts, self.num_experts, inputs, settings)

    def _after(
        self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None
    ) -> tuple[Float[Array, "rows D"], Chosen]:
        return run_mlp(self.mlp, x, norm=self.norm, residual=x, num_rows=num_rows)


class AttentionLayer(DecoderLayer):
    """Attention alone after its norm.

    Args:
        norm: Norm of its input.
        attention: Attention.
    """

    def __init__(self, norm: RMSNorm, attention: Attention):
        super().__init__(attention)
        self.norm = norm

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse its norm with the neighbouring matmul."""
        return self.attention.has_fused_norms

    def projected(self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        """Compute queries, keys and values of the normalized input."""
        return self.attention.project_input(x, norm=self.norm, num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        """Return the layer's output from its input and the attention output."""
        return self.attention.output(attended, residual=x, num_rows=num_rows)


class BranchScales(NamedTuple):
    """Factors of what attention, the recurrent mixer and the MLP add."""

    attention: float = 1.0
    mixer: float = 1.0
    mlp: float = 1.0


class ParallelMixersLayer(DecoderLayer):
    """Attention and a recurrent mixer side by side on one norm's output, then an MLP (Falcon-H1).

    Args:
        mixer_norm: Norm of both mixers' input.
        attention: Attention.
        mixer: The recurrent mixer.
        mlp_norm: Norm of the MLP's branch.
        mlp: MLP.
        scales: Factors of the branches.
    """

    def __init__(
        self,
        mixer_norm: RMSNorm,
        attention: Attention,
        mixer: Recurrent,
        mlp_norm: RMSNorm,
        mlp: AnyMLP,
        scales: BranchScales,
    ):
        super().__init__(attention)
        self.mixer_norm, self.mixer, self.mlp_norm, self.mlp, self.scales = mixer_norm, mixer, mlp_norm, mlp, scales

    @property
    def state_spec(self) -> StateSpec:
        """The mixer's state per sequence."""
        return self.mixer.state_spec

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse all its norms with the neighbouring matmuls."""
        return self.attention.has_fused_norms and self.mixer.has_fused_norms and self.mlp.has_fused_norms

    def projected(self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        """Compute queries, keys and values of the normalized input."""
        return self.attention.project_input(x, norm=self.mixer_norm, num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        """Return the input with the attention's branch; the other branches follow in :meth:`__call__`."""
        return self.attention.output(attended, residual=x, scale=self.scales.attention, num_rows=num_rows)

    def __call__(
        self, x: Float[Array, "rows D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> LayerOutput:
        """Run the layer."""
        count = len(pools) - len(self.state_spec)
        mixed, states = run_mixer(self.mixer, self.mixer_norm, x, pools[count:], inputs, settings)
        attended, pools, _ = self._attended(x, pools[:count], inputs, settings)
        num_tokens, tile = inputs.num_tokens, settings.row_tile
        after = partial(self._after, num_rows=num_tokens if tile is None else None)
        x = map_rows(after, (x, attended, mixed), num_tokens, tile, len(mixed))
        return LayerOutput(x, (*pools, *states))

    def _after(
        self,
        x: Float[Array, "rows D"],
        attended: Float[Array, "T N H"],
        mixed: Float[Array, "T _"],
        num_rows: Int[Array, ""] | None,
    ) -> Float[Array, "rows D"]:
        x = self.after_attention(x, attended, num_rows)
        x = self.mixer.output(mixed, residual=x, scale=self.scales.mixer, num_rows=num_rows)
        return run_mlp(self.mlp, x, norm=self.mlp_norm, residual=x, scale=self.scales.mlp, num_rows=num_rows)[0]
