"""Recurrent mixers: what stands in the place of attention and keeps a state of fixed size per sequence."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints import Piece, TensorRecipe
from jaxserve.layers.kv_layout import StateArray, StateSpec
from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, Split, stack_rows, vector
from jaxserve.layers.residual import block_input
from pallas_kernels.recurrent_states import Convolution, StateRows
from pallas_kernels.registry import OPERATIONS, load

StateArrays = tuple[jax.Array, ...]
"""A layer's state arrays, each with an entry per state page."""


_DEVICES = {"triton": ("gpu", "NVIDIA")}
"""Platform and kind of the devices that implementations run on, if not CPUs."""


class Mixed(NamedTuple):
    """Output of a mixer before its output projection, and the states after the step."""

    mixed: Float[Array, "T inner"]
    states: StateArrays


class Recurrent(nnx.Module, ABC):
    """A mixer whose output depends on earlier tokens through a state of fixed size.

    A subclass declares ``projection``, whose outputs a device has for its heads, ``out``, and ``state_spec``.

    Args:
        scope: Scope of the module.
        splits: Requirements on the number of devices that share it.
    """

    projection: ColumnParallelLinear
    out: RowParallelLinear
    state_spec: StateSpec

    def __init__(self, scope: Scope, splits: tuple[Split, ...]):
        parallel = scope.parallel
        self.residual_axis, self.mesh_axis = parallel.residual_axis, parallel.heads
        self.splits = () if parallel.has_whole_attention else splits
        self.is_native = False

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse the norm before it with its projection, and compute each row of it separately."""
        return self.residual_axis is None and self.is_native

    def project_input(
        self, x: Float[Array, "rows D"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Normalize and project a layer's input: all rows, or those of this device, which are gathered first.

        The result is in float32: what a state takes in is never rounded to the activations' dtype.
        """
        x, norm = block_input(x, norm, self.residual_axis)
        return self.projection.in_float32(x, norm=norm, num_rows=num_rows)

    def load_kernel(self, operation: str, scope: Scope, **sizes: int) -> Any:
        """Return the implementation of the mixer's operation: that of the scope's policy, or XLA's if there is none or
        it does not support the mixer's sizes."""
        name = scope.policy.recurrent
        platform, device_kind = _DEVICES.get(name, ("cpu", "cpu"))
        kernel = load(operation, name if name in OPERATIONS[operation] else "xla")
        if kernel.unsupported(platform, device_kind, "float32", **sizes) is not None:
            return load(operation, "xla")
        self.is_native = name == "native"
        return kernel

    @abstractmethod
    def update(self, projected: Float[Array, "T width"], states: StateArrays, rows: StateRows) -> Mixed:
        """Take the projected tokens of each row into its state; tokens of no row are undefined."""

    def finished(self, mixed: Float[Array, "T inner"]) -> Float[Array, "T inner"]:
        """Return what the output projection multiplies; in deterministic mode, it is given a tile of rows."""
        return mixed

    def output(
        self,
        mixed: Float[Array, "T inner"],
        *,
        residual: Float[Array, "rows D"] | None = None,
        scale: float = 1.0,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "rows D"]:
        """Compute ``residual + scale * projection``; later rows than ``num_rows`` are undefined."""
        finished = self.finished(mixed).astype(self.out.dtype)
        return self.out(finished, residual=residual, scale=scale, num_rows=num_rows)


class CausalConvolution(nnx.Module):
    """The weights of a convolution of each channel over its latest inputs, of which a state keeps all but the newest.

    Args:
        rows: Channels of its module in checkpoints, whose weight is ``[channels, 1, taps]``.
        taps: Inputs that an output depends on.
        has_bias: Whether it has a bias.
        scope: Scope that the module's name is relative to.
        mesh_axis: Mesh axis that channels are split over; None for none.
    """

    def __init__(self, rows: Sequence[Rows], taps: int, *, has_bias: bool, scope: Scope, mesh_axis: str | None):
        scope = scope.over(mesh_axis)
        flat = stack_rows(scope, rows, "weight", taps)
        pieces = tuple(
            Piece(each.source, (each.source_start[0], 0, 0), (each.target_start[0], 0, 0), (each.shape[0], 1, taps))
            for each in flat.pieces
        )
        sources = tuple((name, (shape[0], 1, taps)) for name, shape in flat.sources)
        recipe = TensorRecipe((flat.shape[0], 1, taps), pieces, sources)
        value = jnp.zeros(recipe.shape, jnp.float32)
        self.weight: nnx.Param[Any] = nnx.Param(value, axes=("q_heads", None, None), recipe=recipe)
        self.bias = head_vector(rows, scope, "bias") if has_bias else None
        num_local = flat.shape[0] // scope.parallel.size
        self.tail = StateArray((taps - 1, num_local), "float32", split=1, parts=_ranges(flat))

    @property
    def arrays(self) -> Convolution:
        """The weights as kernels take them."""
        return Convolution(self.weight[...][:, 0].T, None if self.bias is None else self.bias[...])


def _ranges(rows: TensorRecipe) -> tuple[range, ...]:
    """Return the rows of a recipe, in order, as ranges of all rows of its sources one after the other."""
    counts = (shape[0] for _, shape in rows.sources)
    firsts = dict(zip((name for name, _ in rows.sources), itertools.accumulate(counts, initial=0), strict=False))
    pieces = sorted(rows.pieces, key=lambda piece: piece.target_start[0])
    starts = [(firsts[piece.source] + piece.source_start[0], piece.shape[0]) for piece in pieces]
    return tuple(range(start, start + count) for start, count in starts)


def head_vector(rows: Sequence[Rows], scope: Scope, tensor: str, fill: float = 0.0) -> nnx.Param[Any]:
    """Return a float32 vector with an element per head, or with those of each head; ``scope`` is that of its axis."""
    return vector(stack_rows(scope, rows, tensor), "q_heads", scope, fill=fill, dtype="float32")
