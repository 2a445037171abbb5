"""Bring rows to the devices of their experts and the results back, where devices have rows of their own.

Both forms are exact: no row is ever dropped. Rows with experts on several devices get a part from each; the parts are
added in float32.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sharding.collectives import all_gather, all_max, all_to_all, axis_size, reduce_scatter

LocalExperts = Callable[[Float[Array, "T D"], Float[Array, "T k"], Int[Array, "T k"]], Float[Array, "T D"]]
"""Computes the weighted sum of this device's experts from rows and from their experts' weights and indices."""

_ROOM = 1.5  # capacity of an exchange, as a multiple of the rows that one device's experts get on average
_MULTIPLE = 8


def gather_rows(
    local: LocalExperts, x: Float[Array, "T D"], weights: Float[Array, "T k"], experts: Int[Array, "T k"], axis: str
) -> Float[Array, "T D"]:
    """Compute all devices' rows with the local experts, and return this device's rows of the sum over devices.

    Args:
        local: Computes the local experts.
        x: This device's rows.
        weights: Weights of each row's experts.
        experts: Indices of each row's experts; out of range for rows not in use.
        axis: Mesh axis of the rows and the experts.
    """
    y = local(all_gather(x, axis, 0), *_unpack(all_gather(_pack(weights, experts), axis, 0)))
    return reduce_scatter(y, axis, 0)


def exchange_rows(
    local: LocalExperts,
    x: Float[Array, "T D"],
    weights: Float[Array, "T k"],
    experts: Int[Array, "T k"],
    axis: str,
    *,
    num_local: int,
    same_axes: tuple[str, ...],
) -> Float[Array, "T D"]:
    """Send each row to the devices of its experts, and return the sum of the parts that they send back, in their order.

    All devices exchange few rows if these suffice for every one of them, else all rows.

    Args:
        local: As in :func:`gather_rows`, as are the next four arguments.
        x: Rows.
        weights: Weights.
        experts: Experts.
        axis: Mesh axis.
        num_local: Experts per device.
        same_axes: Mesh axes of the devices that must choose the same exchange.
    """
    num_rows, per_token = experts.shape
    ranks = axis_size(axis)
    needs = (experts // num_local == jnp.arange(ranks)[:, None, None]).any(-1)
    few = exchange_capacity(num_rows, per_token, ranks)

    def exchange(capacity: int) -> Float[Array, "T D"]:
        return _exchange(local, x, _pack(weights, experts), needs, axis, capacity)

    if few == num_rows:
        return exchange(num_rows)
    is_enough = all_max(needs.sum(1, dtype=jnp.int32).max(), same_axes) <= few
    return lax.cond(is_enough, lambda: exchange(few), lambda: exchange(num_rows))


def exchange_capacity(num_rows: int, per_token: int, num_devices: int) -> int:
    """Return the rows that devices first try to exchange with each other; ``num_rows`` if there is no smaller form."""
    few = math.ceil(_ROOM * num_rows * per_token / num_devices / _MULTIPLE) * _MULTIPLE
    return min(few, num_rows)


def _exchange(
    local: LocalExperts,
    x: Float[Array, "T D"],
    choices: Float[Array, "T choices"],
    needs: Bool[Array, "devices T"],
    axis: str,
    capacity: int,
) -> Float[Array, "T D"]:
    """Exchange up to ``capacity`` rows with each device; ``needs`` are the rows that a device has experts for."""
    order = jnp.argsort(~needs, axis=1, stable=True)[:, :capacity]
    received = all_to_all(x[order], axis).reshape(-1, x.shape[1])
    weights, experts = _unpack(all_to_all(choices[order], axis).reshape(-1, choices.shape[1]))
    parts = all_to_all(local(received, weights, experts).reshape(*order.shape, -1), axis)
    index = jnp.clip(jnp.cumsum(needs, axis=1) - 1, 0, capacity - 1)
    y = jnp.zeros((len(x), parts.shape[-1]), parts.dtype)
    for rank in range(len(needs)):  # in a fixed order
        y += jnp.where(needs[rank][:, None], parts[rank][index[rank]], 0)
    return y


def _pack(weights: Float[Array, "T k"], experts: Int[Array, "T k"]) -> Float[Array, "T choices"]:
    """Return weights and indices of experts, which float32 represents exactly, as one array."""
    return jnp.concatenate([weights, experts.astype(jnp.float32)], axis=1)


def _unpack(choices: Float[Array, "T choices"]) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    weights, experts = jnp.split(choices, 2, axis=1)
    return weights, experts.astype(jnp.int32)
