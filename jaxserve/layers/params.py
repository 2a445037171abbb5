"""Parameters, declared once by the layer that uses them: logical axes, source in checkpoints, and storage.

Everything else about a parameter (shape, sharding, memory, loading, packing) is derived from the declaration, by a walk
over a module without values; see :mod:`jaxserve.models.abstract`.

A parameter's *global* array is cut into equal parts along its sharded axis, one per device. Where several projections
share one matrix (query, key and value; gate and up), its rows are therefore ordered by device first: each device's
part holds its own query heads, then its key heads, then its value heads. Key/value heads are repeated if there are
fewer than devices. Weights are ``[out, in]``, as Hugging Face stores most of them; others are transposed by the loader.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from checkpoints import Piece, TensorRecipe
from jaxserve.api.errors import ConfigError
from jaxserve.layers.parallel import Scope
from jaxserve.layers.quantized_storage import names_of, order_of
from jaxserve.layers.storage import Experts, Weight, load_method


class Rows(NamedTuple):
    """Rows of a checkpoint's module, split over devices in whole units unless ``is_whole``.

    Each of n devices has ``max(1, units // n)`` consecutive units; with fewer units than devices, several devices have
    the same unit.

    Attributes:
        module: Name in checkpoints, relative to the scope of the layer; empty for the scope itself.
        num_rows: Number of rows.
        unit: Rows that stay together, such as a head's.
        start: Index of the first row in the module.
        total: Rows of the whole module; None: ``num_rows``.
        stride: Rows from one unit to the next, where each unit has rows of other projections beside it; None: ``unit``.
        expert: Index of an expert, and the number of experts, where one tensor has the rows of all experts; None where
            the tensor has these rows only.
        is_transposed: Whether checkpoints have these rows as columns, with weights ``[in, out]``.
        is_whole: Whether every device has all units.
    """

    module: str
    num_rows: int
    unit: int = 1
    start: int = 0
    total: int | None = None
    stride: int | None = None
    expert: tuple[int, int] | None = None
    is_transposed: bool = False
    is_whole: bool = False


class Split(NamedTuple):
    """A requirement that devices share equal units of a layer.

    Attributes:
        num_units: Number of units.
        text: Number and name of the units, for messages.
        may_repeat: Whether more devices than units may hold copies.
        is_experts: Whether the devices along the axis of the experts share them, rather than the tensor axis.
    """

    num_units: int
    text: str
    may_repeat: bool = False
    is_experts: bool = False

    def fits(self, size: int) -> bool:
        """Return whether ``size`` devices can share the units."""
        return size >= 1 and (self.num_units % size == 0 or (self.may_repeat and size % self.num_units == 0))


def rows_of(modules: Sequence[str], counts: Sequence[int], units: Sequence[int]) -> list[Rows]:
    """Return the rows of projections: each in its own module, or all in one module, in order.

    Args:
        modules: One module per projection, or one that holds all.
        counts: Rows of each projection.
        units: Rows that stay together in each.
    """
    if len(modules) == len(counts):
        return [Rows(*each) for each in zip(modules, counts, units, strict=True)]
    (module,) = modules
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [Rows(module, *each, sum(counts)) for each in zip(counts, units, starts, strict=True)]


def stack_rows(
    scope: Scope, rows: Sequence[Rows], tensor: str, width: int | None = None, num_groups: int = 1
) -> TensorRecipe:
    """Return the recipe of an array of rows of several modules, ordered by device.

    Args:
        scope: Scope of the layer.
        rows: Rows of each module.
        tensor: Name of the modules' tensor, such as ``weight``.
        width: Features per row; None for vectors.
        num_groups: Groups of devices that first share the modules, in order; the devices of a group share the rows.

    Raises:
        ConfigError: The devices cannot share the rows equally.
    """
    trailing = () if width is None else (width,)
    origin = (0,) * len(trailing)
    size = scope.parallel.size
    names = [scope.at(each.module).at(tensor).module for each in rows]
    pieces: list[Piece] = []
    target = 0
    num_modules = len(rows) // num_groups
    for group, device in itertools.product(range(num_groups), range(size)):
        part = slice(group * num_modules, (group + 1) * num_modules)
        for each, name in zip(rows[part], names[part], strict=True):
            units, parts = each.num_rows // each.unit, 1 if each.is_whole else size
            if units % parts and parts % units:
                raise ConfigError(f"{scope.at(each.module).module}: {units} units cannot be split over {size} devices")
            num_local, first = max(1, units // parts), 0 if each.is_whole else device * units // size
            stride, together = (each.unit, num_local) if each.stride is None else (each.stride, 1)
            index = each.expert[:1] if each.expert else ()
            for unit in range(first, first + num_local, together):
                start, count = each.start + unit * stride, together * each.unit
                is_transposed = each.is_transposed and width is not None
                source = (*origin, start) if is_transposed else (start, *origin)
                pieces.append(Piece(name, (*index, *source), (target, *origin), (count, *trailing), is_transposed))
                target += count
    sources = {name: _source_shape(each, trailing) for each, name in zip(rows, names, strict=True)}
    return TensorRecipe((target, *trailing), tuple(pieces), tuple(sources.items()))


def _source_shape(rows: Rows, trailing: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor that rows of ``trailing`` elements are part of."""
    shape = (rows.total or rows.num_rows, *trailing)
    return (*(rows.expert[1:] if rows.expert else ()), *(shape[::-1] if rows.is_transposed else shape))


def padded_rows(scope: Scope, tensor: str, count: int, padded: int, width: int) -> TensorRecipe:
    """Return a tensor [count, width], padded with zero rows to ``padded`` of them."""
    name = scope.at(tensor).module
    return TensorRecipe((padded, width), (Piece(name, (0, 0), (0, 0), (count, width)),), ((name, (count, width)),))


def padded_vector(scope: Scope, tensor: str, count: int, padded: int) -> TensorRecipe:
    """Return a tensor [count], padded with zeros to ``padded`` of them."""
    name = scope.at(tensor).module
    return TensorRecipe((padded,), (Piece(name, (0,), (0,), (count,)),), ((name, (count,)),))


def vector(
    recipe: TensorRecipe, axis: str, scope: Scope, fill: float = 0.0, dtype: str | None = None
) -> nnx.Param[Any]:
    """Return a parameter that is stored as it is, such as a bias; without a checkpoint its value is ``fill``.

    Args:
        recipe: Source of its elements.
        axis: Its logical axis.
        scope: Scope of its layer.
        fill: Its value before it is loaded.
        dtype: Its element type; None for that of the weights.
    """
    return nnx.Param(jnp.full(recipe.shape, fill, dtype or scope.policy.weights), axes=(axis,), recipe=recipe)


def matrix(
    recipe: TensorRecipe, axes: tuple[str | None, str | None], scope: Scope, outputs_per_token: int
) -> nnx.Param[Any]:
    """Return a matrix that is stored as it is, for einsums that ``storage.matmul`` does not compute.

    Args:
        recipe: Source of its elements.
        axes: Its logical axes.
        scope: Scope of its layer.
        outputs_per_token: Elements that one device computes with it for a token, for the memory plan.
    """
    value = jnp.zeros(recipe.shape, scope.policy.weights)
    return nnx.Param(value, axes=axes, recipe=recipe, outputs_per_token=outputs_per_token)


def weight(
    recipe: TensorRecipe,
    axes: tuple[str | None, str | None],
    parts: tuple[int, int],
    scope: Scope,
    is_gated: bool = False,
) -> nnx.Param[Any]:
    """Return a matmul weight [out, in], stored by the scope's storage method; zeros before it is loaded.

    Args:
        recipe: Source of its rows.
        axes: Logical axes of outputs and input features.
        parts: Number of devices that each of them is split over.
        scope: Scope of its layer.
        is_gated: Whether the matmul is followed by gating with an activation.

    Returns:
        The parameter: its value is the method's array, or all its arrays by name; use it with ``storage.matmul``.
    """
    outer, inner = recipe.shape
    policy = scope.policy
    what = Weight(outer, inner, axes, parts, policy.weights, policy.linear, policy.storage, is_gated)
    return _stored(what, recipe, axes, scope)


def expert_weights(
    recipe: TensorRecipe,
    axes: tuple[str, str],
    parts: tuple[int, int],
    scope: Scope,
    *,
    num_experts: int,
    experts_per_token: int,
    is_gated: bool = False,
) -> nnx.Param[Any]:
    """Return the matrices [out, in] of all experts, one array; use them with ``storage.grouped_matmul``.

    Args:
        recipe: Source of their rows [experts * out, in], ordered by device, then by expert.
        axes: Logical axes of outputs and input features.
        parts: Number of devices that each of them is split over.
        scope: Scope of the layer.
        num_experts: Number of experts on all devices.
        experts_per_token: Experts that compute each token.
        is_gated: As in :func:`weight`.
    """
    rows, inner = recipe.shape
    policy = scope.policy
    what = Weight(
        rows // num_experts,
        inner,
        axes,
        parts,
        policy.weights,
        policy.grouped,
        policy.storage,
        is_gated,
        Experts(num_experts, experts_per_token),
    )
    return _stored(what, recipe, (("experts", axes[0]), axes[1]), scope)


def _stored(
    what: Weight, recipe: TensorRecipe, axes: tuple[str | tuple[str, str] | None, str | None], scope: Scope
) -> nnx.Param[Any]:
    """Return a parameter of zeros in the arrays of its storage method; ``axes`` are those of the recipe's array."""
    sources, policy = recipe.sources, scope.policy
    rows, orders = policy.forms.find(recipe, what.parts), ()
    is_one = rows is not None and len(rows.segments) == 1 and not rows.segments[0].num_sorted
    if rows is not None and (what.experts is None or is_one):
        recipe, segments = rows.recipe, rows.segments
        orders = tuple(
            None if records.groups is None else (order_of(name), records)
            for name, records in zip(names_of(segments), rows.records, strict=True)
        )
        if what.experts is not None:
            segments = (segments[0]._replace(num_outputs=what.local[0]),)
        what = dataclasses.replace(what, dtype="uint8", kernel=policy.quantized, method="quantized", segments=segments)
    arrays = load_method(what.method).arrays(what)
    value = {name: jnp.zeros(array.shape, array.dtype) for name, array in arrays.items()}
    only = value["weight"] if list(value) == ["weight"] else value
    return nnx.Param(only, axes=axes, recipe=recipe, sources=sources, weight=what, orders=orders)
