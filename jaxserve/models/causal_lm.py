"""The decoder-only language model that every family is a configuration of."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jaxserve.layers.attention import AttentionInputs, AttentionSettings, Pools, select_attention
from jaxserve.layers.decoder import DecoderLayer
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.linear import linear_kernel
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import DtypePolicy, Parallel
from jaxserve.layers.rope import rope_cos_sin
from jaxserve.layers.rows import map_rows
from pallas_kernels import AttentionBatch

_NOTEBOOK_PAGE_SIZE = 64


class CausalLM(nnx.Module):
    """Embedding, decoder layers, norm and head.

    Parameters are declared with global shapes; inside a ``shard_map`` the same attributes hold a device's shards. On
    its own, ``CausalLM(config)`` is the whole model on one device, and ``model(tokens)`` gives logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        parallel: Parallel = Parallel(),  # noqa: B008 - frozen
        policy: DtypePolicy = DtypePolicy(),  # noqa: B008 - frozen
    ):
        self.config = config
        self.policy = policy
        sizes = (config.vocab_size, config.hidden_size)
        self.embed = VocabEmbedding(*sizes, parallel=parallel, policy=policy)
        self.layers = nnx.List(
            DecoderLayer(config, i, parallel=parallel, policy=policy) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, policy=policy)
        self.head = None if config.tie_embeddings else VocabEmbedding(*sizes, parallel=parallel, policy=policy)

    def hidden(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        lengths: Int[Array, " T"],
        pools: list[Pools],
        batch: AttentionBatch,
        settings: AttentionSettings,
    ) -> tuple[Float[Array, "T D"], list[Pools]]:
        """Hidden states before the head's norm, and each layer's pools with the step's keys and values written.

        Args:
            tokens: Token ids.
            positions: Place of each token in its row's context.
            lengths: Tokens its request will have at the end (rotary scalings that depend on length follow it).
            pools: Key and value pages of each layer.
            batch: Where each token stands and what it sees.
            settings: What is fixed at compile time.
        """
        num_tokens = batch.query_lens.sum()
        x, cos, sin = map_rows(self._embed, (tokens, positions, lengths), num_tokens, settings.row_tile)
        inputs = AttentionInputs(batch, num_tokens, cos, sin)
        written = []
        for layer, layer_pools in zip(self.layers, pools, strict=True):
            x, layer_pools = _run_layer(*nnx.split(layer), x, layer_pools, inputs, settings)
            written.append(layer_pools)
        return x, written

    def logits(
        self, hidden: Float[Array, "R D"], num_rows: Int[Array, ""] | None = None, row_tile: int | None = None
    ) -> Float[Array, "R V"]:
        """Scores of the vocabulary, float32, from hidden states.

        Args:
            hidden: Hidden states before the head's norm.
            num_rows: Rows in use, the first of the R; nothing is said of the others. None: all.
            row_tile: Rows that are computed together; None computes all at once.
        """
        if row_tile is None:
            return self._scores(hidden, num_rows)
        return map_rows(self._scores, (hidden,), len(hidden) if num_rows is None else num_rows, row_tile)

    def final(self, hidden: Float[Array, "R D"]) -> Float[Array, "R D"]:
        """What the head reads, and what stands for a text as a vector: hidden states behind the head's norm."""
        return self.norm(hidden)

    def _embed(
        self, tokens: Int[Array, " T"], positions: Int[Array, " T"], lengths: Int[Array, " T"]
    ) -> tuple[Float[Array, "T D"], Float[Array, "T half"], Float[Array, "T half"]]:
        """What the layers start from: embeddings, and the rotation of queries and keys."""
        x = self.embed(tokens)
        if self.config.embedding_multiplier != 1.0:
            x = x * self.config.embedding_multiplier
        return x, *rope_cos_sin(self.config.rope, positions, lengths)

    def _scores(self, hidden: Float[Array, "R D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "R V"]:
        head = self.embed if self.head is None else self.head
        scores = head.logits(hidden, norm=self.norm, num_rows=num_rows)
        return scores if self.config.logits_divisor == 1.0 else scores / self.config.logits_divisor

    def __call__(self, tokens: Int[Array, "B T"] | Int[np.ndarray, "B T"]) -> Float[Array, "B T V"]:
        """Logits of every token of B sequences, each over its own past; private pages, freed at the end."""
        num_rows, length = tokens.shape
        kernel = select_attention(jax.devices()[0], self.policy.kv)
        batch, num_pages = _private_batch(num_rows, length, _NOTEBOOK_PAGE_SIZE)
        layer = cast(DecoderLayer, self.layers[0]).attention
        specs = kernel.pool_specs(num_pages, _NOTEBOOK_PAGE_SIZE, layer.num_kv_heads, layer.head_dim)
        pools = [
            cast(Pools, tuple(jnp.zeros(spec.shape, self.policy.kv) for spec in specs))
            for _ in range(self.config.num_layers)
        ]
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), num_rows)
        settings = AttentionSettings(kernel, _NOTEBOOK_PAGE_SIZE, decode_only=False)
        flat = jnp.asarray(tokens, jnp.int32).reshape(-1)
        x, _ = self.hidden(flat, positions, jnp.full_like(positions, length), pools, batch, settings)
        return self.logits(x).reshape(num_rows, length, -1)


class UnpackedWeight(NamedTuple):
    """A weight as checkpoints have it, before it is packed: shape, type and sharding; and what packs it."""

    struct: jax.ShapeDtypeStruct
    pack: Callable[[np.ndarray], np.ndarray]


class AbstractModel(NamedTuple):
    """A module without values.

    Attributes:
        graphdef: Its structure.
        treedef: Its state's structure.
        params: Shape, type and sharding of each parameter by its path, in flat order.
        weights: Of each packed parameter by its path: how checkpoints have it.
    """

    graphdef: nnx.GraphDef
    treedef: Any
    params: dict[str, jax.ShapeDtypeStruct]
    weights: dict[str, UnpackedWeight]


def abstract_model(
    config: ModelConfig,
    parallel: Parallel,
    policy: DtypePolicy,
    sharding: Callable[[tuple[str, ...]], jax.sharding.Sharding],
) -> AbstractModel:
    """A model without values; ``sharding`` says where a parameter goes from its logical axes."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: CausalLM(config, parallel=parallel, policy=policy)))
    params, weights = {}, {}
    for path, variable in nnx.to_flat_state(state):
        name, value, metadata = ".".join(map(str, path)), variable.get_value(), variable.get_metadata()
        params[name] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding(metadata["axes"]))
        if "plain" in metadata:
            shape, axes, kernel, is_gated = metadata["plain"]
            struct = jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding(axes))
            weights[name] = UnpackedWeight(struct, functools.partial(linear_kernel(kernel).pack, is_gated=is_gated))
    return AbstractModel(graphdef, jax.tree.structure(state), params, weights)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _run_layer(
    graphdef: nnx.GraphDef,
    state: PyTree,
    x: Float[Array, "T D"],
    pools: Pools,
    inputs: AttentionInputs,
    settings: AttentionSettings,
) -> tuple[Float[Array, "T D"], Pools]:
    """One layer. Within a step this is inlined; being a function of its own lets equal layers be traced once."""
    return nnx.merge(graphdef, state)(x, pools, inputs, settings)


def _private_batch(num_rows: int, length: int, page_size: int) -> tuple[AttentionBatch, int]:
    """Rows of equal length, each with pages of its own, all of it new; and the number of pages."""
    row_pages = -(-length // page_size)
    table = np.arange(num_rows * row_pages, dtype=np.int32).reshape(num_rows, row_pages)
    position = np.tile(np.arange(length), num_rows)
    fields = {
        "page_table": table,
        "context_lens": np.full(num_rows, length),
        "query_starts": np.arange(num_rows) * length,
        "query_lens": np.full(num_rows, length),
        "num_rows": num_rows,
        "token_pages": table[np.repeat(np.arange(num_rows), length), position // page_size],
        "token_offsets": position % page_size,
        "num_shared_pages": 0,
    }
    return AttentionBatch(**{name: jnp.asarray(field, jnp.int32) for name, field in fields.items()}), table.size
