"""The decoder-only language model that every family composes its layers in."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jaxserve.layers.attention import AttentionInputs, AttentionSettings, Pools, select_attention
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.kv_layout import KVPlace, KVSpec
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import rope_cos_sin
from jaxserve.layers.rows import map_rows
from pallas_kernels import AttentionBatch

_NOTEBOOK_PAGE_SIZE = 64


@runtime_checkable
class Layer(Protocol):
    """What the layers of a model have in common."""

    @property
    def kv_spec(self) -> KVSpec:
        """What the layer keeps of a token."""
        ...

    @property
    def has_fused_norms(self) -> bool:
        """Return whether kernels can compute all its norms together with what stands beside them."""
        ...

    def __call__(
        self, x: Float[Array, "T D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> tuple[Float[Array, "T D"], Pools]:
        """Return the residual stream behind this layer, and the layer's pools with the step's keys and values
        written."""
        ...


class CausalLM(nnx.Module):
    """Embedding, decoder layers, norm and head; the file of a family says which.

    Parameters are declared with global shapes; inside a ``shard_map`` the same attributes hold a device's shards. On
    its own, ``build_model(config)`` is the whole model on one device, and ``model(tokens)`` gives logits.

    Args:
        config: The model.
        embed: Embeds tokens.
        layers: The decoder layers, of any kinds.
        norm: Norm in front of the head.
        head: Scores the vocabulary; None for the embedding.
        ignored: Regular expressions; tensors of a checkpoint whose whole names match one carry no weights.
        embedding_multiplier: Multiplies embeddings.
        logits_divisor: Divides the logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embed: VocabEmbedding,
        layers: Sequence[Layer],
        norm: RMSNorm,
        head: VocabEmbedding | None,
        ignored: tuple[str, ...] = (),
        embedding_multiplier: float = 1.0,
        logits_divisor: float = 1.0,
    ):
        self.config = config
        self.embed, self.layers, self.norm, self.head = embed, nnx.List[Any](layers), norm, head
        self.ignored = ignored
        self.embedding_multiplier, self.logits_divisor = embedding_multiplier, logits_divisor

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """What each layer keeps of a token."""
        return tuple(layer.kv_spec for layer in self.layers)

    @property
    def has_fused_norms(self) -> bool:
        """Return whether kernels can compute all norms together with what stands beside them."""
        return all(layer.has_fused_norms for layer in self.layers)

    def hidden(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        lengths: Int[Array, " T"],
        pools: Sequence[Pools],
        batches: Sequence[AttentionBatch],
        settings: AttentionSettings,
    ) -> tuple[Float[Array, "T D"], list[Pools]]:
        """Hidden states before the head's norm, and the pools with the step's keys and values written.

        Args:
            tokens: Token ids.
            positions: Place of each token in its row's context.
            lengths: Tokens its request will have at the end (rotary scalings that depend on length follow it).
            pools: Key and value pages; see ``AttentionSettings.places``.
            batches: For each page table, where each token stands and what it sees.
            settings: What is fixed at compile time.
        """
        x, inputs = self.embedded(tokens, positions, lengths, batches, settings)
        return self.through(x, pools, inputs, settings)

    def embedded(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        lengths: Int[Array, " T"],
        batches: Sequence[AttentionBatch],
        settings: AttentionSettings,
    ) -> tuple[Float[Array, "T D"], tuple[AttentionInputs, ...]]:
        """What the first layer starts from, and what the layers of each page table share; see :meth:`hidden`."""
        num_tokens = batches[0].query_lens.sum()
        x, cos, sin = map_rows(self._embed, (tokens, positions, lengths), num_tokens, settings.row_tile)
        return x, tuple(AttentionInputs(batch, num_tokens, cos, sin) for batch in batches)

    def through(
        self,
        x: Float[Array, "T D"],
        pools: Sequence[Pools],
        inputs: Sequence[AttentionInputs],
        settings: AttentionSettings,
        layers: slice = slice(None),
    ) -> tuple[Float[Array, "T D"], list[Pools]]:
        """Hidden states behind some of the layers, and all pools with the keys and values that these write.

        Args:
            x: Hidden states in front of them.
            pools: Of the whole model.
            inputs: What the layers of each page table share.
            settings: What is fixed at compile time.
            layers: Which; all, where it is not given.
        """
        written = list(pools)
        for index in range(len(self.layers))[layers]:
            pool, table, first_page = settings.places[index] if settings.places else KVPlace(index, 0)
            own = inputs[table]._replace(batch=inputs[table].batch._replace(first_page=jnp.int32(first_page)))
            layer = nnx.split(self.layers[index])
            x, written[pool] = _run_layer(*layer, x, written[pool], own, settings)
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
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        return x, *rope_cos_sin(self.config.rope, positions, lengths)

    def _scores(self, hidden: Float[Array, "R D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "R V"]:
        head = self.embed if self.head is None else self.head
        scores = head.logits(hidden, norm=self.norm, num_rows=num_rows)
        return scores if self.logits_divisor == 1.0 else scores / self.logits_divisor

    def __call__(self, tokens: Int[Array, "B T"] | Int[np.ndarray, "B T"]) -> Float[Array, "B T V"]:
        """Logits of every token of B sequences, each over its own past; private pages, freed at the end."""
        num_rows, length = tokens.shape
        kernel = select_attention(jax.devices()[0], self.kv_specs[0].dtype)
        batch, num_pages = _private_batch(num_rows, length, _NOTEBOOK_PAGE_SIZE)
        pools = []
        for spec in self.kv_specs:
            arrays = kernel.pool_specs(num_pages, _NOTEBOOK_PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
            pools.append(cast(Pools, tuple(jnp.zeros(array.shape, spec.dtype) for array in arrays)))
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), num_rows)
        settings = AttentionSettings(kernel, _NOTEBOOK_PAGE_SIZE, decode_only=False)
        flat = jnp.asarray(tokens, jnp.int32).reshape(-1)
        x, _ = self.hidden(flat, positions, jnp.full_like(positions, length), pools, [batch], settings)
        return self.logits(x).reshape(num_rows, length, -1)


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
