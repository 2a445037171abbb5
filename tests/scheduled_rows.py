"""Steps of any schedule on a tiny model, for tests that compare the bits of each token from schedule to schedule."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxserve.device.sharded_model import ShardedModel
from jaxserve.layers.attention import AttentionSettings
from jaxserve.layers.kv_layout import attended
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy
from jaxserve.models.causal_lm import TokenBatch
from pallas_kernels import AttentionBatch
from sharding.plan import count_collectives
from tests.tiny_programs import (
    gpt_oss_config,
    latent_config,
    make_program,
    random_params,
    sparse_config,
    tiny_config,
)

PAGE_SIZE = 8  # of tiny_programs


@dataclasses.dataclass(frozen=True)
class Shape:
    """A program: query tokens, rows, pages of a table."""

    num_tokens: int
    num_rows: int
    table_pages: int
    decode_only: bool = False


Step = tuple[Shape, list[tuple[int, int, int]]]
"""A program, and the sequence, first position and number of tokens of each row."""


class ScheduledModel:
    """A model with random parameters, random texts, and its programs.

    Args:
        fields: Fields of the config, which say its family too.
        tensor: Number of devices.
        policy: Dtypes, and which kernels are native.
        lengths: Lengths of the texts: one sequence each.
        num_pages: Number of pages, which hold all texts at once.
        row_tile: Rows of a tile; None for steps without tiles.
        layout: Name of the layout.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        tensor: int,
        policy: DtypePolicy,
        *,
        lengths: Sequence[int],
        num_pages: int,
        row_tile: int | None,
        layout: str = "tensor_parallel",
    ):
        config = _make_config(fields)
        self._program = make_program(config, tensor=tensor, policy=policy, num_pages=num_pages, layout=layout)
        self._params = random_params(self._program)
        self._row_tile = row_tile
        self._num_pages = num_pages
        generator = np.random.default_rng(5)
        self._texts = [generator.integers(0, config.vocab_size, length) for length in lengths]
        self._compiled: dict[Shape, jax.stages.Compiled] = {}

    @property
    def activations_dtype(self) -> Any:
        """Dtype of hidden states."""
        return self._program.policy.activations_dtype

    def collectives(self, shape: Shape, *, is_tiled: bool = True) -> Mapping[str, int]:
        """Return how often a program has each collective; the body of a loop counts once."""
        return count_collectives(_trace(self._program, shape, self._row_tile if is_tiled else None))

    def run(self, steps: Sequence[Step], seed: int) -> dict[tuple[int, int], tuple[bytes, bytes]]:
        """Return the bits of the hidden state and of the logits of every (sequence, position) that steps compute.

        Args:
            steps: A schedule.
            seed: Of the order of pages, and of the order in which logits are asked for.
        """
        generator = np.random.default_rng(seed)
        free = list(generator.permutation(self._num_pages))
        sequences = sorted({row[0] for _, rows in steps for row in rows})
        pages = {s: np.array([free.pop() for _ in range(-(-len(self._texts[s]) // PAGE_SIZE))]) for s in sequences}
        pools = self._used_pools()
        found = {}
        for shape, rows in steps:
            arrays: dict[str, Any] = {name: np.zeros(size, np.int32) for name, size in _batch_shapes(shape).items()}
            arrays["page_table"][...], arrays["token_pages"][...] = self._num_pages, self._num_pages + 1
            tokens, positions, owners = np.zeros((3, shape.num_tokens), np.int32)
            start = 0
            for i, (sequence, first, count) in enumerate(rows):
                span, places = slice(start, start + count), np.arange(first, first + count)
                tokens[span], positions[span], owners[span] = self._texts[sequence][places], places, sequence
                arrays["page_table"][i, : len(pages[sequence])] = pages[sequence]
                arrays["token_pages"][span] = pages[sequence][places // PAGE_SIZE]
                arrays["token_offsets"][span] = places % PAGE_SIZE
                arrays["context_lens"][i], arrays["query_starts"][i] = first + count, start
                arrays["query_lens"][i] = count
                start += count
            arrays["num_rows"][...] = len(rows)
            order = np.concatenate([generator.permutation(start), np.arange(start, shape.num_tokens)]).astype(np.int32)
            batch = AttentionBatch(**arrays)
            program = self._compile(shape)
            pools, hidden, logits = program(self._params, pools, tokens, positions, order, batch)
            hidden, logits = np.asarray(hidden), np.asarray(logits)[np.argsort(order)]
            for j in range(start):
                found[int(owners[j]), int(positions[j])] = hidden[j].tobytes(), logits[j].tobytes()
        return found

    def _used_pools(self) -> list[Any]:
        """Pages with anything in them: nothing may be read before it is written."""
        generator = np.random.default_rng(7)
        return jax.tree.map(
            lambda struct: jax.device_put(generator.normal(size=struct.shape).astype(struct.dtype), struct.sharding),
            _abstract_pools(self._program),
        )

    def _compile(self, shape: Shape) -> jax.stages.Compiled:
        if shape not in self._compiled:
            self._compiled[shape] = _trace(self._program, shape, self._row_tile).lower().compile()
        return self._compiled[shape]


def _make_config(fields: Mapping[str, Any]) -> ModelConfig:
    makers = {"routing": sparse_config, "rank": latent_config, "gating": gpt_oss_config}
    make = next((maker for field, maker in makers.items() if field in fields), tiny_config)
    return make(**fields)


def _abstract_pools(program: ShardedModel) -> list[Any]:
    """Pools for each layer, so that all layers share one page table, whatever they see."""
    return [program.abstract_pools(spec.pool) for spec in attended(program.abstract_model.kv_specs)]


def _trace(program: ShardedModel, shape: Shape, row_tile: int | None) -> jax.stages.Traced:
    """Hidden states of a step's tokens, and their logits in any order."""
    abstract = program.abstract_model
    settings = AttentionSettings(program.kernel, PAGE_SIZE, shape.decode_only, row_tile)

    def body(arrays, pools, tokens, positions, order, batch):  # noqa: ANN001, ANN202 - as traced below
        model = abstract.merge(arrays)
        lengths = jnp.full_like(positions, program.config.max_positions)
        hidden, pools, *_ = model.hidden(TokenBatch(tokens, positions, lengths, (batch,)), pools, settings)
        logits = model.logits(hidden[order], batch.query_lens.sum(), row_tile)
        return pools, hidden, logits

    pools = _abstract_pools(program)
    numbers = [jax.ShapeDtypeStruct((shape.num_tokens,), jnp.int32)] * 3
    arguments = (tuple(abstract.params.values()), pools, *numbers, _abstract_batch(shape))
    specs = jax.tree.map(lambda struct: P() if struct.sharding is None else struct.sharding.spec, arguments)
    sharded = jax.shard_map(body, mesh=program.mesh, in_specs=specs, out_specs=(specs[1], P(), P()), check_vma=False)
    return jax.jit(sharded, donate_argnums=1).trace(*arguments)


def _batch_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Shapes of what attention reads."""
    rows, tokens = (shape.num_rows,), (shape.num_tokens,)
    shapes = {
        "page_table": (*rows, shape.table_pages),
        **dict.fromkeys(("num_rows", "num_shared_pages", "first_page"), ()),
    }
    shapes |= dict.fromkeys(("context_lens", "query_starts", "query_lens"), rows)
    return shapes | dict.fromkeys(("token_pages", "token_offsets"), tokens)


def _abstract_batch(shape: Shape) -> AttentionBatch:
    fields: dict[str, Any] = {name: jax.ShapeDtypeStruct(s, jnp.int32) for name, s in _batch_shapes(shape).items()}
    return AttentionBatch(**fields)
