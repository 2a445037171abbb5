"""The decoder-only language model that every family builds from its layers."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import AttentionInputs, AttentionSettings, Pools, choose_attention
from jaxserve.layers.attention_chunks import chunks_of, rows_in_chunks
from jaxserve.layers.decoder import Layer
from jaxserve.layers.embedding import PerLayerEmbedding, PositionEmbedding, VocabEmbedding
from jaxserve.layers.kv_layout import KVIndices, KVSpec, StateSpec, attended
from jaxserve.layers.model_config import ModelConfig, RopeConfig
from jaxserve.layers.norm import LayerNorm, RMSNorm
from jaxserve.layers.residual import own_rows, whole_rows
from jaxserve.layers.rope import rope_cos_sin
from jaxserve.layers.rows import map_rows
from jaxserve.models.layer_stack import HiddenStates, run_layers
from jaxserve.models.stages import StageLayers
from pallas_kernels import AttentionBatch
from pallas_kernels.qkv_write import Rotation
from pallas_kernels.recurrent_states import StateRows
from sharding import own_device
from sharding.collectives import all_max

_NOTEBOOK_PAGE_SIZE = 64


@runtime_checkable
class Batch(Protocol):
    """What a model's layers read of a step's batch."""

    @property
    def tokens(self) -> Int[Array, " T"]:
        """Token ids."""
        ...

    @property
    def positions(self) -> Int[Array, " T"]:
        """Position of each token in its sequence."""
        ...

    @property
    def lengths(self) -> Int[Array, " T"]:
        """Final length of each token's request, for RoPE scalings that depend on it."""
        ...

    @property
    def attention(self) -> tuple[AttentionBatch, ...]:
        """For each page table, where each token is and what it attends to."""
        ...

    @property
    def states(self) -> StateRows | None:
        """Where rows have their states; None unless the model has recurrent layers."""
        ...


class TokenBatch(NamedTuple):
    """A ``Batch`` and nothing else, for a model outside an engine."""

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    lengths: Int[Array, " T"]
    attention: tuple[AttentionBatch, ...]
    states: StateRows | None = None


class CausalLM(nnx.Module):
    """Embedding, decoder layers, norm and head; a family's file chooses them.

    Parameters are declared with global shapes; inside a ``shard_map`` the same attributes hold a device's shards.
    ``build_model(config)`` is the whole model on one device, and ``model(tokens)`` returns logits.

    Args:
        config: The model.
        embed: Token embedding.
        layers: The decoder layers, of any kinds.
        norm: Norm before the head.
        head: Computes logits; None uses the embedding.
        ignored: Regular expressions; checkpoint tensors whose full names match one are ignored.
        embedding_multiplier: Factor of the embeddings.
        logits_divisor: Divisor of the logits.
        logits_soft_cap: Logits become cap * tanh(logit / cap); None for no cap.
        ropes: Rotary embeddings, which layers refer to by index; None for the config's, if it has one.
        embed_norm: Norm of the embeddings; None for none.
        per_layer: Embeddings of each token for each layer; None for none.
        position_embed: Learned vectors of positions, added to the embeddings; None for none.
        optional_prefix: Prefix of tensors' names that checkpoints saved without the head leave out.
        head_names: Names that the head's tensor has in checkpoints, also if the head is the embedding: they may have
            the shared tensor under any of its names.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embed: VocabEmbedding,
        layers: Sequence[Layer],
        norm: RMSNorm | LayerNorm,
        head: VocabEmbedding | None,
        ignored: tuple[str, ...] = (),
        embedding_multiplier: float = 1.0,
        logits_divisor: float = 1.0,
        logits_soft_cap: float | None = None,
        ropes: tuple[RopeConfig, ...] | None = None,
        embed_norm: RMSNorm | None = None,
        per_layer: PerLayerEmbedding | None = None,
        position_embed: PositionEmbedding | None = None,
        optional_prefix: str = "model.",
        head_names: tuple[str, ...] = ("lm_head.weight",),
    ):
        self.config = config
        self.layers = nnx.List[Any](layers)
        self.embed: VocabEmbedding | None = embed
        self.norm: RMSNorm | LayerNorm | None = norm
        self.head = head
        unused = () if head is not None else tuple(map(re.escape, head_names))
        self.ignored, self.optional_prefix = (*ignored, *unused), optional_prefix
        self.head_names, self.prefixes = head_names, tuple[tuple[str, str], ...]()
        self.renamed: tuple[str, str] | None = None
        self.embedding_multiplier, self.logits_divisor = embedding_multiplier, logits_divisor
        self.logits_soft_cap = logits_soft_cap
        own = () if config.rope is None else (config.rope,)
        self.ropes = own if ropes is None else ropes
        self.position_embed, self.embed_norm, self.per_layer = position_embed, embed_norm, per_layer
        self.first_layer = 0
        self.residual_axis = embed.residual_axis

    def keep_stage(self, stage: StageLayers, drafts: bool = False) -> None:
        """Drop all modules that are not part of a pipeline stage.

        A head that uses the embedding keeps a copy of it, so that the first and the last stage have one each; so does
        the last stage if it drafts with a head that embeds tokens. Where each layer has embeddings of its own, which
        depend on the token's, all stages keep all.

        Args:
            stage: The stage.
            drafts: Whether its last stage drafts.
        """
        self.layers = nnx.List[Any]([*self.layers][stage.first : stage.stop])
        self.first_layer = stage.first
        if not stage.is_last:
            self.norm = self.head = None
        if not stage.is_first:
            self.position_embed = self.embed_norm = None
            keeps = stage.is_last and (drafts or self.head is None)
            if self.per_layer is None and not keeps:
                self.embed = None

    def names_of(self, tensor: str) -> tuple[str, ...]:
        """Return the names that a tensor has in each form of checkpoints, its own first.

        A checkpoint that was saved without the head leaves ``optional_prefix`` out. One of a multimodal class has
        another prefix in its place, and may have one before the head's name; see ``text_half.PREFIXES``. ``renamed`` is
        a regular expression of a part of names, and what stands there in further forms.
        """
        prefix, names = self.optional_prefix, (tensor, tensor, *(head + tensor for _, head in self.prefixes))
        if prefix and tensor.startswith(prefix):
            rest = tensor.removeprefix(prefix)
            names = (tensor, rest, *(inner + rest for inner, _ in self.prefixes))
        return names if self.renamed is None else (*names, *(re.sub(*self.renamed, name) for name in names))

    @property
    def kv_specs(self) -> tuple[KVSpec | None, ...]:
        """KV cache of each layer; None for layers without one."""
        return tuple(layer.kv_spec for layer in self.layers)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """State of each layer; empty for layers without one."""
        return tuple(layer.state_spec for layer in self.layers)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.num_experts)

    @property
    def num_experts(self) -> int:
        """Number of experts of each layer that has some; 0 for a dense model."""
        return max(layer.num_experts for layer in self.layers)

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse all norms with the neighbouring matmuls."""
        return all(layer.has_fused_norms for layer in self.layers)

    def hidden(
        self,
        batch: Batch,
        pools: Sequence[Pools],
        settings: AttentionSettings,
        x: Float[Array, "T D"] | None = None,
        aux_layers: Sequence[int] = (),
    ) -> HiddenStates:
        """Compute hidden states before the head's norm, and the pools with the step's keys and values.

        Args:
            batch: The step's tokens.
            pools: Key and value pages; see ``AttentionSettings.layer_indices``.
            settings: Settings fixed at compile time.
            x: Hidden states that the stage before computed; None: embed the tokens.
            aux_layers: Layers whose inputs are returned too, if this stage has them.
        """
        own = None if x is None else own_rows(x, self.residual_axis, settings.row_tile)
        embedded, inputs = self.embedded(batch, settings, own)
        found = self.through(embedded, pools, inputs, settings, aux_layers)
        x, aux = whole_rows(found.x, self.residual_axis, settings.row_tile), found.aux
        return found._replace(x=x, aux=None if aux is None else whole_rows(aux, self.residual_axis, settings.row_tile))

    def embedded(
        self, batch: Batch, settings: AttentionSettings, x: Float[Array, "rows D"] | None = None
    ) -> tuple[Float[Array, "rows D"], tuple[AttentionInputs, ...]]:
        """Compute the first layer's input, and the inputs shared by the layers of each page table; see
        :meth:`hidden`."""
        num_tokens, positions, lengths = batch.attention[0].query_lens.sum(), batch.positions, batch.lengths
        if settings.row_tile is not None:  # devices that share experts run the same number of tiles
            num_tokens = all_max(num_tokens, settings.rows_axis)
        per_layer = None
        if self.per_layer is not None:
            embed = self._embed_each_layer
            embedded, rotations, per_layer = map_rows(
                embed, (batch.tokens, positions, lengths), num_tokens, settings.row_tile
            )
            x = embedded if x is None else x
        elif x is None:
            x, rotations = map_rows(self._embed, (batch.tokens, positions, lengths), num_tokens, settings.row_tile)
        else:
            rotations = map_rows(self._rotations, (positions, lengths), num_tokens, settings.row_tile)
        chunks = settings.chunks or (None,) * len(batch.attention)
        tables = (
            table if chunk is None else rows_in_chunks(table, positions, chunk, settings.decode_only)
            for table, chunk in zip(batch.attention, chunks, strict=True)
        )
        shared = num_tokens, positions, rotations, per_layer
        return x, tuple(AttentionInputs(table, *shared, states=batch.states) for table in tables)

    def through(
        self,
        x: Float[Array, "rows D"],
        pools: Sequence[Pools],
        inputs: Sequence[AttentionInputs],
        settings: AttentionSettings,
        aux_layers: Sequence[int] = (),
    ) -> HiddenStates:
        """Compute hidden states after the layers, and all pools with the keys and values that these write.

        If the residual is split over tokens, the result is still sharded; ``hidden`` gathers it.

        Args:
            x: Hidden states before these layers.
            pools: Pools of the whole model.
            inputs: Inputs shared by the layers of each page table.
            settings: Settings fixed at compile time.
            aux_layers: As in :meth:`hidden`.
        """
        layers = cast(Sequence[Layer], self.layers)
        options: dict[str, Any] = {"first_layer": self.first_layer, "aux_layers": aux_layers}
        return run_layers(layers, x, pools, inputs, settings, **options)

    def logits(
        self, hidden: Float[Array, "R D"], num_rows: Int[Array, ""] | None = None, row_tile: int | None = None
    ) -> Float[Array, "R V"]:
        """Compute float32 logits from hidden states; in a layout that splits logits, those of the device's part of the
        vocabulary.

        Args:
            hidden: Hidden states before the head's norm.
            num_rows: Rows in use, the first of the R; other rows are undefined. None: all.
            row_tile: Rows computed together; None computes all at once.
        """
        if row_tile is None:
            return self._scores(hidden, num_rows)
        return map_rows(self._scores, (hidden,), len(hidden) if num_rows is None else num_rows, row_tile)

    def final(self, hidden: Float[Array, "R D"]) -> Float[Array, "R D"]:
        """Apply the head's norm: the input of the head, and the hidden states used for pooling."""
        assert self.norm is not None, "this stage does not end the model"
        return self.norm(hidden)

    def _embed(
        self, tokens: Int[Array, " T"], positions: Int[Array, " T"], lengths: Int[Array, " T"]
    ) -> tuple[Float[Array, "rows D"], tuple[Rotation, ...]]:
        """Compute the layers' input: embeddings, and the cosines and sines of each rotary embedding."""
        assert self.embed is not None, "this stage does not embed tokens"
        x = self.embed(tokens)
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.position_embed is not None:
            x = x + self.position_embed(positions)
        return x, self._rotations(positions, lengths)

    def _embed_each_layer(
        self, tokens: Int[Array, " T"], positions: Int[Array, " T"], lengths: Int[Array, " T"]
    ) -> tuple[Float[Array, "rows D"], tuple[Rotation, ...], Float[Array, "rows L P"]]:
        """Compute the same, and the embeddings of each layer."""
        assert self.per_layer is not None
        x, rotations = self._embed(tokens, positions, lengths)
        return x, rotations, self.per_layer(tokens, x)

    def _rotations(self, positions: Int[Array, " T"], lengths: Int[Array, " T"]) -> tuple[Rotation, ...]:
        """Compute the cosines and sines of each rotary embedding."""
        return tuple(rope_cos_sin(rope, positions, lengths) for rope in self.ropes)

    def _scores(self, hidden: Float[Array, "R D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "R V"]:
        head = self.embed if self.head is None else self.head
        norm = self.norm
        assert head is not None and norm is not None, "this stage does not end the model"
        if isinstance(norm, LayerNorm):
            scores = head.logits(norm(hidden), num_rows=num_rows)
        else:
            scores = head.logits(hidden, norm=norm, num_rows=num_rows)
        if self.logits_divisor != 1.0:
            scores = scores / self.logits_divisor
        if self.logits_soft_cap is not None:
            scores = self.logits_soft_cap * jnp.tanh(scores / self.logits_soft_cap)
        return head.mask_padding(scores)

    def __call__(self, tokens: Int[Array, "B T"] | Int[np.ndarray, "B T"]) -> Float[Array, "B T V"]:
        """Compute logits of every token of B sequences, each attending to its own past, in temporary pages."""
        num_rows, length = tokens.shape
        specs = self.kv_specs
        first = attended(specs)[0]
        chunks = tuple({spec.chunk: None for spec in attended(specs)})
        page_size = math.gcd(_NOTEBOOK_PAGE_SIZE, *(size for size in chunks if size is not None))
        chosen = choose_attention(own_device(), first.dtype, operation=first.operation, page_size=page_size)
        kernel = chosen.implementation
        attention, num_pages = _private_batch(num_rows, length, page_size)
        pools, indices = list[Pools](), list[KVIndices]()
        for layer, spec in enumerate(specs):
            arrays = () if spec is None else kernel.pool_specs(num_pages, page_size, spec.num_kv_heads, spec.head_dim)
            pools.append(tuple(jnp.zeros(array.shape, spec and spec.dtype) for array in arrays))
            place = KVIndices(None, 0)
            if spec is not None:
                place = KVIndices(spec.home(layer), chunks.index(spec.chunk))
            state = self.state_specs[layer]
            indices.append(place._replace(state=len(specs) + layer) if state else place)
        for state in self.state_specs:
            pools.append(tuple(jnp.zeros((num_rows, *array.shape), array.dtype) for array in state))
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), num_rows)
        settings = AttentionSettings(
            kernel, page_size, decode_only=False, layer_indices=tuple(indices), chunks=chunks_of(chunks, page_size)
        )
        flat = jnp.asarray(tokens, jnp.int32).reshape(-1)
        states = _private_states(num_rows, length) if any(self.state_specs) else None
        batch = TokenBatch(flat, positions, jnp.full_like(positions, length), (attention,) * len(chunks), states)
        hidden = self.hidden(batch, pools, settings)
        return self.logits(hidden.x).reshape(num_rows, length, -1)


def _private_states(num_rows: int, length: int) -> StateRows:
    """Return rows of equal length, each with its own new state page."""
    rows, none = jnp.arange(num_rows, dtype=jnp.int32), jnp.zeros(0, jnp.int32)
    lens = jnp.full_like(rows, length)
    return StateRows(rows * length, lens, jnp.ones(num_rows, bool), rows, none, none)


def _private_batch(num_rows: int, length: int, page_size: int) -> tuple[AttentionBatch, int]:
    """Return rows of equal length, each with its own new pages, and the number of pages."""
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
