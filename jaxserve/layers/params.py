"""Parameters, declared once by the layer that uses them: axes, place in checkpoints, and how they are stored.

Everything else that is known of a parameter (its shape, sharding and memory, how it is loaded and packed) is derived
from the declaration, by a walk over a module without values; see :mod:`jaxserve.models.abstract`.

A parameter's *global* array is cut into equal parts along its sharded axis, one a device. Where several projections
share one matrix (query, key and value; gate and up), its rows are therefore ordered by device first: each device's
part holds its own query heads, then its key heads, then its value heads. Key/value heads are repeated where there
are fewer than devices. Weights stay ``[out, in]``, as Hugging Face stores them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from checkpoints import Piece, TensorRecipe
from jaxserve.errors import ConfigError
from jaxserve.layers.parallel import Scope
from jaxserve.layers.storage import Weight, load_method


class Rows(NamedTuple):
    """Rows of a checkpoint's module that devices share, in whole units.

    Of n devices, each has ``max(1, units // n)`` units in order; with fewer units than devices, several have the same.

    Attributes:
        module: Its name in checkpoints, inside the scope of the layer that uses it; empty for the scope's own.
        num_rows: Number of them.
        unit: Rows that stay together, such as a head's.
        start: First of the rows in the module.
        total: Rows of the whole module; None: ``num_rows``.
    """

    module: str
    num_rows: int
    unit: int = 1
    start: int = 0
    total: int | None = None


class Split(NamedTuple):
    """Equal units of a layer that devices share.

    Attributes:
        num_units: Number of them.
        text: The number and what it counts, for messages.
        may_repeat: Whether more devices than units may hold copies.
    """

    num_units: int
    text: str
    may_repeat: bool = False

    def fits(self, size: int) -> bool:
        """Return whether ``size`` devices can share the units."""
        return size >= 1 and (self.num_units % size == 0 or (self.may_repeat and size % self.num_units == 0))


def rows_of(modules: Sequence[str], counts: Sequence[int], units: Sequence[int]) -> list[Rows]:
    """Return the rows of projections: each in a module of its own, or all in one, in order.

    Args:
        modules: As many modules as projections, or one that holds all.
        counts: Rows of each projection.
        units: Rows that stay together in each.
    """
    if len(modules) == len(counts):
        return [Rows(*each) for each in zip(modules, counts, units, strict=True)]
    (module,) = modules
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [Rows(module, *each, sum(counts)) for each in zip(counts, units, starts, strict=True)]


def stack_rows(scope: Scope, rows: Sequence[Rows], tensor: str, width: int | None = None) -> TensorRecipe:
    """Return how rows of several modules make one array, ordered by device.

    Args:
        scope: Of the layer.
        rows: Of each module.
        tensor: The modules' tensor, such as ``weight``.
        width: Features of a row; None for vectors.

    Raises:
        ConfigError: The devices cannot share the rows equally.
    """
    trailing = () if width is None else (width,)
    origin = (0,) * len(trailing)
    size = scope.parallel.size
    pieces: list[Piece] = []
    target = 0
    for device in range(size):
        for each in rows:
            units = each.num_rows // each.unit
            if units % size and size % units:
                raise ConfigError(f"{scope.at(each.module).module}: {size} devices cannot share {units} parts")
            count = max(1, units // size) * each.unit
            start = each.start + device * units // size * each.unit
            name = scope.at(each.module).at(tensor).module
            pieces.append(Piece(name, (start, *origin), (target, *origin), (count, *trailing)))
            target += count
    sources = {scope.at(each.module).at(tensor).module: (each.total or each.num_rows, *trailing) for each in rows}
    return TensorRecipe((target, *trailing), tuple(pieces), tuple(sources.items()))


def padded_rows(scope: Scope, tensor: str, count: int, width: int) -> TensorRecipe:
    """Return a tensor [count, width], padded with zero rows to a multiple of the number of devices."""
    size = scope.parallel.size
    name = scope.at(tensor).module
    padded = -(-count // size) * size
    return TensorRecipe((padded, width), (Piece(name, (0, 0), (0, 0), (count, width)),), ((name, (count, width)),))


def vector(recipe: TensorRecipe, axis: str, scope: Scope, fill: float = 0.0) -> nnx.Param[Any]:
    """Return a parameter that is kept as it is, such as a bias; without a checkpoint it is ``fill``.

    Args:
        recipe: Where its elements come from.
        axis: Its logical axis.
        scope: Of its layer.
        fill: Its value before it is loaded.
    """
    return nnx.Param(jnp.full(recipe.shape, fill, scope.policy.weights), axes=(axis,), recipe=recipe)


def weight(
    recipe: TensorRecipe, axes: tuple[str, str], parts: tuple[int, int], scope: Scope, is_gated: bool = False
) -> nnx.Param[Any]:
    """Return a weight [out, in] that is multiplied with, kept by the scope's storage method; zeros before it is loaded.

    Args:
        recipe: Where its rows come from.
        axes: Logical axes of outputs and features.
        parts: Devices that each of them is split over.
        scope: Of its layer.
        is_gated: Whether it is multiplied with an activation.

    Returns:
        The parameter: its value is the method's array, or all of them by name; ``storage.matmul`` multiplies with it.
    """
    outer, inner = recipe.shape
    policy = scope.policy
    what = Weight(outer, inner, axes, parts, policy.weights, policy.linear, policy.storage, is_gated)
    arrays = load_method(policy.storage).arrays(what)
    value = {name: jnp.zeros(array.shape, array.dtype) for name, array in arrays.items()}
    only = value["weight"] if list(value) == ["weight"] else value
    return nnx.Param(only, axes=axes, recipe=recipe, weight=what)
