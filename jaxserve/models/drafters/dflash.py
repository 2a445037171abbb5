"""DFlash heads (arXiv:2602.06036): layers that guess a block of tokens at once, each from all of the block.

Keys and values of the context come straight from the target's hidden states. After the context follow its latest token
and a mask token for each of those to come; every one of them sees the context and all of the others.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from checkpoints import whole
from jaxserve.layers.attention import AttentionInputs, AttentionSettings, Pools
from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.kv_layout import KVIndices
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import vector
from jaxserve.layers.rope import rope_cos_sin
from jaxserve.layers.sparse_mlp import replicated_linear
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_layer, build_norm
from jaxserve.models.drafters.draft_head import DraftHead
from pallas_kernels import AttentionBatch

_MASK_EMBEDDING: Final = "mask_embedding"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig(DecoderConfig):
    """One DFlash head; ``vocab_size`` is the target's.

    Attributes:
        target_size: Hidden size of the target.
        aux_layers: Layers of the target whose inputs the head reads.
        mask_token: Stands for the tokens to come.
        has_embedding: Whether the head has a token embedding of its own.
        has_output: Whether it has an output head of its own.
        has_mask_embedding: Whether mask tokens have an embedding beside that of all tokens.
    """

    target_size: int
    aux_layers: tuple[int, ...]
    mask_token: int
    has_embedding: bool = False
    has_output: bool = False
    has_mask_embedding: bool = False


class BlockBatch(NamedTuple):
    """The tokens that a head takes in: N of blocks, of which a head computes outputs, then T of contexts.

    Attributes:
        positions: Position of each.
        lengths: Most tokens that the request of each can reach.
        num_block: Tokens of blocks in use; they come first.
        num_context: Tokens of contexts in use.
        attention: A row for each token of a block, which ends where its block does.
    """

    positions: Int[Array, " both"]
    lengths: Int[Array, " both"]
    num_block: Int[Array, ""]
    num_context: Int[Array, ""]
    attention: AttentionBatch


class DFlashHead(DraftHead):
    """The head: a projection of the target's hidden states, and the layers of a Qwen3.

    Args:
        config: The head.
        scope: Scope of the target.
    """

    def __init__(self, config: DFlashConfig, *, scope: Scope):
        size, eps = config.hidden_size, config.norm_eps
        embed = VocabEmbedding(config.vocab_size, size, scope=scope.at("embed_tokens"))
        head = VocabEmbedding(config.vocab_size, size, scope=scope.at("lm_head"))
        super().__init__(
            layers=[
                build_layer(config, index, scope.at(f"layers.{index}"), qk_norm="head")
                for index in range(config.num_layers)
            ],
            norm=build_norm(config, scope.at("norm")),
            ropes=(config.rope,),
            embed=embed if config.has_embedding else None,
            head=head if config.has_output else None,
            aux_layers=config.aux_layers,
            ignored=(r"(.*\.)?rotary_emb\.inv_freq",),
        )
        self.projection = replicated_linear(len(config.aux_layers) * config.target_size, "fc", size, scope)
        self.state_norm = RMSNorm(size, eps=eps, scope=scope.at("hidden_norm"))
        self.mask_token = config.mask_token
        recipe = whole(scope.at(_MASK_EMBEDDING).module, (size,)) if config.has_mask_embedding else None
        self.mask_embedding = None if recipe is None else vector(recipe, "embed", scope)

    def seen_state(
        self,
        target: CausalLM,
        hidden: Float[Array, "T target"],
        aux: Float[Array, "T aux"] | None,
        num_tokens: Int[Array, ""] | None = None,
    ) -> Float[Array, "T D"]:
        """Return the normalized projection of the inputs of ``aux_layers``, those of the lowest layer first."""
        assert aux is not None, "the target returns the inputs of aux_layers"
        return self.state_norm(self.projection(aux, num_rows=num_tokens))

    def embedded(self, target: CausalLM, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up the embeddings of all tokens; mask tokens may have one of their own."""
        found = super().embedded(target, tokens)
        if self.mask_embedding is None:
            return found
        return jnp.where((tokens == self.mask_token)[:, None], self.mask_embedding[...].astype(found.dtype), found)

    def names_of(self, tensor: str) -> tuple[str, ...]:
        """Return the name of a tensor, which all checkpoints share."""
        return (tensor,)

    def hidden(
        self,
        embedded: Float[Array, "N D"],
        states: Float[Array, "T D"],
        batch: BlockBatch,
        pools: Sequence[Pools],
        settings: AttentionSettings,
    ) -> tuple[Float[Array, "N D"], tuple[Pools, ...]]:
        """Compute the hidden state of each token of a block before the head's norm, and the pools with all entries.

        Args:
            embedded: Embeddings of the tokens of blocks.
            states: States of the tokens of contexts.
            batch: All tokens.
            pools: Key and value pages; ``settings.layer_indices`` says which are those of each layer.
            settings: Settings fixed at compile time.
        """
        rotations = tuple(rope_cos_sin(rope, batch.positions, batch.lengths) for rope in self.ropes)
        num_tokens = batch.num_block + batch.num_context
        inputs = AttentionInputs(batch.attention, num_tokens, batch.positions, rotations)
        all_tokens = jnp.full(1, len(embedded) + batch.num_context)  # whose keys and values are written
        x, counts, written = embedded, (batch.num_block, batch.num_context), list(pools)
        for index, layer in enumerate(cast(Sequence[PreNormLayer], self.layers)):
            place = settings.layer_indices[index] if settings.layer_indices else KVIndices(index, 0)
            assert place.pool is not None
            rows = batch.attention._replace(first_page=jnp.int32(place.first_page))
            own = inputs._replace(batch=rows._replace(query_lens=all_tokens))
            args = x, states, written[place.pool], own, rows, counts, settings
            x, written[place.pool] = _run_layer(*nnx.split(layer), *args)
        return x, tuple(written)


@functools.partial(jax.jit, static_argnums=(0, 8))
def _run_layer(
    graphdef: nnx.GraphDef[PreNormLayer],
    state: PyTree,
    x: Float[Array, "N D"],
    states: Float[Array, "T D"],
    pools: Pools,
    inputs: AttentionInputs,
    rows: AttentionBatch,
    counts: tuple[Int[Array, ""], Int[Array, ""]],
    settings: AttentionSettings,
) -> tuple[Float[Array, "N D"], Pools]:
    """Run one layer. It is inlined in a step; as its own function it lets equal layers be traced once."""
    layer, (num_block, num_context) = nnx.merge(graphdef, state), counts
    attention, kernel = layer.attention, settings.kernel
    projected = jnp.concatenate(
        [layer.projected(x, num_block), attention.project_input(states.astype(x.dtype), num_rows=num_context)]
    )
    if kernel.writer is not None:
        query, pools = attention.write_projected(projected, pools, inputs, settings)
    else:
        heads = attention.heads(projected, attention.rotation(inputs))
        kernel_pools = cast(Any, pools)  # as many as the kernel's operation has
        pools = kernel.write_kv(kernel_pools, heads.key, heads.value, inputs.batch, settings.page_size)
        query = heads.query
    attended = attention.attend(query[: len(x)], pools, rows, settings)
    return layer.after_attention(x, attended, num_block), pools
