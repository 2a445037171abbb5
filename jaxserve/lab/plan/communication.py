"""The collectives of a step, counted in its jaxpr.

The embedding, one layer of each kind, and the head with the sampler are traced one by one, and their collectives
combined: a step of a hundred equal layers is traced as fast as one of two.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.device.sharded_model import ShardedModel, StepState
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import attention_settings, sample_rows
from jaxserve.layers.residual import own_rows, whole_rows
from jaxserve.models.stages import StageLayers
from pallas_kernels.registry import load
from sharding.plan import Collective, collectives

EMBEDDING, LAYERS, HEAD, HAND_OVER = PARTS = ("embedding", "layers", "head and sampling", "hand-over")


class PartCollectives(NamedTuple):
    """Collectives of a part of the model: those of ``PARTS``, the layers by their kind.

    Attributes:
        part: One of ``PARTS``.
        layer: Index of the first layer of the kind; None for other parts.
        found: The collectives of one such layer, or of the part.
    """

    part: str
    layer: int | None
    found: tuple[Collective, ...]


class StepCollectives:
    """Counts the collectives of steps of one model in one layout, tracing each part once per batch shape.

    Args:
        sharded: The whole model, or any of its stages.
    """

    def __init__(self, sharded: ShardedModel):
        # Collectives do not depend on how a device attends, and XLA's attention is traced on any machine.
        (operation,) = {spec.operation for spec in sharded.abstract_model.kv_specs}
        self._whole = dataclasses.replace(sharded, stage=None, kernel=load(operation, "xla"))
        self._models: dict[int, ShardedModel] = {}
        self._parts: dict[tuple[str, int, BatchShape, str], PartCollectives] = {}

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each layer, the first layer of the same kind: with arrays of the same names, shapes and shardings."""
        arrays = collections.defaultdict[int, list[Any]](list)
        for path, struct in self._whole.abstract_model.params.items():
            top, index, *rest = path.split(".", 2)
            if top == "layers":
                arrays[int(index)].append((*rest, struct.shape, struct.dtype, struct.sharding))
        first: dict[Any, int] = {}
        return tuple(first.setdefault(tuple(arrays[layer]), layer) for layer in sorted(arrays))

    def count(
        self, shape: BatchShape, layers: range | None = None, *, variant: str = "greedy"
    ) -> list[PartCollectives]:
        """Return the collectives of a step through some layers, in order.

        Args:
            shape: Batch shape of the step.
            layers: The layers of a stage, with the embedding if it is the first, and the head if it is the last; None
                for the whole model.
            variant: Sampler variant.
        """
        num_layers = len(self.kinds)
        layers = range(num_layers) if layers is None else layers
        found = [self._part(EMBEDDING, 0, shape, variant)] if layers.start == 0 else []
        found += [self._part(LAYERS, self.kinds[layer], shape, variant) for layer in layers]
        last = self._part(HEAD, num_layers - 1, shape, variant) if layers.stop == num_layers else None
        return [*found, last or self._part(HAND_OVER, num_layers - 1, shape, variant)]

    def _part(self, part: str, layer: int, shape: BatchShape, variant: str) -> PartCollectives:
        key = part, layer, shape, variant
        if key not in self._parts:
            traced = _TRACERS[part](self._layer_model(layer).for_shape(shape), shape, variant)
            found = tuple(collectives(traced.jaxpr.jaxpr, is_likely=True))
            self._parts[key] = PartCollectives(part, layer if part == LAYERS else None, found)
        return self._parts[key]

    def _layer_model(self, layer: int) -> ShardedModel:
        if layer not in self._models:
            stage = StageLayers(layer, layer + 1, len(self.kinds)) if len(self.kinds) > 1 else None
            self._models[layer] = dataclasses.replace(self._whole, stage=stage)
        return self._models[layer]


def _trace_embedding(sharded: ShardedModel, shape: BatchShape, variant: str) -> jax.stages.Traced:
    def embed(arrays: tuple[Array, ...], state: StepState, buffer: Int[Array, " size"]) -> Any:
        model, batch = sharded.model(arrays), sharded.unpack(buffer, shape, state.latest)
        settings = attention_settings(sharded, shape)
        return model.embedded(batch, settings)[0]

    return _trace(sharded, shape, embed)


def _trace_layer(sharded: ShardedModel, shape: BatchShape, variant: str) -> jax.stages.Traced:
    def layer(arrays: tuple[Array, ...], state: StepState, buffer: Int[Array, " size"], x: Float[Array, "T D"]) -> Any:
        model, batch = sharded.model(arrays), sharded.unpack(buffer, shape, state.latest)
        settings = attention_settings(sharded, shape)
        own, inputs = model.embedded(batch, settings, own_rows(x, model.residual_axis, sharded.row_tile))
        return model.through(own, state.pools, inputs, settings).x

    return _trace(sharded, shape, layer, sharded.abstract_hidden(shape.num_tokens))


def _trace_hand_over(sharded: ShardedModel, shape: BatchShape, variant: str) -> jax.stages.Traced:
    def gather(arrays: tuple[Array, ...], state: StepState, buffer: Int[Array, " size"], x: Float[Array, "T D"]) -> Any:
        axis, tile = sharded.model(arrays).residual_axis, sharded.row_tile
        return whole_rows(own_rows(x, axis, tile), axis, tile)

    return _trace(sharded, shape, gather, sharded.abstract_hidden(shape.num_tokens))


def _trace_head(sharded: ShardedModel, shape: BatchShape, variant: str) -> jax.stages.Traced:
    def sampled(
        arrays: tuple[Array, ...], state: StepState, buffer: Int[Array, " size"], x: Float[Array, "T D"]
    ) -> Any:
        model, batch = sharded.model(arrays), sharded.unpack(buffer, shape, state.latest)
        tile = sharded.row_tile
        hidden = whole_rows(own_rows(x, model.residual_axis, tile), model.residual_axis, tile)
        rows, mask = hidden[batch.sampled_tokens], jnp.zeros(sharded.mask_shape(shape.num_rows), jnp.int32)
        return sample_rows(model.logits, rows, mask, state.tables, batch.sampler, variant, sharded.sampler, tile)

    return _trace(sharded, shape, sampled, sharded.abstract_hidden(shape.num_tokens))


def _trace(sharded: ShardedModel, shape: BatchShape, function: Callable[..., Any], *given: Any) -> jax.stages.Traced:
    buffer = sharded.rows_struct((shape.buffer_size,), jnp.int32)
    return sharded.trace(function, (sharded.abstract_params, sharded.abstract_state(), buffer, *given))


_TRACERS: Mapping[str, Callable[[ShardedModel, BatchShape, str], jax.stages.Traced]] = {
    EMBEDDING: _trace_embedding,
    LAYERS: _trace_layer,
    HEAD: _trace_head,
    HAND_OVER: _trace_hand_over,
}
