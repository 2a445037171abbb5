"""What one pipeline stage hands over to the next."""

from typing import Any

from jaxserve.device.sharded_model import ShardedModel


def abstract_input(sharded: ShardedModel, num_tokens: int) -> tuple[Any, ...]:
    """Return shapes and shardings of what a stage is given: hidden states, and the inputs of earlier stages' layers
    that a draft head reads; nothing if it embeds tokens."""
    if sharded.is_first:
        return ()
    num_aux = sum(layer < sharded.layers.start for layer in sharded.aux_layers or ())
    hidden = abstract_hidden(sharded, num_tokens)
    return (hidden, abstract_hidden(sharded, num_tokens, num_aux)) if num_aux else (hidden,)


def abstract_hidden(sharded: ShardedModel, num_tokens: int, num_layers: int = 1) -> Any:
    """Return shape and sharding of hidden states of some layers, side by side."""
    shape = num_tokens, num_layers * sharded.config.hidden_size
    return sharded.rows_struct(shape, sharded.policy.activations_dtype)
