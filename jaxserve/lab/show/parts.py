"""Where each weight and each KV page of a model is: its shape, the mesh axes that split it, and each device's part."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import NamedSharding

from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape
from jaxserve.lab.show.flow import Flow, FlowStep, trace_flow
from jaxserve.lab.show.program import MeshModel, only_layer
from jaxserve.layers.kv_layout import KVSpec
from jaxserve.layers.parallel import Scope
from jaxserve.models.abstract import LogicalParam, outline


class ShownArray(NamedTuple):
    """A weight.

    Attributes:
        name: Its path in the model or, for one of several equal layers, in the layer.
        shape: Its whole shape.
        dtype: Its element type.
        splits: For each dimension, the mesh axes that split it, the first of them first.
        part: Shape of a device's part.
        num_experts: Number of experts whose matrices it holds; 0 for a weight of no expert.
        experts_axis: Mesh axis that splits those experts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    splits: tuple[tuple[str, ...], ...]
    part: tuple[int, ...]
    num_experts: int = 0
    experts_axis: str | None = None

    @property
    def part_bytes(self) -> int:
        """Bytes on each device."""
        return int(np.prod(self.part)) * np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class ShownPages(NamedTuple):
    """The KV cache of a layer.

    Attributes:
        content: ``keys and values``, or ``latents``; for a layer without them what it keeps instead.
        num_heads: Key/value heads of the model; 0 for a layer without keys and values.
        head_dim: Elements of a head, or of a latent.
        dtype: Element type.
        window: Number of latest tokens that are kept; None for all.
        heads_axis: Mesh axis that splits the heads.
        tokens_axis: Mesh axis that splits the tokens of each page.
        pages_axis: Mesh axis whose devices have pages of their own requests, besides ``data``.
        heads: Heads of each device along ``heads_axis``; a single entry if it is None.
        token_bytes: Bytes per token on each device; with ``tokens_axis``, on average.
        reads: Index of the layer whose keys and values it reads, having none of its own; None for its own.
    """

    content: str
    num_heads: int
    head_dim: int
    dtype: str
    window: int | None
    heads_axis: str | None
    tokens_axis: str | None
    pages_axis: str | None
    heads: tuple[tuple[int, ...], ...]
    token_bytes: float
    reads: int | None


class ShownLayers(NamedTuple):
    """Layers with equal weights, split in the same way.

    Attributes:
        layers: Their indices.
        weights: Their weights, in the order of use.
        pages: Their KV pages.
        decode: Order of a decode step.
        prefill: Order of a step with a prompt.
    """

    layers: tuple[int, ...]
    weights: tuple[ShownArray, ...]
    pages: ShownPages
    decode: tuple[FlowStep, ...]
    prefill: tuple[FlowStep, ...]


class ShownEnd(NamedTuple):
    """What precedes or follows the layers: weights in the order of use, and the order of decode and prefill steps."""

    weights: tuple[ShownArray, ...]
    decode: tuple[FlowStep, ...]
    prefill: tuple[FlowStep, ...]


class ModelParts(NamedTuple):
    """A model on a mesh.

    Attributes:
        before: The embedding, in the first stage.
        kinds: The layers, equal ones in one entry.
        after: Final norm and head, in the last stage.
    """

    before: ShownEnd
    kinds: tuple[ShownLayers, ...]
    after: ShownEnd


def place(split: MeshModel, decode: BatchShape, prefill: BatchShape) -> ModelParts:
    """Return where everything is, tracing one layer of each kind for two batch shapes."""
    whole, last = split.whole, split.whole.config.num_layers - 1
    equal = _equal_layers(whole)
    traced = {
        index: [trace_flow(only_layer(whole, index), shape) for shape in (decode, prefill)]
        for index in {0, last, *(indices[0] for indices in equal.values())}
    }
    kinds = [
        _layers(indices, arrays, _pages(whole, indices[0]), traced[indices[0]])
        for (arrays, *_), indices in equal.items()
    ]
    return ModelParts(
        _end(whole, [flow.before for flow in traced[0]]),
        tuple(kinds),
        _end(whole, [flow.after for flow in traced[last]]),
    )


def _equal_layers(whole: ShardedModel) -> dict[tuple[tuple[ShownArray, ...], KVSpec | None], list[int]]:
    """Return the indices of the layers of each kind: of equal weights and KV cache."""
    model = whole.abstract_model
    arrays: dict[int, list[ShownArray]] = {}
    for path, param in model.logical.items():
        match = re.match(r"layers\.(\d+)\.(.*)", path)
        if match is not None:
            arrays.setdefault(int(match[1]), []).append(_shown(match[2], param, whole))
    equal: dict[tuple[tuple[ShownArray, ...], KVSpec | None], list[int]] = {}
    for index in sorted(arrays):
        equal.setdefault((tuple(arrays[index]), model.kv_specs[index]), []).append(index)
    return equal


def _layers(
    indices: Sequence[int], arrays: Sequence[ShownArray], pages: ShownPages, flows: Sequence[Flow]
) -> ShownLayers:
    orders = [flow.layer for flow in flows]
    used = dict.fromkeys(name for order in orders for step in order for name in step.arrays)
    places = {name: place for place, name in enumerate(used)}
    weights = sorted(arrays, key=lambda array: places.get(array.name, len(places)))
    return ShownLayers(tuple(indices), tuple(weights), pages, *orders)


def _end(whole: ShardedModel, orders: Sequence[Sequence[FlowStep]]) -> ShownEnd:
    logical = whole.abstract_model.logical
    used = dict.fromkeys(name for order in orders for step in order for name in step.arrays if name in logical)
    return ShownEnd(tuple(_shown(name, logical[name], whole) for name in used), *map(tuple, orders))


def _shown(name: str, param: LogicalParam, sharded: ShardedModel) -> ShownArray:
    struct, stored = param.struct, param.stored
    sharding = struct.sharding
    assert isinstance(sharding, NamedSharding), sharding
    entries = [*sharding.spec, *[None] * (len(struct.shape) - len(sharding.spec))]
    splits = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries)
    part = sharding.shard_shape(struct.shape)
    found = ShownArray(name, struct.shape, str(struct.dtype), splits, part)
    if stored is None or stored.experts is None:
        return found
    return found._replace(num_experts=stored.experts.num_experts, experts_axis=sharded.layout.mesh_axis("experts"))


def _pages(sharded: ShardedModel, layer: int) -> ShownPages:
    """Return the KV cache of a layer."""
    spec, unsplit = sharded.abstract_model.kv_specs[layer], outline(sharded.config, Scope()).kv_specs[layer]
    if spec is None or unsplit is None:
        content = "a state of each sequence" if sharded.abstract_model.state_specs[layer] else "nothing"
        return ShownPages(content, 0, 0, "float32", None, None, None, None, ((),), 0.0, None)
    pools = sharded.abstract_pools(spec.pool)
    own = [pool.sharding.shard_shape(pool.shape) for pool in pools]
    page_bytes = sum(int(np.prod(shape[1:])) * pool.dtype.itemsize for pool, shape in zip(pools, own, strict=True))
    is_latent = spec.value_dim is not None
    axis = None if is_latent else sharded.layout.mesh_axis("kv_heads")
    size, total = sharded.parallel.parts(axis), unsplit.num_kv_heads
    firsts = [device * total // size for device in range(size)]
    return ShownPages(
        "latents" if is_latent else "keys and values",
        total,
        spec.head_dim,
        spec.dtype,
        spec.window,
        axis,
        sharded.layout.mesh_axis("tokens"),
        sharded.layout.mesh_axis("pages"),
        tuple(tuple(range(first, first + spec.num_kv_heads)) for first in firsts),
        page_bytes / sharded.page_size if spec.reads is None else 0.0,
        spec.reads,
    )
