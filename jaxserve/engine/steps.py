"""The compiled step: tokens in, tokens out, in one program; the only place that puts the model into shard_map."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from jaxserve.engine.step_batch import BatchShape, StepBatch, unpack
from jaxserve.layers.attention import AttentionSettings
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel
from jaxserve.models.causal_lm import AbstractModel, CausalLM, abstract_model
from jaxserve.sampling.sampler import MAX_LOGPROBS, SamplerInputs, TokenLogprobs, sample, sample_any, token_logprobs
from pallas_kernels import PagedAttention
from sharding import ShardingLayout
from sharding.plan import bytes_per_device

_LOGPROB_TILE = 32  # prompt tokens whose logits exist at a time


class StepOutput(NamedTuple):
    """What a step gives.

    Attributes:
        tokens: The sampled token of each row.
        logprobs: Its logprobs, where the sampler computes any.
        prompt_logprobs: Those of the prompt tokens behind each query token; None unless the shape scores prompts.
    """

    tokens: Int[Array, " R"]
    logprobs: TokenLogprobs
    prompt_logprobs: TokenLogprobs | None


class StepState(NamedTuple):
    """What the device keeps between steps, given up to each step and got back: pools, and each slot's latest token."""

    pools: tuple[tuple[Array, Array], ...]
    latest: Int[Array, " slots"]


@dataclasses.dataclass(frozen=True)
class ModelProgram:
    """A model without its values, laid out on a mesh: all that lowering a step needs.

    Attributes:
        config: The model.
        mesh: One data slice.
        layout: Resolved on that mesh.
        policy: Element types.
        kernel: Implementation of paged attention.
        page_size: Tokens a page.
        num_pages: Usable pages.
        num_slots: Sequences that can run at once.
    """

    config: ModelConfig
    mesh: Mesh
    layout: ShardingLayout
    policy: DtypePolicy
    kernel: PagedAttention
    page_size: int
    num_pages: int
    num_slots: int

    @property
    def parallel(self) -> Parallel:
        """The layout from a module's point of view."""
        axis = self.layout.mesh_axis("q_heads")
        return Parallel.from_layout(self.layout, 1 if axis is None else self.mesh.shape[axis])

    @functools.cached_property
    def abstract_model(self) -> AbstractModel:
        """The module without values, made once: every step is traced from it."""
        return abstract_model(
            self.config, self.parallel, self.policy, lambda axes: self.layout.sharding(self.mesh, *axes)
        )

    def abstract_state(self) -> StepState:
        """Shapes and shardings of what the device keeps between steps."""
        size = self.parallel.size
        num_kv_heads = size * max(1, self.config.num_kv_heads // size)
        specs = self.kernel.pool_specs(self.num_pages, self.page_size, num_kv_heads, self.config.head_dim)
        pools = []
        for spec in specs:
            axes = ["kv_heads" if i == spec.heads_dimension else None for i in range(len(spec.shape))]
            sharding = self.layout.sharding(self.mesh, *axes)
            pools.append(jax.ShapeDtypeStruct(spec.shape, jnp.dtype(self.policy.kv), sharding=sharding))
        latest: Any = jax.ShapeDtypeStruct((self.num_slots,), jnp.int32, sharding=self.replicated)
        return StepState(((pools[0], pools[1]),) * self.config.num_layers, latest)

    def empty_state(self) -> StepState:
        """Empty pools and slots, made on the devices."""
        abstract = self.abstract_state()
        shardings = jax.tree.map(lambda struct: struct.sharding, abstract)

        def zeros() -> StepState:
            return jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), abstract)

        return jax.jit(zeros, out_shardings=shardings)()

    @property
    def pool_bytes(self) -> int:
        """Memory of the pages on each device, those that padding needs included."""
        pools = jax.tree.leaves(self.abstract_state().pools)
        return sum(bytes_per_device(pool.shape, pool.dtype.itemsize, pool.sharding) for pool in pools)

    @property
    def replicated(self) -> NamedSharding:
        """A whole copy on each device."""
        return self.layout.sharding(self.mesh)

    def mask_shape(self, num_rows: int) -> tuple[int, int]:
        """Shape of the vocabulary mask of a step: a bit for each token."""
        return num_rows, -(-self.config.vocab_size // 32)


def trace_step(program: ModelProgram, shape: BatchShape, variant: str) -> jax.stages.Traced:
    """Traces the step of a batch shape and sampler variant (one of ``sampler.VARIANTS``, or ``any``).

    The traced function takes (parameters, ``StepState``, buffer, vocabulary mask) and gives (``StepState``,
    ``StepOutput``); the state is donated.
    """
    graphdef, treedef, params = program.abstract_model
    settings = AttentionSettings(program.kernel, program.page_size, shape.decode_only)

    def body(
        arrays: tuple[Array, ...], state: StepState, buffer: Int[Array, " size"], mask: Int[Array, "R words"]
    ) -> tuple[StepState, StepOutput]:
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, arrays))
        return run_step(model, state, unpack(buffer, shape), mask, settings, variant, shape.scores_prompt)

    abstract_state = program.abstract_state()
    whole = program.replicated
    rows = (jax.ShapeDtypeStruct((shape.buffer_size,), jnp.int32, sharding=whole),)
    rows += (jax.ShapeDtypeStruct(program.mask_shape(shape.num_rows), jnp.int32, sharding=whole),)
    arguments = (tuple(params.values()), abstract_state, *rows)
    in_specs = jax.tree.map(lambda struct: struct.sharding.spec, arguments)
    sharded = jax.shard_map(
        body, mesh=program.mesh, in_specs=in_specs, out_specs=(in_specs[1], whole.spec), check_vma=False
    )
    return jax.jit(sharded, donate_argnums=1).trace(*arguments)


def run_step(
    model: CausalLM,
    state: StepState,
    batch: StepBatch,
    mask: Int[Array, "R words"],
    settings: AttentionSettings,
    variant: str,
    scores_prompt: bool,
) -> tuple[StepState, StepOutput]:
    """One step on one device of the mesh: embed, layers, head, sampler, and the slots' latest tokens."""
    num_rows = batch.slots.shape[0]
    known = batch.tokens[:num_rows]
    known = jnp.where(known < 0, state.latest.at[batch.slots].get(mode="clip"), known)
    tokens = jnp.concatenate([known, batch.tokens[num_rows:]])
    hidden, pools = model.hidden(tokens, batch.positions, batch.lengths, list(state.pools), batch.attention, settings)
    logits = model.logits(hidden[batch.sampled_tokens])
    inputs = SamplerInputs(
        batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds, batch.attention.context_lens
    )
    if variant == "any":
        sampled, logprobs = sample_any(logits, inputs, mask, batch.variant)
    else:
        sampled, logprobs = sample(logits, inputs, mask, variant)
    latest = state.latest.at[batch.sampled_slots].set(sampled, mode="drop")
    prompt = _prompt_logprobs(model, hidden, batch) if scores_prompt else None
    return StepState(tuple(pools), latest), StepOutput(sampled, logprobs, prompt)


def _prompt_logprobs(model: CausalLM, hidden: Float[Array, "T D"], batch: StepBatch) -> TokenLogprobs:
    """Logprobs of the prompt tokens behind each query token, a tile of logits at a time."""
    num_tokens = hidden.shape[0]
    tile = min(_LOGPROB_TILE, num_tokens)
    padding = -num_tokens % tile
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    targets = jnp.pad(jnp.maximum(batch.targets, 0), (0, padding))
    size = num_tokens + padding
    empty = TokenLogprobs(
        jnp.zeros(size),
        jnp.zeros(size, jnp.int32),
        jnp.zeros((size, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((size, MAX_LOGPROBS)),
    )

    def round_(i: Int[Array, ""], filled: TokenLogprobs) -> TokenLogprobs:
        logits = model.logits(lax.dynamic_slice_in_dim(hidden, i * tile, tile))
        found = token_logprobs(logits, lax.dynamic_slice_in_dim(targets, i * tile, tile))
        return jax.tree.map(lambda all_, some: lax.dynamic_update_slice_in_dim(all_, some, i * tile, 0), filled, found)

    filled = lax.fori_loop(0, -(-batch.num_target_tokens // tile), round_, empty)
    return jax.tree.map(lambda array: array[:num_tokens], filled)
