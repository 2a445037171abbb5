"""Attention over a part of each context, for devices that share the tokens of every page.

Of n devices, device ``s % n`` holds position s of every context, as number ``s // n`` of its own tokens: a page of p
tokens has p / n of them on each device. A device attends with all query heads to its own tokens, and returns the
softmax over them unfinished, as *partial attention*: for each query the weighted sum of the values, the sum of the
weights, and the largest score, [V + 2] in float32. ``combine_parts`` finishes the softmax over all devices.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.paged_attention import AttentionBatch

_LEAST_TOTAL = 1e-30  # of the weights: a query that sees nothing has the mean 0


class Part(NamedTuple):
    """The part of every context that one of several devices holds: every ``num_devices``-th position, from position
    ``device`` on."""

    device: Int[Array, ""] | int
    num_devices: int

    def tokens_before(self, position: Int[Array, "*R"]) -> Int[Array, "*R"]:
        """Return how many of the part's tokens are before a position."""
        return jnp.maximum((position - self.device + self.num_devices - 1) // self.num_devices, 0)

    def holds(self, position: Int[Array, "*T"]) -> Bool[Array, "*T"]:
        """Return whether the device holds the token at a position."""
        return position % self.num_devices == self.device


@runtime_checkable
class PartAttention(Protocol):
    """An implementation of ``PagedAttention`` for devices that share the tokens of pages."""

    def attend_part(
        self,
        query: Float[Array, "T N H"],
        pools: tuple[Array, Array],
        batch: AttentionBatch,
        part: Part,
        *,
        page_size: int,
        num_kv_heads: int,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        decode_only: bool,
        row_tile: int | None = None,
    ) -> Float[Array, "T N partial"]:
        """Return each query token's partial attention over the part of its context that the pools hold.

        ``page_size`` counts the tokens per page in the pools; lengths in the batch and the window are those of whole
        contexts. The rest is as in ``PagedAttention.attend``.
        """
        ...


@runtime_checkable
class LatentPartAttention(Protocol):
    """An implementation of ``LatentAttention`` for devices that share the tokens of pages."""

    def attend_part(
        self,
        query: Float[Array, "T N H"],
        pools: tuple[Array],
        batch: AttentionBatch,
        part: Part,
        *,
        page_size: int,
        value_dim: int,
        scale: float,
        decode_only: bool,
        row_tile: int | None = None,
    ) -> Float[Array, "T N partial"]:
        """Return each query token's partial attention; see ``PartAttention.attend_part``."""
        ...


def combine_parts(
    parts: Sequence[Float[Array, "T N partial"]], sinks: Float[Array, " N"] | None = None
) -> Float[Array, "T N V"]:
    """Finish the softmax over the partial attention of all devices, added in their order.

    Sinks are one more term of each head's denominator, counted once. Queries that see nothing get zeros.
    """
    highest = functools.reduce(jnp.maximum, [part[..., -1] for part in parts])
    if sinks is not None:
        highest = jnp.maximum(highest, sinks)
    weighted = functools.reduce(jnp.add, [_scaled(part, highest) for part in parts])
    values, total = weighted[..., :-1], weighted[..., -1]
    if sinks is not None:
        total += jnp.exp(sinks - highest)
    return values / jnp.maximum(total, _LEAST_TOTAL)[..., None]


def _scaled(part: Float[Array, "T N partial"], highest: Float[Array, "T N"]) -> Float[Array, "T N sums"]:
    """Return a device's weighted values and sum of weights, relative to the largest score of all devices.

    The selection keeps compilers from fusing the multiplication with the addition of another device's: which of the two
    they would round is not the same in all programs.
    """
    factor = jnp.exp(part[..., -1] - highest)[..., None]
    return jnp.where(factor == 0, 0, part[..., :-1] * factor)


def as_partial(
    values: Float[Array, "*Q V"], total: Shaped[Array, "*Q"], maximum: Shaped[Array, "*Q"]
) -> Float[Array, "*Q partial"]:
    """Return partial attention from a softmax in progress."""
    return jnp.concatenate([values, total[..., None], maximum[..., None]], axis=-1)


def unsupported_parts(sizes: Mapping[str, int]) -> str | None:
    """Return why an implementation without ``attend_part`` cannot run with these sizes, or None."""
    count = sizes.get("token_parts", 1)
    if count == 1:
        return None
    return f"it has no partial attention, which {count} devices that share the tokens of pages need"
