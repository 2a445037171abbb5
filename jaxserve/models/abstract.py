"""A model without values, from which loading, sharding, memory and packing are derived."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx

from checkpoints import Listing, TensorRecipe
from jaxserve.api.errors import ConfigError
from jaxserve.layers.kv_layout import KVSpec
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Parallel, Scope
from jaxserve.layers.params import Split
from jaxserve.layers.storage import Weight, load_method
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.registry import build_model
from jaxserve.models.stages import StageLayers

ShardingOf = Callable[[tuple[str | tuple[str, ...] | None, ...]], jax.sharding.Sharding]
"""Returns the sharding of an array with the given logical axes."""

_MAX_TENSOR_SIZE = 64


class LogicalParam(NamedTuple):
    """A parameter as it is in checkpoints.

    Attributes:
        recipe: Source of its elements.
        struct: Shape, dtype and sharding.
        arrays: Paths of the arrays that store it.
        stored: How a storage method stores it; None: unchanged.
        order: Indices of the rows of each device's part in the order in which it stores them; None: as they are.
    """

    recipe: TensorRecipe
    struct: jax.ShapeDtypeStruct
    arrays: tuple[str, ...]
    stored: Weight | None
    order: tuple[int, ...] | None = None

    def fill(self, part: np.ndarray) -> list[np.ndarray]:
        """Convert one device's part of the parameter to its part of each array."""
        if self.order is not None:
            part = part[np.array(self.order)]
        if self.stored is None:
            return [part]
        filled = load_method(self.stored.method).fill(self.stored, part)
        return [filled[name] for name in sorted(filled)]

    def restore(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Convert one device's part of each array back to its part of the parameter; may return the same memory."""
        if self.stored is None:
            (part,) = parts
        else:
            method = load_method(self.stored.method)
            names = sorted(method.arrays(self.stored))
            part = method.restore(self.stored, dict(zip(names, parts, strict=True)))
        return part if self.order is None else part[np.argsort(self.order)]


class AbstractModel(NamedTuple):
    """A module without values: a whole model, or one of its pipeline stages.

    Attributes:
        graphdef: Structure of the module.
        treedef: Structure of its state.
        params: Shape, dtype and sharding of each array by its path, in flat order.
        logical: Each parameter as it is in checkpoints, by its path.
        ignored: Regular expressions of full names of tensors that no parameter needs.
        names: Names of the tensors in each form in which checkpoints have them, by their names in the recipes.
        kv_specs: KV cache of each layer of the whole model.
        layer_width: Matmul outputs of the widest layer, in elements per token on one device.
        has_fused_norms: Whether kernels can fuse all norms of the whole model with the neighbouring matmuls.
    """

    graphdef: nnx.GraphDef
    treedef: Any
    params: dict[str, jax.ShapeDtypeStruct]
    logical: dict[str, LogicalParam]
    ignored: tuple[str, ...]
    names: tuple[Mapping[str, str], ...]
    kv_specs: tuple[KVSpec, ...]
    layer_width: int
    has_fused_norms: bool

    def merge(self, arrays: Any) -> CausalLM:
        """Return the module with these arrays, given in the order of ``params``."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, arrays))

    @property
    def recipes(self) -> dict[str, TensorRecipe]:
        """The source of each parameter, by its path."""
        return {path: param.recipe for path, param in self.logical.items()}

    @property
    def listings(self) -> list[Listing]:
        """Shape of each tensor by name, in each form in which checkpoints have them."""
        shapes = {name: shape for recipe in self.recipes.values() for name, shape in recipe.sources}
        return [{names.get(name, name): shape for name, shape in shapes.items()} for names in self.names]

    def recipes_for(self, tensors: Collection[str]) -> dict[str, TensorRecipe]:
        """Return the recipes in the names of a checkpoint with these tensors: the form of which the fewest are
        missing."""
        sources = {name for recipe in self.recipes.values() for name, _ in recipe.sources}

        def num_missing(names: Mapping[str, str]) -> int:
            return sum(names.get(name, name) not in tensors for name in sources)

        best = min(self.names, key=num_missing)
        if not best:
            return self.recipes
        return {path: recipe.renamed(lambda name: best.get(name, name)) for path, recipe in self.recipes.items()}


def _names(whole: CausalLM, logical: Mapping[str, LogicalParam]) -> tuple[Mapping[str, str], ...]:
    """Return the names that tensors have in each form of checkpoints, where they differ from the recipes'.

    A checkpoint whose head is the embedding may have the shared tensor under the head's name.
    """
    sources = [name for param in logical.values() for name, _ in param.recipe.sources]
    named = {source: whole.names_of(source) for source in sources}
    num_forms = len(whole.names_of(""))
    forms = [
        {source: names[form] for source, names in named.items() if names[form] != source} for form in range(num_forms)
    ]
    if whole.head is None and whole.config.has_head:
        assert whole.embed is not None
        recipe: TensorRecipe = whole.embed.weight.get_metadata()["recipe"]
        ((embedding, _),) = recipe.sources
        heads = [whole.names_of(head) for head in whole.head_names]
        forms += [{**forms[index], embedding: names[index]} for names in heads for index in range(num_forms)]
    return tuple(forms)


@functools.lru_cache(maxsize=8)
def outline(config: ModelConfig, scope: Scope) -> CausalLM:
    """Return the module without values; do not modify it."""
    return nnx.eval_shape(lambda: build_model(config, scope))


def abstract_model(
    config: ModelConfig, scope: Scope, sharding: ShardingOf, stage: StageLayers | None = None
) -> AbstractModel:
    """Return a model or one of its stages without values; ``sharding`` returns an array's sharding from its logical
    axes.

    Raises:
        ConfigError: The model cannot be split over that many devices.
    """
    check_tensor_size(config, scope.parallel)
    whole = outline(config, scope)
    module = nnx.clone(whole)
    if stage is not None:
        module.keep_stage(stage)
    params: dict[str, jax.ShapeDtypeStruct] = {}
    logical: dict[str, LogicalParam] = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        name = ".".join(map(str, path))
        arrays = _arrays(name, variable, sharding)
        params |= arrays
        logical[name] = _logical(variable, tuple(arrays), sharding)
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable):
            variable.del_metadata("recipe")  # equal layers are traced once, so nothing in them may differ
            if variable.has_metadata("order"):
                variable.del_metadata("order")
    graphdef, state = nnx.split(module)
    return AbstractModel(
        graphdef,
        jax.tree.structure(state),
        params,
        logical,
        module.ignored,
        _names(whole, logical),
        whole.kv_specs,
        max(_width(layer, scope.parallel) for layer in cast(Iterable[nnx.Module], module.layers)),
        whole.has_fused_norms,
    )


def check_tensor_size(config: ModelConfig, parallel: Parallel) -> None:
    """Raise ConfigError, listing the valid sizes, unless the model can be split as ``parallel`` says."""
    sizes = {"tensor_parallel_size": parallel.size, "expert_parallel_size": parallel.expert_size}
    for is_experts, (name, size) in enumerate(sizes.items()):
        splits = [] if size == 1 else [split for split in _splits(config, parallel) if split.is_experts == is_experts]
        if not all(split.fits(size) for split in splits):
            texts = [*dict.fromkeys(split.text for split in splits)]
            divided = " and ".join(part for part in (", ".join(texts[:-1]), texts[-1]) if part)
            fitting = (n for n in range(1, _MAX_TENSOR_SIZE + 1) if all(split.fits(n) for split in splits))
            valid = ", ".join(map(str, fitting))
            raise ConfigError(f"{name}={size} does not divide {divided} of {config.architecture}; valid sizes: {valid}")


def _splits(config: ModelConfig, parallel: Parallel) -> list[Split]:
    """Return the divisibility requirements of the layers, in their order."""
    whole = dataclasses.replace(parallel, size=1, expert_size=1)
    modules = nnx.iter_modules(outline(config, Scope(parallel=whole)))
    return list(dict.fromkeys(split for _, module in modules for split in getattr(module, "splits", ())))


def _arrays(name: str, variable: nnx.Variable[Any], sharding: ShardingOf) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a parameter by path, in flat order."""
    metadata, value = variable.get_metadata(), variable.get_value()
    if "weight" not in metadata:
        return {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding(metadata["axes"]))}
    weight = metadata["weight"]
    stored = load_method(weight.method).arrays(weight)
    return {
        f"{name}.{part}" if isinstance(value, Mapping) else name: jax.ShapeDtypeStruct(
            array.shape, np.dtype(array.dtype), sharding=sharding(array.axes)
        )
        for part, array in sorted(stored.items())
    }


def _logical(variable: nnx.Variable[Any], arrays: tuple[str, ...], sharding: ShardingOf) -> LogicalParam:
    """Return a parameter as it is in checkpoints."""
    metadata = variable.get_metadata()
    weight: Weight | None = metadata.get("weight")
    recipe: TensorRecipe = metadata["recipe"]
    dtype = np.dtype(variable.get_value().dtype if weight is None else weight.dtype)
    struct = jax.ShapeDtypeStruct(recipe.shape, dtype, sharding=sharding(metadata["axes"]))
    return LogicalParam(recipe, struct, arrays, weight, metadata.get("order"))


def _width(layer: nnx.Module, parallel: Parallel) -> int:
    """Return the matmul outputs of a layer, in elements per token on one device, whose experts have the rows of all."""
    total = 0
    for _, variable in nnx.to_flat_state(nnx.state(layer)):
        metadata = variable.get_metadata()
        weight: Weight | None = metadata.get("weight")
        if weight is None:
            total += metadata.get("outputs_per_token", 0)
        else:
            total += weight.outputs_per_token * (1 if weight.experts is None else parallel.num_row_parts)
    return total
