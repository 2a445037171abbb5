"""A model without values, from which loading, sharding, memory and packing are derived."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx

from checkpoints import Bounds, Listing, TensorRecipe
from checkpoints.quantized.records import Kept, Records
from jaxserve.api.errors import ConfigError
from jaxserve.layers.kv_layout import KVSpec, StateSpec
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Parallel, Scope
from jaxserve.layers.params import Split
from jaxserve.layers.storage import Weight, load_method
from jaxserve.layers.weight_forms import WeightForms
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.drafters.draft_head import DraftHead
from jaxserve.models.registry import build_model
from jaxserve.models.stages import StageLayers
from pallas_kernels.quantized import Form

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
        sources: Name and shape of each of its tensors as the model's family expects it; the recipe's own, unless it is
            read as rows of records.
        orders: For each segment of a quantized weight the array with the order of its features, and what the tensors
            hold that it is made of; None for one whose features are in order.
    """

    recipe: TensorRecipe
    struct: jax.ShapeDtypeStruct
    arrays: tuple[str, ...]
    stored: Weight | None
    order: tuple[int, ...] | None = None
    sources: tuple[tuple[str, tuple[int, ...]], ...] = ()
    orders: tuple[tuple[str, Records] | None, ...] = ()

    @property
    def span(self) -> int | None:
        """Features of a record; None for a parameter that is no quantized weight."""
        return self.stored.segments[0].form.span if self.stored is not None and self.stored.segments else None

    @property
    def forms(self) -> dict[str, Form]:
        """What the rows of records of each tensor of a quantized weight hold."""
        assert self.stored is not None, self.recipe
        return {name: self.stored.segments[number].form for name, number in self._segments.items()}

    @property
    def kept(self) -> dict[str, Kept]:
        """How each tensor of a quantized weight whose features are sorted is read."""
        assert self.stored is not None and self.span is not None, self.recipe
        found = {name: self.orders[number] for name, number in self._segments.items()}
        parts = self.stored.parts[1]
        return {name: Kept(order[1], self.span, parts) for name, order in found.items() if order is not None}

    @property
    def _segments(self) -> dict[str, int]:
        """The index of the segment that each tensor of a quantized weight is part of."""
        assert self.stored is not None, self.recipe
        num_local = self.recipe.shape[0] // self.stored.parts[0]
        ends = np.cumsum([segment.num_outputs for segment in self.stored.segments])
        if len(ends) == 1:
            return {name: 0 for name, _ in self.recipe.sources}
        return {
            piece.source: int(np.searchsorted(ends, piece.target_start[0] % num_local, "right"))
            for piece in self.recipe.pieces
        }

    def fill(self, part: np.ndarray, bounds: Bounds) -> list[np.ndarray]:
        """Convert one device's part of the parameter, which lies between bounds, to its part of each array."""
        if self.order is not None:
            part = part[np.array(self.order)]
        if self.stored is None:
            return [part]
        filled = load_method(self.stored.method).fill(self.stored, part)
        for order in self.orders:
            if order is not None and self.span is not None:
                name, records = order
                indices = records.order(self.span, self.stored.parts[1]).indices
                filled[name] = indices[bounds[1][0] * len(indices) // self.recipe.shape[1]]
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
    """A module without values: a whole model, one of its pipeline stages, or a draft head.

    Attributes:
        graphdef: Structure of the module.
        treedef: Structure of its state.
        params: Shape, dtype and sharding of each array by its path, in flat order.
        logical: Each parameter as it is in checkpoints, by its path.
        ignored: Regular expressions of full names of tensors that no parameter needs.
        names: Names of the tensors in each form in which checkpoints have them, by their names in the recipes.
        kv_specs: KV cache of each layer of the whole model; None for layers without one.
        state_specs: State of each layer of the whole model; empty for layers without one.
        layer_width: Matmul outputs of the widest layer, in elements per token on one device.
        has_fused_norms: Whether kernels can fuse all norms of the whole model with the neighbouring matmuls.
        forms: The weights that stay quantized.
    """

    graphdef: nnx.GraphDef
    treedef: Any
    params: dict[str, jax.ShapeDtypeStruct]
    logical: dict[str, LogicalParam]
    ignored: tuple[str, ...]
    names: tuple[Mapping[str, str], ...]
    kv_specs: tuple[KVSpec | None, ...]
    state_specs: tuple[StateSpec, ...]
    layer_width: int
    has_fused_norms: bool
    forms: WeightForms

    def merge(self, arrays: Any) -> CausalLM:
        """Return the model with these arrays, given in the order of ``params``."""
        return self.merge_module(arrays)

    def merge_module(self, arrays: Any) -> Any:
        """Return the module, of any class, with these arrays."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, arrays))

    @property
    def recipes(self) -> dict[str, TensorRecipe]:
        """The source of each parameter, by its path."""
        return {path: param.recipe for path, param in self.logical.items()}

    @property
    def listings(self) -> list[Listing]:
        """Shape of each tensor by name, in each form in which checkpoints have them."""
        shapes = {name: shape for param in self.logical.values() for name, shape in param.sources}
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


def _forms(module: CausalLM | DraftHead, logical: Mapping[str, LogicalParam]) -> list[Mapping[str, str]]:
    """Return the names that tensors have in each form of checkpoints, where they differ from the recipes'."""
    sources = [name for param in logical.values() for name, _ in param.recipe.sources]
    named = {source: module.names_of(source) for source in sources}
    return [
        {source: names[form] for source, names in named.items() if names[form] != source}
        for form in range(len(module.names_of("")))
    ]


def _names(whole: CausalLM, logical: Mapping[str, LogicalParam]) -> list[Mapping[str, str]]:
    """Return the same for a model.

    A checkpoint whose head is the embedding may have the shared tensor under the head's name.
    """
    forms = _forms(whole, logical)
    num_forms = len(forms)
    if whole.head is None and whole.config.has_head:
        assert whole.embed is not None
        recipe: TensorRecipe = whole.embed.weight.get_metadata()["recipe"]
        ((embedding, _),) = recipe.sources
        heads = [whole.names_of(head) for head in whole.head_names]
        forms += [{**forms[index], embedding: names[index]} for names in heads for index in range(num_forms)]
    return forms


@functools.lru_cache(maxsize=8)
def outline(config: ModelConfig, scope: Scope) -> CausalLM:
    """Return the module without values; do not modify it."""
    return nnx.eval_shape(lambda: build_model(config, scope))


def abstract_model(
    config: ModelConfig,
    scope: Scope,
    sharding: ShardingOf,
    stage: StageLayers | None = None,
    drafts: bool = False,
) -> AbstractModel:
    """Return a model or one of its stages without values.

    Args:
        config: The model.
        scope: Its scope.
        sharding: Returns an array's sharding from its logical axes.
        stage: The stage; None for the whole model.
        drafts: Whether its last stage drafts; see ``CausalLM.keep_stage``.

    Raises:
        ConfigError: The model cannot be split over that many devices.
    """
    check_tensor_size(config, scope.parallel)
    whole = outline(config, scope)
    module = nnx.clone(whole)
    if stage is not None:
        module.keep_stage(stage, drafts)
    return _abstract(module, whole, scope, sharding)


def abstract_head(build: Callable[[Scope], DraftHead], scope: Scope, sharding: ShardingOf) -> AbstractModel:
    """Return a draft head without values; ``build`` builds it in a scope. Its weights are split as the target's.

    Raises:
        ConfigError: It cannot be split over that many devices.
    """
    whole = dataclasses.replace(scope, parallel=dataclasses.replace(scope.parallel, size=1, expert_size=1))
    _check_splits(_splits(nnx.eval_shape(lambda: build(whole))), scope.parallel, "the draft head")
    head = nnx.eval_shape(lambda: build(scope))
    return _abstract(head, head, scope, sharding)


def _abstract(
    module: CausalLM | DraftHead, whole: CausalLM | DraftHead, scope: Scope, sharding: ShardingOf
) -> AbstractModel:
    """Return a module without values, which is part of ``whole``."""
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
            for name in ("order", "orders", "sources"):
                if variable.has_metadata(name):
                    variable.del_metadata(name)
    graphdef, state = nnx.split(module)
    return AbstractModel(
        graphdef,
        jax.tree.structure(state),
        params,
        logical,
        module.ignored,
        tuple(_names(whole, logical) if isinstance(whole, CausalLM) else _forms(whole, logical)),
        whole.kv_specs,
        whole.state_specs if isinstance(whole, CausalLM) else ((),) * len(whole.kv_specs),
        max(_width(layer, scope.parallel) for layer in cast(Iterable[nnx.Module], module.layers)),
        whole.has_fused_norms,
        scope.policy.forms,
    )


def check_tensor_size(config: ModelConfig, parallel: Parallel) -> None:
    """Raise ConfigError, listing the valid sizes, unless the model can be split as ``parallel`` says."""
    whole = dataclasses.replace(parallel, size=1, expert_size=1)
    _check_splits(_splits(outline(config, Scope(parallel=whole))), parallel, config.architecture)


def _check_splits(splits: Sequence[Split], parallel: Parallel, name_of_model: str) -> None:
    """Raise ConfigError, listing the valid sizes, unless devices can share units as ``parallel`` says."""
    sizes = {"tensor_parallel_size": parallel.size, "expert_parallel_size": parallel.expert_size}
    for is_experts, (name, size) in enumerate(sizes.items()):
        found = [] if size == 1 else [split for split in splits if split.is_experts == is_experts]
        if not all(split.fits(size) for split in found):
            texts = [*dict.fromkeys(split.text for split in found)]
            divided = " and ".join(part for part in (", ".join(texts[:-1]), texts[-1]) if part)
            fitting = (n for n in range(1, _MAX_TENSOR_SIZE + 1) if all(split.fits(n) for split in found))
            valid = ", ".join(map(str, fitting))
            raise ConfigError(f"{name}={size} does not divide {divided} of {name_of_model}; valid sizes: {valid}")


def _splits(module: nnx.Module) -> list[Split]:
    """Return the divisibility requirements of a module's layers, in their order."""
    modules = nnx.iter_modules(module)
    return list(dict.fromkeys(split for _, each in modules for split in getattr(each, "splits", ())))


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
    sources = metadata.get("sources", recipe.sources)
    orders = metadata.get("orders", ())
    return LogicalParam(recipe, struct, arrays, weight, metadata.get("order"), sources, orders)


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
