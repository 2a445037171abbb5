"""The collectives of a step, counted in its jaxpr.

The embedding, one layer of each kind, and the head with the sampler are traced one by one, and their collectives
combined: a step of a hundred equal layers is traced as fast as one of two.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.device.handed_over import abstract_hidden
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape, StepBatch
from jaxserve.device.step_state import StepState
from jaxserve.device.steps import attention_settings, sample_rows
from jaxserve.layers.attention import AttentionSettings
from jaxserve.layers.kv_layout import attended
from jaxserve.layers.residual import own_rows, whole_rows
from jaxserve.models.causal_lm import CausalLM, TokenBatch
from jaxserve.models.drafters.dflash import BlockBatch, DFlashHead
from jaxserve.models.drafters.draft_head import ChainHead
from jaxserve.models.stages import StageLayers
from pallas_kernels.registry import load
from sharding.plan import Collective, collectives

EMBEDDING, LAYERS, HEAD, HAND_OVER = PARTS = ("embedding", "layers", "head and sampling", "hand-over")
_DRAFTING = "drafting"


class PartCollectives(NamedTuple):
    """Collectives of a part of the model: those of ``PARTS``, the layers by their kind.

    Attributes:
        part: One of ``PARTS``.
        layer: Index of the first layer of the kind; None for other parts.
        found: The collectives of one such layer, or of the part.
    """

    part: str
    layer: int | None
    found: tuple[Collective, ...]


class StepCollectives:
    """Counts the collectives of steps of one model in one layout, tracing each part once per batch shape.

    Args:
        sharded: The whole model, or any of its stages.
    """

    def __init__(self, sharded: ShardedModel):
        # Collectives do not depend on how a device attends, and XLA's attention is traced on any machine.
        (operation,) = {spec.operation for spec in attended(sharded.abstract_model.kv_specs)}
        self._whole = dataclasses.replace(sharded, stage=None, kernel=load(operation, "xla"))
        self._models: dict[int, ShardedModel] = {}
        self._parts: dict[tuple[str, int, BatchShape], PartCollectives] = {}

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each layer, the first layer of the same kind: with arrays of the same names, shapes and shardings."""
        arrays = collections.defaultdict[int, list[Any]](list)
        for path, struct in self._whole.abstract_model.params.items():
            top, index, *rest = path.split(".", 2)
            if top == "layers":
                arrays[int(index)].append((*rest, struct.shape, struct.dtype, struct.sharding))
        first: dict[Any, int] = {}
        return tuple(first.setdefault(tuple(arrays[layer]), layer) for layer in sorted(arrays))

    def count(self, shape: BatchShape, layers: range) -> list[PartCollectives]:
        """Return the collectives of a step through some layers, in order.

        Args:
            shape: Batch shape of the step.
            layers: The layers of a stage, with the embedding if it is the first, and the head if it is the last.
        """
        num_layers = len(self.kinds)
        found = [self._part(EMBEDDING, 0, shape)] if layers.start == 0 else []
        found += [self._part(LAYERS, self.kinds[layer], shape) for layer in layers]
        return [*found, self._part(HEAD if layers.stop == num_layers else HAND_OVER, num_layers - 1, shape)]

    def _part(self, part: str, layer: int, shape: BatchShape) -> PartCollectives:
        key = part, layer, shape
        if key not in self._parts:
            traced = _trace(part, self._layer_model(layer).for_shape(shape), shape)
            found = tuple(collectives(traced.jaxpr.jaxpr, is_likely=True))
            self._parts[key] = PartCollectives(part, layer if part == LAYERS else None, found)
        return self._parts[key]

    def _layer_model(self, layer: int) -> ShardedModel:
        if layer not in self._models:
            stage = StageLayers(layer, layer + 1, len(self.kinds)) if len(self.kinds) > 1 else None
            self._models[layer] = dataclasses.replace(self._whole, stage=stage)
        return self._models[layer]


def drafter_collectives(last: ShardedModel, shape: BatchShape) -> list[PartCollectives]:
    """Return the collectives of a pass of a model's drafter.

    Args:
        last: The last stage of the model.
        shape: Tokens and rows of the pass.
    """
    assert last.drafter is not None
    sharded = last.drafter.sharded
    if sharded.head is None:
        own = dataclasses.replace(shape, num_tables=1, num_arguments=0)
        return StepCollectives(sharded).count(own, sharded.layers)
    if last.mesh.devices.size == 1:
        return []
    traced = _trace_head(last, shape)
    return [PartCollectives(_DRAFTING, None, tuple(collectives(traced.jaxpr.jaxpr, is_likely=True)))]


def _trace_head(last: ShardedModel, shape: BatchShape) -> jax.stages.Traced:
    """Trace a pass of a draft head."""
    assert last.drafter is not None
    (operation,) = {spec.operation for spec in attended(last.drafter.sharded.abstract_model.kv_specs)}
    own = dataclasses.replace(last.drafter.sharded, kernel=load(operation, "xla"))
    drafter = last.drafter._replace(sharded=own)
    sharded = dataclasses.replace(last.with_whole_rows, kernel=own.kernel, drafter=drafter)

    def traced(arrays: tuple[Array, ...], state: StepState, buffer: Int[Array, " size"], x: Float[Array, "T D"]) -> Any:
        batch, target = sharded.unpack(buffer, shape, state.latest), sharded.model(arrays)
        tokens = TokenBatch(batch.tokens, batch.positions, batch.lengths, (batch.attention[drafter.table],))
        head = own.draft_head(arrays[-len(own.abstract_params) :])
        pools = state.pools[len(sharded.own_pools()) :]
        settings = attention_settings(sharded, shape)
        settings = dataclasses.replace(settings, layer_indices=own.kv_layout.layer_indices)
        embedded = head.embedded(target, tokens.tokens)
        if isinstance(head, DFlashHead):
            found, _ = head.hidden(embedded, x, _block_of(tokens), pools, settings)
        else:
            assert isinstance(head, ChainHead)
            found = head.hidden(embedded, x, tokens, pools, settings).x
        return head.logits(target, found[batch.sampled_tokens])

    buffer = sharded.rows_struct((shape.buffer_size,), jnp.int32)
    x = sharded.rows_struct((shape.num_tokens, own.config.hidden_size), own.policy.activations_dtype)
    return sharded.trace(traced, (sharded.program_params, sharded.abstract_state(), buffer, x))


def _block_of(batch: TokenBatch) -> BlockBatch:
    """Return the tokens of a batch as those of blocks, after contexts of as many."""
    (attention,) = batch.attention
    both = {name: jnp.tile(getattr(attention, name), 2) for name in ("token_pages", "token_offsets")}
    num_tokens = attention.query_lens.sum()
    positions, lengths = jnp.tile(batch.positions, 2), jnp.tile(batch.lengths, 2)
    return BlockBatch(positions, lengths, num_tokens, num_tokens, attention._replace(**both))


class _Step(NamedTuple):
    """What the parts of a traced step share."""

    sharded: ShardedModel
    model: CausalLM
    batch: StepBatch
    state: StepState
    settings: AttentionSettings


def _embed(step: _Step, x: Float[Array, "T D"]) -> Any:
    return step.model.embedded(step.batch, step.settings)[0]


def _run_layer(step: _Step, x: Float[Array, "T D"]) -> Any:
    own, inputs = step.model.embedded(step.batch, step.settings, _own(step, x))
    return step.model.through(own, step.state.pools, inputs, step.settings).x


def _hand_over(step: _Step, x: Float[Array, "T D"]) -> Any:
    return whole_rows(_own(step, x), step.model.residual_axis, step.sharded.row_tile)


def _sample(step: _Step, x: Float[Array, "T D"]) -> Any:
    sharded, batch, rows = step.sharded, step.batch, _hand_over(step, x)[step.batch.sampled_tokens]
    mask = jnp.zeros(sharded.mask_shape(len(batch.sampled_tokens)), jnp.int32)
    settings, tile = sharded.sampler, sharded.row_tile
    return sample_rows(step.model.logits, rows, mask, step.state.tables, batch.sampler, "greedy", settings, tile)


def _own(step: _Step, x: Float[Array, "T D"]) -> Float[Array, "rows D"]:
    return own_rows(x, step.model.residual_axis, step.sharded.row_tile)


_FUNCTIONS: Mapping[str, Callable[[_Step, Float[Array, "T D"]], Any]] = {
    EMBEDDING: _embed,
    LAYERS: _run_layer,
    HEAD: _sample,
    HAND_OVER: _hand_over,
}


def _trace(part: str, sharded: ShardedModel, shape: BatchShape) -> jax.stages.Traced:
    def traced(arrays: tuple[Array, ...], state: StepState, buffer: Int[Array, " size"], x: Float[Array, "T D"]) -> Any:
        batch = sharded.unpack(buffer, shape, state.latest)
        step = _Step(sharded, sharded.model(arrays), batch, state, attention_settings(sharded, shape))
        return _FUNCTIONS[part](step, x)

    buffer, x = sharded.rows_struct((shape.buffer_size,), jnp.int32), abstract_hidden(sharded, shape.num_tokens)
    return sharded.trace(traced, (sharded.abstract_params, sharded.abstract_state(), buffer, x))
