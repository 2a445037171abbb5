"""A model laid out on a mesh without its values, and the state that the devices keep between steps.

Dispatching a step costs time for each argument (about half a microsecond). On GPUs the layers' parameters of one kind
are therefore one argument, stacked, and a program takes each out with a fixed index: XLA reads a layer's part in place
there. On CPUs it would copy each part, so every parameter is an argument of its own.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from jaxserve.config_checks import LOGPROBS_MODES
from jaxserve.device.step_batch import LatestTokens
from jaxserve.layers.kv_layout import KVLayout, PoolKind, lay_out_kv
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel, Scope
from jaxserve.models.abstract import AbstractModel, abstract_model
from jaxserve.models.causal_lm import CausalLM
from jaxserve.sampling.logits_processors import LogitsProcessor, argument_names
from jaxserve.sampling.logprobs import MAX_LOGPROBS
from jaxserve.sampling.penalties import MAX_TRACKED, SlotTables
from jaxserve.sampling.sampler import SamplerSettings, select_truncation
from pallas_kernels import PagedAttention
from pallas_kernels.registry import load
from pallas_kernels.truncation import Truncation
from sharding import ShardingLayout, stacked
from sharding.plan import bytes_per_device

AnyArray = TypeVar("AnyArray", jax.Array, np.ndarray)
Struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which parameters, by their place in the module's flat order, share an argument; one alone is itself."""

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: Mapping[str, Struct], platform: str) -> "Packing":
        """The packing that suits a platform.

        Args:
            params: Path in the module (``layers.3.mlp.down.weight``), shape, type and sharding of each parameter.
            platform: JAX's platform name.
        """
        groups: dict[object, list[int]] = {}
        for i, (path, struct) in enumerate(params.items()):
            kind = re.sub(r"^layers\.\d+\.", "layers.*.", path) if platform != "cpu" else path
            groups.setdefault((kind, struct.shape, struct.dtype, struct.sharding), []).append(i)
        return cls(tuple(tuple(group) for group in groups.values()))

    def structs(self, params: Sequence[Struct]) -> tuple[Struct, ...]:
        """Shapes and shardings of the arguments."""
        return tuple(_stacked([params[i] for i in group]) for group in self.groups)

    def pack(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The arguments, on the devices the parameters are on; parameters that were stacked are given up.

        Beside the parameters it takes the memory of the largest group for a moment.
        """
        packed = []
        for group in self.groups:
            members = [arrays[i] for i in group]
            if len(members) > 1:
                struct = _stacked([Struct(a.shape, a.dtype, sharding=a.sharding) for a in members])
                stack = jax.jit(lambda *given: jnp.stack(given), out_shardings=struct.sharding)(*members)
                stack.block_until_ready()
                for member in members:
                    member.delete()
            else:
                (stack,) = members
            packed.append(stack)
        return tuple(packed)

    def replace(self, packed: Sequence[jax.Array], arrays: Mapping[int, np.ndarray]) -> tuple[jax.Array, ...]:
        """The arguments with some parameters replaced, given by their places in the module's order."""
        found = []
        for group, old in zip(self.groups, packed, strict=True):
            given = {at: arrays[i] for at, i in enumerate(group) if i in arrays}
            if not given:
                found.append(old)
                continue
            stack = np.array(old) if len(group) > 1 else given[0]
            for at, array in given.items() if len(group) > 1 else ():
                stack[at] = array
            found.append(jax.device_put(stack, old.sharding))
        return tuple(found)

    def unpack(self, packed: Sequence[AnyArray]) -> tuple[AnyArray, ...]:
        """The parameters in the module's order, inside a program or on the host."""
        found: dict[int, Any] = {}
        for group, stack in zip(self.groups, packed, strict=True):
            for at, i in enumerate(group):
                found[i] = stack if len(group) == 1 else stack[at]
        return tuple(found[i] for i in sorted(found))


def _stacked(members: Sequence[Struct]) -> Struct:
    """The shape of a group's argument: layers first, none of them split."""
    first = members[0]
    if len(members) == 1:
        return first
    return Struct((len(members), *first.shape), first.dtype, sharding=stacked(first.sharding))


class StepState(NamedTuple):
    """What the device keeps between steps, given up to each step and got back.

    Attributes:
        pools: Key and value pages; see ``KVLayout``.
        latest: Latest token of each slot, and its position.
        tables: What the sampler needs of requests that ask for more than a few numbers.
        sums: Hidden states summed up over each slot's prompt so far, where its request is for a vector.
    """

    pools: tuple[tuple[Array, Array], ...]
    latest: LatestTokens
    tables: SlotTables
    sums: Float[Array, "slots D"]


@dataclasses.dataclass(frozen=True)
class ModelProgram:
    """A model without its values, laid out on a mesh: all that lowering a step needs.

    Attributes:
        config: The model.
        mesh: One data slice.
        layout: Resolved on that mesh.
        policy: Element types.
        kernel: Implementation of paged attention.
        page_size: Tokens per page.
        num_pages: Usable pages.
        num_slots: Sequences that can run at once.
        max_model_len: Tokens of the longest context; None for no limit.
        row_tile: Rows that are computed together in the deterministic mode, which divides the rows and the tokens of
            every batch shape; None computes all at once.
        max_logprobs: Most alternatives a request can ask for with each token.
        logprobs_mode: What is reported as logprobs; one of ``LOGPROBS_MODES``.
        processors: The engine's own changes to logits.
        truncation: Implementation of min-p, top-k and top-p; None takes the best for the mesh's devices.
    """

    config: ModelConfig
    mesh: Mesh
    layout: ShardingLayout
    policy: DtypePolicy
    kernel: PagedAttention
    page_size: int
    num_pages: int
    num_slots: int
    max_model_len: int | None = None
    row_tile: int | None = None
    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: str = LOGPROBS_MODES[0]
    processors: tuple[LogitsProcessor, ...] = ()
    truncation: Truncation | None = None

    @property
    def sampler(self) -> SamplerSettings:
        """What is fixed about sampling."""
        assert self.logprobs_mode in LOGPROBS_MODES, self.logprobs_mode
        truncation = self.truncation or select_truncation(self.mesh.devices.flat[0])
        argmax = load("argmax", self.policy.linear)
        return SamplerSettings(self.max_logprobs, self.logprobs_mode, self.processors, truncation, argmax)

    @functools.cached_property
    def arguments(self) -> dict[str, float]:
        """What the processors read of each request; see ``argument_names``."""
        return argument_names(self.processors)

    @property
    def is_always_full(self) -> bool:
        """Whether a processor applies to every row, so that no step can take the simpler samplers."""
        return any(not processor.arguments for processor in self.processors)

    @property
    def parallel(self) -> Parallel:
        """The layout from a module's point of view."""
        return Parallel.on_mesh(self.layout, self.mesh)

    @property
    def layer_tile(self) -> int | None:
        """``row_tile`` for the layers and the head, which need none where native kernels compute all their sums."""
        is_native = computes_rows_natively(self.abstract_model.has_fused_norms, self.policy, self.kernel)
        return None if is_native else self.row_tile

    @functools.cached_property
    def abstract_model(self) -> AbstractModel:
        """The module without values, made once: every step is traced from it."""
        scope = Scope(parallel=self.parallel, policy=self.policy)
        return abstract_model(self.config, scope, lambda axes: self.layout.sharding(self.mesh, *axes))

    @functools.cached_property
    def kv_layout(self) -> KVLayout:
        """Pools and page tables; pools of one kind are one array where the kernel can tell them apart."""
        layout = lay_out_kv(self.abstract_model.kv_specs, self.max_model_len)
        return layout.stacked(self.pool_pages) if self.kernel.stacks_pools else layout

    @property
    def pool_pages(self) -> int:
        """Pages of a pool, those that padding needs included."""
        keys, _ = self.kernel.pool_specs(self.num_pages, self.page_size, self.parallel.size, 8)
        return keys.shape[0]

    @functools.cached_property
    def packing(self) -> Packing:
        """How the parameters become arguments."""
        return Packing.of(self.abstract_model.params, self.mesh.devices.flat[0].platform)

    @property
    def abstract_params(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and shardings of the packed parameters."""
        return self.packing.structs(tuple(self.abstract_model.params.values()))

    def model(self, packed: Sequence[jax.Array]) -> CausalLM:
        """The module with its parameters, inside a program that takes them packed."""
        return self.abstract_model.merge(self.packing.unpack(packed))

    def trace(
        self, function: Callable[..., Any], arguments: Sequence[Any], gives: Any = None, donated: Sequence[int] = ()
    ) -> jax.stages.Traced:
        """Traces a function that runs on every device of the mesh, on its part of each array.

        Args:
            function: What a device does.
            arguments: Shapes and shardings of what it takes.
            gives: Shardings of what it gives, or of whole branches of that; None where all of it is replicated.
            donated: Indices of the arguments that are given up.
        """
        in_specs, out_specs = (
            jax.tree.map(lambda sharding: sharding.spec, tree)
            for tree in (shardings(tuple(arguments)), self.replicated if gives is None else gives)
        )
        sharded = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(sharded, donate_argnums=donated).trace(*arguments)

    def abstract_state(self) -> StepState:
        """Shapes and shardings of what the device keeps between steps."""
        pools = tuple(map(self.abstract_pools, self.kv_layout.pools, self.kv_layout.counts))
        latest = LatestTokens(*[self.whole((self.num_slots,), jnp.int32)] * 2)
        vocabulary = (self.num_slots, self.config.vocab_size)
        tables = SlotTables(
            token_counts=self.whole(vocabulary, jnp.int32),
            bias=self.whole(vocabulary, jnp.float32),
            tracked_ids=self.whole((self.num_slots, MAX_TRACKED), jnp.int32),
        )
        sums = self.whole((self.num_slots, self.config.hidden_size), jnp.float32)
        return StepState(pools, latest, tables, sums)

    def abstract_pools(self, kind: PoolKind, count: int = 1) -> Any:
        """Shapes and shardings of a pool of keys and one of values, or of ``count`` of both in the same arrays."""
        all_kv_heads = self.parallel.size * kind.num_kv_heads
        structs = []
        for pool in self.kernel.pool_specs(self.num_pages, self.page_size, all_kv_heads, kind.head_dim):
            axes = ["kv_heads" if i == pool.heads_dimension else None for i in range(len(pool.shape))]
            sharding = self.layout.sharding(self.mesh, *axes)
            shape = (count * pool.shape[0], *pool.shape[1:])
            structs.append(jax.ShapeDtypeStruct(shape, jnp.dtype(kind.dtype), sharding=sharding))
        return tuple(structs)

    def empty_state(self) -> StepState:
        """Empty pools and slots, made on the devices."""
        abstract = self.abstract_state()

        def zeros() -> StepState:
            return jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), abstract)

        return jax.jit(zeros, out_shardings=shardings(abstract))()

    @property
    def pool_bytes(self) -> int:
        """Memory of the pages on each device, those that padding needs included."""
        return _bytes_per_device(self.abstract_state().pools)

    @property
    def slot_state_bytes(self) -> int:
        """Memory of what each device keeps of the slots beside their pages."""
        return _bytes_per_device(self.abstract_state()._replace(pools=()))

    @property
    def replicated(self) -> NamedSharding:
        """A whole copy on each device."""
        return self.layout.sharding(self.mesh)

    def mask_shape(self, num_rows: int) -> tuple[int, int]:
        """Shape of the vocabulary mask of a step: a bit for each token."""
        return num_rows, -(-self.config.vocab_size // 32)

    def whole(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Shape of an array that each device has a whole copy of."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)


def computes_rows_natively(has_fused_norms: bool, policy: DtypePolicy, kernel: PagedAttention) -> bool:
    """Whether native kernels compute all sums of a row, each by itself: norms they do not fuse are left to XLA."""
    return policy.linear == kernel.name == "native" and has_fused_norms


def shardings(structs: Any) -> Any:
    """How each array of a tree is laid out."""
    return jax.tree.map(lambda struct: struct.sharding, structs)


def _bytes_per_device(structs: Any) -> int:
    leaves = jax.tree.leaves(structs)
    return sum(bytes_per_device(leaf.shape, leaf.dtype.itemsize, leaf.sharding) for leaf in leaves)
