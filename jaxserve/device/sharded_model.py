"""A model sharded on a mesh, without its weights, and the state that devices keep between steps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from jaxserve.api.config_checks import LOGPROBS_MODES
from jaxserve.device.determinism import computes_rows_natively
from jaxserve.device.head_states import HeadStates
from jaxserve.device.packing import Packing
from jaxserve.device.state_structs import compile_zeros, state_structs, trace_sharded
from jaxserve.device.step_batch import BatchShape, LatestTokens, StepBatch, unpack
from jaxserve.device.step_state import StepState
from jaxserve.device.structs import structs_bytes
from jaxserve.layers.attention import AttentionKernel
from jaxserve.layers.kv_layout import KVLayout, PoolKind, StateSpec, lay_out_kv
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel, Scope
from jaxserve.models.abstract import AbstractModel, abstract_model
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.drafters.draft_head import DraftHead
from jaxserve.models.drafters.source import HeadSource
from jaxserve.models.stages import StageLayers
from jaxserve.sampling.logits_processors import LogitsProcessor, argument_names
from jaxserve.sampling.logprobs import MAX_LOGPROBS
from jaxserve.sampling.penalties import MAX_TRACKED, SlotTables
from jaxserve.sampling.sampler import SamplerSettings, select_truncation
from jaxserve.sampling.vocab_split import WHOLE, VocabSplit
from pallas_kernels.registry import load
from pallas_kernels.truncation import Truncation
from sharding import ShardingLayout

Struct = jax.ShapeDtypeStruct
_FEWEST_SPLIT_TOKENS = 4  # per device, in steps whose hidden states are split by tokens


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model sharded on a mesh, without its weights: everything needed to lower a step.

    A model in pipeline stages has one for each, which differ in their mesh and their layers.

    Attributes:
        config: Configuration of the model.
        mesh: Mesh of one stage of one data slice.
        layout: Sharding layout, resolved on the mesh.
        policy: Dtypes.
        kernel: Implementation of attention.
        page_size: Tokens per page; with devices that share them, a multiple of the number of these.
        num_pages: Usable pages of each lane.
        num_states: State pages of each lane; 0 for a model without recurrent layers.
        num_slots: Most running sequences of each lane.
        max_model_len: Maximum context length in tokens; None for no limit.
        row_tile: Rows computed together in deterministic mode, a divisor of the rows and tokens of every batch shape;
            None computes all rows at once.
        max_logprobs: Most alternatives per token that a request can ask for.
        logprobs_mode: One of ``LOGPROBS_MODES``.
        processors: Logits processors of the engine.
        truncation: Implementation of min-p, top-k and top-p; None for the best on the mesh's devices.
        counts_expert_tokens: Whether steps count the tokens routed to each expert.
        stage: The layers of this stage; None for the whole model.
        aux_layers: Layers whose inputs a draft head reads; None without a head.
        num_drafts: Drafts of each slot that the device keeps; 0 without a drafter.
        drafter: The draft model, which runs after the last stage; None elsewhere.
        is_drafter: Whether this is a draft model, all of whose layers use one page table.
        head: The draft head that this is, of a model of ``config``; None for a model.
    """

    config: ModelConfig
    mesh: Mesh
    layout: ShardingLayout
    policy: DtypePolicy
    kernel: AttentionKernel
    page_size: int
    num_pages: int
    num_slots: int
    max_model_len: int | None = None
    num_states: int = 0
    row_tile: int | None = None
    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: str = LOGPROBS_MODES[0]
    processors: tuple[LogitsProcessor, ...] = ()
    truncation: Truncation | None = None
    counts_expert_tokens: bool = False
    stage: StageLayers | None = None
    aux_layers: tuple[int, ...] | None = None
    num_drafts: int = 0
    drafter: "Drafter | None" = None
    is_drafter: bool = False
    head: HeadSource | None = None

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds tokens; the others are given hidden states."""
        return self.stage is None or self.stage.is_first

    @property
    def is_last(self) -> bool:
        """Whether this stage samples; the others return hidden states."""
        return self.stage is None or self.stage.is_last

    @property
    def sampler(self) -> SamplerSettings:
        """Static settings of the sampler."""
        assert self.logprobs_mode in LOGPROBS_MODES, self.logprobs_mode
        argmax, truncation = load("argmax", self.policy.linear), self.truncation
        truncation = truncation or select_truncation(self.mesh.devices.flat[0])
        return SamplerSettings(self.max_logprobs, self.logprobs_mode, self.processors, truncation, argmax, self.split)

    @property
    def split(self) -> VocabSplit:
        """Where the logits are."""
        return VocabSplit(self.parallel.vocab, self.config.vocab_size) if self.parallel.keeps_logits else WHOLE

    @functools.cached_property
    def arguments(self) -> dict[str, float]:
        """Arguments of the logits processors; see ``argument_names``."""
        return argument_names(self.processors)

    @property
    def is_always_full(self) -> bool:
        """Whether a logits processor applies to every row, so that every step needs the full sampler."""
        return any(not processor.arguments for processor in self.processors)

    @property
    def parallel(self) -> Parallel:
        """The layout as modules see it."""
        return Parallel.on_mesh(self.layout, self.mesh)

    @property
    def splits_rows(self) -> bool:
        """Whether decode steps with drafts attend as if each draft were a row, with the kernels of decode steps without
        drafts; native kernels read keys and values once for all tokens of a row instead."""
        return self.kernel.name != "native"

    @property
    def layer_tile(self) -> int | None:
        """``row_tile`` for layers and head; None if native kernels compute each row separately."""
        is_native = computes_rows_natively(self.abstract_model.has_fused_norms, self.policy, self.kernel)
        return None if is_native else self.row_tile

    @functools.cached_property
    def abstract_model(self) -> AbstractModel:
        """The module without weights; every step is traced from it."""
        what = Scope(parallel=self.parallel, policy=self.policy), lambda axes: self.layout.sharding(self.mesh, *axes)
        if self.head is not None:
            return self.head.abstract(*what)
        return abstract_model(self.config, *what, self.stage, self.aux_layers is not None)

    def whole_model(self) -> AbstractModel:
        """Return the whole model's module without weights, as if this stage's devices had all layers."""
        return self.abstract_model if self.stage is None else dataclasses.replace(self, stage=None).abstract_model

    def whole_path(self, path: str) -> str:
        """Return a path in this stage's module as it is in the whole model."""
        return path if self.stage is None else self.stage.whole_path(path)

    @property
    def layers(self) -> range:
        """Indices of the stage's layers in the whole model."""
        return range(len(self.abstract_model.kv_specs)) if self.stage is None else self.stage.layers

    @functools.cached_property
    def kv_layout(self) -> KVLayout:
        """Pools and page tables; pools of one kind are stacked in one array if the kernel supports it."""
        specs = self.abstract_model.kv_specs
        if self.is_drafter:
            specs = [spec and spec._replace(window=None) for spec in specs]
        layout = lay_out_kv(specs, self.max_model_len, self.layers)
        layout = layout.stacked(self.pool_pages) if self.kernel.stacks_pools else layout
        return layout.with_states(self.state_specs)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """State of each of the stage's layers per sequence."""
        return tuple(self.abstract_model.state_specs[layer] for layer in self.layers)

    @property
    def state_distance(self) -> int:
        """Fewest tokens between kept states, a page, if the whole model has recurrent layers; else 0."""
        return self.page_size if any(self.abstract_model.state_specs) else 0

    @property
    def own_page_size(self) -> int:
        """Tokens per page on each device."""
        return self.page_size // self.parallel.num_token_parts

    @property
    def pool_pages(self) -> int:
        """Pages of a pool in one lane, including those for padding."""
        return self.kernel.pool_specs(self.num_pages, self.own_page_size, self.parallel.num_head_parts, 8)[0].shape[0]

    @functools.cached_property
    def packing(self) -> Packing:
        """Packing of the parameters into arguments."""
        return Packing.of(self.abstract_model.params, self.mesh.devices.flat[0].platform)

    @property
    def abstract_params(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and shardings of the packed parameters."""
        return self.packing.structs(tuple(self.abstract_model.params.values()))

    @property
    def program_params(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and shardings of the parameters that programs are given: the packed ones, then the drafter's."""
        own = self.abstract_params
        return own if self.drafter is None else (*own, *self.drafter.sharded.abstract_params)

    def placed(self, mesh: Mesh, num_pages: int) -> "ShardedModel":
        """Return the same model on another mesh, with another number of pages."""
        drafter = self.drafter and self.drafter._replace(sharded=self.drafter.sharded.placed(mesh, num_pages))
        return dataclasses.replace(self, mesh=mesh, num_pages=num_pages, drafter=drafter)

    def for_shape(self, shape: BatchShape) -> "ShardedModel":
        """Return the model that runs steps of a batch shape: this one, or for few tokens one with the same parameters
        whose devices have all rows of hidden states.

        In deterministic mode all steps split them, so that they all compute the same.
        """
        size = self.parallel.parts(self.parallel.residual_axis)
        is_split = self.row_tile is not None or (
            shape.num_tokens % size == 0 and shape.num_tokens >= _FEWEST_SPLIT_TOKENS * size
        )
        return self if size == 1 or is_split else self.with_whole_rows

    @functools.cached_property
    def with_whole_rows(self) -> "ShardedModel":
        """The same model with the same parameters, whose devices have all rows of hidden states."""
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, residual="replicated"))

    def model(self, packed: Sequence[jax.Array]) -> CausalLM:
        """Return the module with the given packed parameters; called inside a program."""
        return self.abstract_model.merge(self.packing.unpack(packed[: len(self.packing.groups)]))

    def draft_head(self, packed: Sequence[jax.Array]) -> DraftHead:
        """Return the draft head with the given packed parameters; called inside a program."""
        return self.abstract_model.merge_module(self.packing.unpack(packed[: len(self.packing.groups)]))

    def unpack(self, buffer: Int[Array, " size"], shape: BatchShape, latest: LatestTokens) -> StepBatch:
        """Return the arrays of a step; called inside a program. See ``step_batch.unpack``."""
        tokens_axis = self.layout.mesh_axis("tokens")
        return unpack(buffer, shape, latest, self.page_size, self.num_pages, tokens_axis, self.splits_rows)

    def trace(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        out_shardings: Any = None,
        donated: Sequence[int] = (),
    ) -> jax.stages.Traced:
        """Trace a function as ``trace_sharded`` does; None: all results are arrays of rows or slots."""
        outputs = self.rows_sharding if out_shardings is None else out_shardings
        return trace_sharded(self.mesh, function, arguments, outputs, donated)

    def own_pools(self) -> tuple[Any, ...]:
        """Return shapes and shardings of the pages of all pools but the drafter's, then of the recurrent states."""
        pools = tuple(map(self.abstract_pools, self.kv_layout.pools, self.kv_layout.counts))
        return (*pools, *self.abstract_recurrent(self.num_states))

    def abstract_recurrent(self, num_pages: int) -> tuple[Any, ...]:
        """Return shapes and shardings of the states of each recurrent layer, with ``num_pages`` of them per lane."""
        sharding = functools.partial(self.layout.sharding, self.mesh)
        return state_structs(self.state_specs, self.num_lanes * num_pages, self.parallel, sharding)

    def abstract_all_pools(self) -> tuple[Any, ...]:
        """Return shapes and shardings of the pages of all pools and of the states, those of the drafter last."""
        own = self.own_pools()
        return own if self.drafter is None else (*own, *self.drafter.sharded.own_pools())

    def abstract_latest(self) -> LatestTokens:
        """Return shapes and shardings of the latest tokens of all slots."""
        drafts = self.rows_struct((self.num_slots, self.num_drafts), jnp.int32) if self.num_drafts else None
        each = self.rows_struct((self.num_slots,), jnp.int32)
        return LatestTokens(each, each, drafts)

    def abstract_state(self) -> StepState:
        """Return shapes and shardings of the ``StepState``."""
        num_slots = self.num_slots if self.is_last else 0
        tables = SlotTables(
            token_counts=self.vocab_struct(num_slots, jnp.int32),
            bias=self.vocab_struct(num_slots, jnp.float32),
            tracked_ids=self.rows_struct((num_slots, MAX_TRACKED), jnp.int32),
        )
        sums = self.rows_struct((num_slots, self.config.hidden_size), jnp.float32)
        return StepState(self.abstract_all_pools(), self.abstract_latest(), tables, sums, self.abstract_states())

    def abstract_states(self) -> HeadStates | None:
        """Return shapes and shardings of what a draft head keeps; None without one."""
        if self.drafter is None or (head := self.drafter.sharded.head) is None or head.drafts_blocks:
            return None
        sizes, width = (self.num_slots, self.num_pages), self.drafter.sharded.config.hidden_size
        dtype = self.policy.activations_dtype
        return HeadStates(*(self.rows_struct((size, width), dtype) for size in sizes))

    def abstract_pools(self, kind: PoolKind, count: int = 1) -> Any:
        """Return shapes and shardings of a layer's pools, or of ``count`` of each stacked in one array.

        Devices that share the tokens of pages have a part of every page, one device's after another's.
        """
        parallel = self.parallel
        all_kv_heads = parallel.parts(parallel.kv_heads) * kind.num_kv_heads
        num_owners = self.num_lanes * parallel.num_token_parts
        structs = []
        for pool in self.kernel.pool_specs(self.num_pages, self.own_page_size, all_kv_heads, kind.head_dim):
            heads = ["kv_heads" if i == pool.heads_dimension else None for i in range(1, len(pool.shape))]
            sharding = self.layout.sharding(self.mesh, ("pages", "tokens"), *heads)
            shape = (num_owners * count * pool.shape[0], *pool.shape[1:])
            structs.append(jax.ShapeDtypeStruct(shape, jnp.dtype(kind.dtype), sharding=sharding))
        return tuple(structs)

    def empty_state(self) -> StepState:
        """Allocate a zero ``StepState`` on the devices."""
        return compile_zeros(self.abstract_state())()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters per device."""
        return structs_bytes(self.program_params)

    @property
    def largest_weight_bytes(self) -> int:
        """Bytes per device of the largest parameter of a layer, the embedding or the head."""
        return max(map(structs_bytes, self.abstract_model.params.values()), default=0)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages per device, including those for padding, and of all state pages."""
        states = self.abstract_states()
        return structs_bytes((self.abstract_all_pools(), () if states is None else states.pages))

    @property
    def state_bytes(self) -> int:
        """Bytes of one state page per device, over all recurrent layers."""
        return structs_bytes(self.abstract_recurrent(1))

    @property
    def slot_state_bytes(self) -> int:
        """Bytes of the slots' state per device, besides pages."""
        _, *others, states = self.abstract_state()
        return structs_bytes((others, states and states.slots))

    @property
    def num_lanes(self) -> int:
        """Number of lanes: parts of the mesh with their own rows, slots and pages, which run every step together."""
        return self.parallel.num_row_parts

    @property
    def rows_sharding(self) -> NamedSharding:
        """Sharding of an array of rows or slots: the lanes' parts one after the other; without lanes, replicated."""
        return self.layout.sharding(self.mesh, "batch")

    @property
    def vocab_width(self) -> int:
        """Number of logits of a row on all devices together, with padding if each device keeps its own."""
        size = self.config.vocab_size
        return self.parallel.padded_vocab(size) if self.parallel.keeps_logits else size

    @property
    def vocab_sharding(self) -> NamedSharding:
        """Sharding of an array with a column per token for each row or slot."""
        return self.layout.sharding(self.mesh, "batch", "vocab" if self.parallel.keeps_logits else None)

    def vocab_struct(self, num_rows: int, dtype: Any) -> Any:
        """Return the abstract value of an array with a column per token for each of a lane's rows or slots."""
        shape = self.num_lanes * num_rows, self.vocab_width
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.vocab_sharding)

    def mask_shape(self, num_samples: int) -> tuple[int, int]:
        """Return the shape of a lane's token masks: for each sample, int32 words with a bit per token."""
        return num_samples, -(-self.config.vocab_size // 32)

    def rows_struct(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the abstract value of an array of rows or slots, from the shape of one lane's part."""
        first, *rest = shape
        return jax.ShapeDtypeStruct((self.num_lanes * first, *rest), dtype, sharding=self.rows_sharding)


class Drafter(NamedTuple):
    """A draft model that runs after the sampler.

    Attributes:
        sharded: The model, or the draft head, on the mesh of the one that it drafts for, and with its pages.
        directory: Its checkpoint.
        table: The page table of that model that it uses.
        is_greedy: Whether drafts are its most likely tokens; else they are sampled as its requests ask for.
        mask_token: Stands for tokens to come, so that one pass drafts all; None: each draft takes a pass.
    """

    sharded: ShardedModel
    directory: Path
    table: int
    is_greedy: bool
    mask_token: int | None = None
