"""Mixture-of-experts MLP (arXiv:1701.06538): a router chooses a few experts for each token.

The tokens' rows are sorted by expert, multiplied by their experts' matrices, put back in order, and summed with the
router's weights. No token is ever dropped. Devices split the features of every expert (logical axis ``expert_ffn``),
the experts (``experts``), or both. If each of them has all rows, one all-reduce adds what they computed, the shared
expert's part included; rows that are split too are exchanged first (:mod:`jaxserve.layers.expert_dispatch`).

Native kernels compute each row separately. What XLA computes between them runs in tiles of rows then, so that a row has
the same bits in every batch.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from checkpoints import Piece, TensorRecipe, whole
from jaxserve.layers.expert_activations import ActivationGLU, ClampedSwiGLU, SquaredReLU
from jaxserve.layers.expert_dispatch import exchange_rows, gather_rows
from jaxserve.layers.expert_load import count_each
from jaxserve.layers.linear import ColumnParallelLinear, add_branch, replicated_linear
from jaxserve.layers.mlp import GatedMLP, PlainMLP
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Parallel, Scope
from jaxserve.layers.params import Rows, Split, expert_weights, matrix, rows_of, stack_rows, vector
from jaxserve.layers.residual import block_input, block_output
from jaxserve.layers.routing import Routing
from jaxserve.layers.rows import ROW_TILE, map_rows
from jaxserve.layers.storage import grouped_matmul
from sharding.collectives import axis_index


class ExpertNames(NamedTuple):
    """Names in checkpoints, relative to the layer; ``{}`` stands for an expert's index.

    Attributes:
        gate_up: Gate and up projections: two modules, or one with the rows of gate, then up. Without ``{}`` one tensor
            [experts, out, in] holds all experts.
        down: Down projection, likewise.
        router: The router's module.
        tensor: Name of the tensor with the weights of these modules; empty if ``gate_up`` and ``down`` name tensors.
        is_transposed: Whether the projections' weights are ``[in, out]``.
        is_interleaved: Whether the one module of gate and up has a row of gate, one of up, and so on.
        biases: Tensors [experts, out] of the biases of ``gate_up`` and ``down``; None for none.
        correction: Tensor of the bias for the choice; None: the router's ``e_score_correction_bias``.
        is_correction_row: Whether that tensor has shape [1, experts].
    """

    gate_up: tuple[str, ...] = ("experts.{}.gate_proj", "experts.{}.up_proj")
    down: str = "experts.{}.down_proj"
    router: str = "gate"
    tensor: str = "weight"
    is_transposed: bool = False
    is_interleaved: bool = False
    biases: tuple[str, str] | None = None
    correction: str | None = None
    is_correction_row: bool = False


DEFAULT_NAMES: Final = ExpertNames()


class SharedExpert(nnx.Module):
    """An expert that computes every token, with an optional gate ``sigmoid(x @ w)`` per token.

    Args:
        mlp: The expert.
        gate: Computes the logit of the gate; None for no gate.
    """

    def __init__(self, mlp: GatedMLP | PlainMLP, gate: ColumnParallelLinear | None):
        self.mlp, self.gate = mlp, gate

    def partial(
        self, x: Float[Array, "T D"], num_rows: Int[Array, ""] | None, tile: int | None = None
    ) -> Float[Array, "T D"]:
        """Compute this device's part of the output, in float32; ``tile`` as in :func:`map_rows`."""
        y = self.mlp.partial(x, num_rows=num_rows)
        if self.gate is None:
            return y
        gates = self.gate.in_float32(x, num_rows=num_rows)
        return map_rows(_gated, (y, gates), len(x) if num_rows is None else num_rows, tile)


class SparseMLP(nnx.Module):
    """``sum over the chosen experts of weight * down(activation(gate(x)) * up(x))``, plus the shared expert.

    Args:
        hidden_size: D.
        ffn_size: F, of each expert.
        routing: How experts are chosen.
        scope: Scope of the module.
        names: Names in checkpoints.
        shared: The shared expert, if there is one.
        activation: Activation of the experts; None: ``silu(gate) * up``, without biases. If gate and up are
            interleaved, the experts have biases. With ``SquaredReLU``, ``names.gate_up`` is one projection, of all F.
        latent: Projections to the experts' input and from their output, of which all devices have all, and the number
            of features between; None: experts compute the hidden size (Nemotron 3).
        router_bias: Whether the router has a bias.
        router_norm: Norm of the router's input, which is then not that of the experts; None: both are the same.
        router_scale: Factor of the router's logits.
        expert_scales: Tensor with a factor of the weight of each expert; None for none.
        is_mean: Whether the output is the mean of the experts' sum and the shared expert's output, not their sum
            (Cohere 2 MoE).
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        routing: Routing,
        *,
        scope: Scope,
        names: ExpertNames = DEFAULT_NAMES,
        shared: SharedExpert | None = None,
        activation: ClampedSwiGLU | ActivationGLU | SquaredReLU | None = None,
        latent: "LatentProjections | None" = None,
        router_bias: bool = False,
        router_norm: RMSNorm | None = None,
        router_scale: float = 1.0,
        expert_scales: str | None = None,
        is_mean: bool = False,
    ):
        parallel, policy, count = scope.parallel, scope.policy, routing.num_experts
        self.tile = ROW_TILE if policy.is_native else None
        self.residual_axis = parallel.residual_axis
        self.has_fused_norms = self.tile is not None and self.residual_axis is None  # in tiles of its own, not fused
        self.is_mean = is_mean
        self.routing, self.shared, self.dtype = routing, shared, policy.activations_dtype
        self.experts_axis, self.ffn_axis, self.dispatch = parallel.experts, parallel.expert_ffn, parallel.dispatch
        self.shared_axis = parallel.ffn
        self.splits = _splits(ffn_size, count, parallel)
        self.num_local = count // parallel.parts(self.experts_axis)
        self.router = replicated_linear(hidden_size, names.router, count, scope, bias=router_bias)
        self.correction = _correction(names, count, scope) if routing.is_corrected else None
        parts = parallel.parts(parallel.expert_ffn)
        build = partial(expert_weights, num_experts=count, experts_per_token=routing.experts_per_token)
        self.latent, counts = latent, (ffn_size,) * (1 if isinstance(activation, SquaredReLU) else 2)
        hidden_size = hidden_size if latent is None else latent.size
        gate_up = stack_rows(
            scope if self.ffn_axis is not None else scope.unsplit(),
            _expert_rows(names, names.gate_up, counts, count),
            names.tensor,
            hidden_size,
            parallel.parts(self.experts_axis),
        )
        self.gate_up = build(gate_up, ("expert_ffn", "embed"), (parts, 1), scope, is_gated=activation is None)
        down_rows = _expert_rows(names, (names.down,), (hidden_size,), count)
        down = stack_rows(scope.unsplit(), down_rows, names.tensor, ffn_size)
        self.down = build(down, ("embed", "expert_ffn"), (1, parts), scope)
        assert (names.biases is not None) == names.is_interleaved
        assert activation is not None or not names.is_interleaved
        self.activation, self.is_interleaved = activation, names.is_interleaved
        self.router_norm, self.router_scale = router_norm, router_scale
        self.expert_scales = (
            None if expert_scales is None else vector(whole(scope.at(expert_scales).module, (count,)), "embed", scope)
        )
        gate_up_bias, down_bias = names.biases or (None, None)
        self.gate_up_bias = _expert_bias(gate_up_bias, count, 2 * ffn_size, "expert_ffn", scope)
        self.down_bias = _expert_bias(down_bias, count, hidden_size, "embed", scope)

    def __call__(
        self,
        x: Float[Array, "rows D"],
        *,
        norm: RMSNorm | None = None,
        residual: Float[Array, "rows D"] | None = None,
        scale: float = 1.0,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "rows D"]:
        """Compute ``residual + scale * mlp(norm(x))``; rows from ``num_rows`` on are undefined."""
        return self.with_experts(x, norm=norm, residual=residual, scale=scale, num_rows=num_rows)[0]

    def with_experts(
        self,
        x: Float[Array, "rows D"],
        *,
        norm: RMSNorm | None = None,
        residual: Float[Array, "rows D"] | None = None,
        scale: float = 1.0,
        num_rows: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "rows D"], Int[Array, "T k"]]:
        """Compute the same, and the indices of each token's experts."""
        if self.router_norm is None:
            x, norm = block_input(x, norm, self.residual_axis)
        else:
            x, _ = block_input(x, None, self.residual_axis)
        tile, choose = self._tile(x), partial(self._choose, norm)
        x, weights, experts = map_rows(choose, (x,), len(x) if num_rows is None else num_rows, tile)
        given = x if self.latent is None else self.latent.into(x, num_rows=num_rows)
        compute = self._routed if self.dispatch == "all_reduce" else self._exchanged
        y = compute(given, weights, experts, num_rows)
        if self.latent is not None:  # linear: the devices' parts of the sum add up after it too
            y = self.latent.out_of.in_float32(y.astype(self.dtype), num_rows=num_rows)
        if self.shared is not None:
            y += self._once(self.shared.partial(x, num_rows, tile))
            y = y / 2 if self.is_mean else y
        y = block_output(y.astype(self.dtype), self._summed_axes, self.residual_axis)
        return add_branch(y, residual, scale), experts

    def _tile(self, x: Float[Array, "T D"]) -> int | None:
        """Return the number of rows that XLA computes at a time; None for all."""
        return self.tile if self.tile is not None and len(x) % self.tile == 0 else None

    def _choose(
        self, norm: RMSNorm | None, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T D"], Float[Array, "T k"], Int[Array, "T k"]]:
        """Normalize; return that, and the weights and indices of each token's experts."""
        normed = x if norm is None else norm(x)
        logits = self.router.in_float32(normed if self.router_norm is None else self.router_norm(x))
        logits = logits if self.router_scale == 1.0 else logits * self.router_scale
        correction = None if self.correction is None else self.correction[...]
        weights, experts = self.routing(logits, correction)
        if self.expert_scales is not None:
            weights = weights * self.expert_scales[...].astype(jnp.float32)[experts]
        return normed, weights, experts

    @property
    def _summed_axes(self) -> tuple[str, ...]:
        """Mesh axes of the devices whose results add up."""
        axes = (self.experts_axis if self.dispatch == "all_reduce" else None, self.ffn_axis)
        return tuple(dict.fromkeys(axis for axis in axes if axis is not None))

    def _once(self, y: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return what the shared expert computes, zero where another device along an axis of experts alone adds it."""
        axis = self.experts_axis
        if self.dispatch != "all_reduce" or axis in (None, self.shared_axis):
            return y
        return jnp.where(axis_index(axis) == 0, y, 0.0)

    def _exchanged(
        self,
        x: Float[Array, "T D"],
        weights: Float[Array, "T k"],
        experts: Int[Array, "T k"],
        num_rows: Int[Array, ""] | None,
    ) -> Float[Array, "T D"]:
        """Compute the weighted sum of the chosen experts on all devices of their axis, in float32."""
        axis = self.experts_axis
        assert axis is not None
        if num_rows is not None:
            experts = jnp.where((jnp.arange(len(x)) < num_rows)[:, None], experts, self.routing.num_experts)
        local = partial(self._routed, num_rows=None)
        if self.dispatch == "gather":
            return gather_rows(local, x, weights, experts, axis)
        same = (axis, *self._summed_axes)
        return exchange_rows(local, x, weights, experts, axis, num_local=self.num_local, same_axes=same)

    def _routed(
        self,
        x: Float[Array, "T D"],
        weights: Float[Array, "T k"],
        experts: Int[Array, "T k"],
        num_rows: Int[Array, ""] | None,
    ) -> Float[Array, "T D"]:
        """Compute the weighted sum of this device's part of the chosen experts, in float32."""
        num_tokens, per_token = experts.shape
        num_local = self.num_local
        if self.experts_axis is not None:
            experts = experts - axis_index(self.experts_axis) * num_local
        is_computed = (experts >= 0) & (experts < num_local)
        if num_rows is not None:
            is_computed &= (jnp.arange(num_tokens) < num_rows)[:, None]
        key = jnp.where(is_computed, experts, num_local).reshape(-1)  # tokens of other devices' experts sort last
        order = jnp.argsort(key, stable=True)
        group_sizes = count_each(key, num_local)
        rows = x[order // per_token]
        if self.routing.weighs_inputs:
            rows = (rows * weights.reshape(-1)[order][:, None]).astype(x.dtype)
            weights = jnp.ones_like(weights)
        outputs = self._computed(rows, group_sizes, jnp.minimum(key[order], num_local - 1))
        places = jnp.argsort(order).reshape(num_tokens, per_token)
        add, used = partial(_weighted_sum, outputs), num_tokens if num_rows is None else num_rows
        return map_rows(add, (places, weights, is_computed), used, self._tile(x))

    def _computed(
        self, x: Float[Array, "rows D"], group_sizes: Int[Array, " E"], experts: Int[Array, " rows"]
    ) -> Float[Array, "rows D"]:
        """Compute this device's part of the output of each row's expert; rows are ordered by expert."""
        gated = grouped_matmul(self.gate_up, x, group_sizes)
        if self.activation is None:
            return grouped_matmul(self.down, gated, group_sizes)
        activated = map_rows(self._activated, (gated, experts), group_sizes.sum(), self._tile(x))
        outputs = grouped_matmul(self.down, activated, group_sizes).astype(jnp.float32)
        if self.down_bias is None:
            return outputs
        bias = self.down_bias[...][experts].astype(jnp.float32)
        if self.ffn_axis is not None:  # the devices that share an expert add their parts
            bias = jnp.where(axis_index(self.ffn_axis) == 0, bias, 0)
        return outputs + bias

    def _activated(self, gated: Float[Array, "rows F2"], experts: Int[Array, " rows"]) -> Float[Array, "rows F"]:
        """Add the bias of each row's expert to gate and up, if there is one, and apply the activation, in float32."""
        assert self.activation is not None
        wide = gated.astype(jnp.float32)
        if isinstance(self.activation, SquaredReLU):
            return self.activation(wide)
        if self.gate_up_bias is not None:
            wide += self.gate_up_bias[...][experts].astype(jnp.float32)
        gate, up = (wide[:, ::2], wide[:, 1::2]) if self.is_interleaved else jnp.split(wide, 2, axis=1)
        return self.activation(gate, up)


def _weighted_sum(
    outputs: Float[Array, "rows D"],
    places: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    is_computed: Bool[Array, "T k"],
) -> Float[Array, "T D"]:
    """Add up the rows of ``outputs`` at each token's places, weighted, in float32 and in order."""
    found = outputs[places].astype(jnp.float32)
    y = jnp.zeros_like(found[:, 0])
    for index in range(places.shape[1]):
        y += jnp.where(is_computed[:, index, None], weights[:, index, None] * found[:, index], 0.0)
    return y


def _gated(y: Float[Array, "T D"], gates: Float[Array, "T 1"]) -> Float[Array, "T D"]:
    return y * jax.nn.sigmoid(gates)


class LatentProjections(nnx.Module):
    """Projections between the hidden size and the fewer features that experts compute.

    Args:
        hidden_size: D.
        size: Features of the experts.
        names: Modules of both projections.
        scope: Scope of the mixture of experts.
    """

    def __init__(self, hidden_size: int, size: int, names: tuple[str, str], scope: Scope):
        self.size = size
        self.into = replicated_linear(hidden_size, names[0], size, scope)
        self.out_of = replicated_linear(size, names[1], hidden_size, scope)


def _correction(names: ExpertNames, count: int, scope: Scope) -> nnx.Param[Any]:
    """Return the bias for the choice of experts, in float32."""
    name = scope.at(names.correction or f"{names.router}.e_score_correction_bias").module
    recipe = whole(name, (count,))
    if names.is_correction_row:
        recipe = TensorRecipe((count,), (Piece(name, (0, 0), (0,), (count,)),), ((name, (1, count)),))
    return vector(recipe, "embed", scope, dtype="float32")


def _expert_bias(name: str | None, num_experts: int, width: int, axis: str, scope: Scope) -> nnx.Param[Any] | None:
    """Return the biases [experts, out] of all experts, which devices split as they split the experts' matrices."""
    if name is None:
        return None
    return matrix(whole(scope.at(name).module, (num_experts, width)), ("experts", axis), scope, 0)


def _splits(ffn_size: int, num_experts: int, parallel: Parallel) -> tuple[Split, ...]:
    """Return the requirements on the devices that share the features of experts, and on those that share experts."""
    splits = list[Split]()
    if parallel.expert_ffn is not None or parallel.experts is None:
        splits.append(Split(ffn_size, f"expert intermediate size {ffn_size}"))
    if parallel.experts is not None:
        splits.append(Split(num_experts, f"{num_experts} experts", is_experts=parallel.experts != parallel.ffn))
    return tuple(splits)


def _expert_rows(names: ExpertNames, modules: Sequence[str], counts: Sequence[int], num_experts: int) -> list[Rows]:
    """Return the rows of all experts' projections in ``modules``, one expert after the other."""
    units = (1,) * len(counts)
    if names.is_interleaved and len(counts) > 1:
        counts, units = (sum(counts),), (len(counts),)
    rows: list[Rows] = []
    for index in range(num_experts):
        for each in rows_of([module.format(index) for module in modules], counts, units):
            own = each._replace(is_transposed=names.is_transposed)
            rows.append(own if "{}" in modules[0] else own._replace(expert=(index, num_experts)))
    return rows
