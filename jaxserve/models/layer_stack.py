"""Consecutive layers of a model, one after the other."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jaxserve.layers.attention import AttentionInputs, AttentionSettings, Pools
from jaxserve.layers.decoder import Layer, LayerOutput
from jaxserve.layers.kv_layout import KVIndices


class HiddenStates(NamedTuple):
    """Outputs of a model's layers.

    Attributes:
        x: Hidden state of each token, before the head's norm; after some of the layers, those that a device has.
        pools: Pools of the whole model, with the step's keys and values, then the states of each recurrent layer.
        expert_tokens: Tokens routed to each expert of each layer that has experts; None if they are not counted.
        aux: Inputs of the layers that a draft head reads, those of the lowest layer first; None for none.
    """

    x: Float[Array, "rows D"]
    pools: list[Pools]
    expert_tokens: Int[Array, "layers E"] | None
    aux: Float[Array, "rows aux"] | None = None


def run_layers(
    layers: Sequence[Layer],
    x: Float[Array, "rows width"],
    pools: Sequence[Pools],
    inputs: Sequence[AttentionInputs],
    settings: AttentionSettings,
    *,
    first_layer: int = 0,
    aux_layers: Sequence[int] = (),
) -> HiddenStates:
    """Compute hidden states after layers, and all pools with the keys and values that these write.

    Args:
        layers: The layers.
        x: Input of the first one.
        pools: Pools of the whole model, then the states of each recurrent layer.
        inputs: Inputs shared by the layers of each page table.
        settings: Settings fixed at compile time.
        first_layer: Index of the first layer in the whole model.
        aux_layers: Layers of the whole model whose inputs are returned too, if they are among these.
    """
    written, expert_tokens, selected, aux = list(pools), [], None, []
    for index, layer in enumerate(layers):
        if first_layer + index in aux_layers:
            aux.append(x)
        place = settings.layer_indices[index] if settings.layer_indices else KVIndices(index, 0)
        batch = inputs[place.table].batch._replace(first_page=jnp.int32(place.first_page))
        own = inputs[place.table]._replace(batch=batch, selected=selected)
        if own.layer_input is not None:
            own = own._replace(layer_input=own.layer_input[:, first_layer + index])
        kept = [each for each in (place.pool, place.state) if each is not None]
        arrays = sum((written[each] for each in kept), ())
        x, arrays, counts, selected = _run_layer(*nnx.split(layer), x, arrays, own, settings)
        for each in kept:
            count = len(written[each])
            written[each], arrays = arrays[:count], arrays[count:]
        if counts is not None:
            expert_tokens.append(counts)
    return HiddenStates(
        x,
        written,
        jnp.stack(expert_tokens) if expert_tokens else None,
        jnp.concatenate(aux, 1) if aux else None,
    )


def side_by_side(
    first: Float[Array, "rows first"] | None, second: Float[Array, "rows second"] | None
) -> Float[Array, "rows both"] | None:
    """Return the inputs of layers, of earlier stages and of this one, side by side; None if there are none."""
    if first is None or second is None:
        return second if first is None else first
    return jnp.concatenate([first, second], 1)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _run_layer(
    graphdef: nnx.GraphDef,
    state: PyTree,
    x: Float[Array, "rows width"],
    pools: Pools,
    inputs: AttentionInputs,
    settings: AttentionSettings,
) -> LayerOutput:
    """Run one layer. It is inlined in a step; as its own function it lets equal layers be traced once."""
    return nnx.merge(graphdef, state)(x, pools, inputs, settings)
