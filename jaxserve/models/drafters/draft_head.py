"""What all draft heads are: layers that guess tokens from a model's hidden states."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import AttentionInputs, AttentionSettings, Pools
from jaxserve.layers.decoder import DecoderLayer
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.kv_layout import KVSpec
from jaxserve.layers.model_config import RopeConfig
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import rope_cos_sin
from jaxserve.models.causal_lm import Batch, CausalLM
from jaxserve.models.layer_stack import HiddenStates, run_layers


class DraftHead(nnx.Module, ABC):
    """A few layers that read a model's hidden states and guess tokens.

    Embedding and output head are the target's, unless the head has its own.

    Args:
        layers: The decoder layers.
        norm: Norm before the output head; None: the output head reads the last layer's output.
        ropes: Rotary embeddings, which layers refer to by index.
        embed: Token embedding of its own.
        head: Output head of its own.
        aux_layers: Layers of the target whose inputs the head reads.
        token_ids: The target's id of each token of the head's vocabulary; None: they are equal.
        ignored: Regular expressions of full names of tensors of its checkpoint that it does not need.
    """

    def __init__(
        self,
        *,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm | None,
        ropes: tuple[RopeConfig, ...],
        embed: VocabEmbedding | None = None,
        head: VocabEmbedding | None = None,
        aux_layers: tuple[int, ...] = (),
        token_ids: "TokenIds | None" = None,
        ignored: tuple[str, ...] = (),
    ):
        self.layers, self.norm, self.ropes = nnx.List[Any](layers), norm, ropes
        self.embed, self.head = embed, head
        self.aux_layers, self.token_ids, self.ignored = aux_layers, token_ids, ignored

    @abstractmethod
    def seen_state(
        self,
        target: CausalLM,
        hidden: Float[Array, "T target"],
        aux: Float[Array, "T aux"] | None,
        num_tokens: Int[Array, ""] | None = None,
    ) -> Float[Array, "T D"]:
        """Return the states of tokens that the target has seen.

        Args:
            target: The target, or its last stage.
            hidden: Hidden states before the norm of the target's head.
            aux: Inputs of ``aux_layers``.
            num_tokens: States from this on are undefined; None: all are computed.
        """

    @abstractmethod
    def names_of(self, tensor: str) -> tuple[str, ...]:
        """Return the names that a tensor has in each form of checkpoints; see ``CausalLM.names_of``."""

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """KV cache of each layer."""
        return tuple(layer.kv_spec for layer in cast(Sequence[DecoderLayer], self.layers))

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse all norms of the layers with the neighbouring matmuls."""
        return all(layer.has_fused_norms for layer in cast(Sequence[DecoderLayer], self.layers))

    def embedded(self, target: CausalLM, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up the embeddings of all tokens."""
        embed = target.embed if self.embed is None else self.embed
        assert embed is not None, "the last stage of the target keeps the embedding"
        return embed(tokens)

    def final(self, hidden: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return the input of the output head."""
        return hidden if self.norm is None else self.norm(hidden)

    def logits(self, target: CausalLM, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Compute float32 logits of the target's vocabulary; -inf for tokens that the head does not have."""
        shared = target.embed if target.head is None else target.head
        head = shared if self.head is None else self.head
        assert head is not None, "the last stage of the target has the output head"
        scores = head.logits(hidden, norm=self.norm)
        return head.mask_padding(scores) if self.token_ids is None else self.token_ids.spread(scores)


class ChainHead(DraftHead):
    """A head that combines a token with the state of the token before it and guesses the token after it.

    The state of a token that the target has seen comes from its hidden states (``seen_state``), that of a drafted token
    from the head itself (``next_state``). A token and the state before it are combined at the token's own position, and
    their keys and values are stored there, so that an entry depends only on tokens up to its own position. The first
    token of a context is combined with zeros. What is combined (``combined``) is the input of the first layer.
    """

    @abstractmethod
    def combined(
        self, embedded: Float[Array, "T D"], state: Float[Array, "T D"], num_tokens: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Return the first layer's input from tokens' embeddings and the states of the tokens before them; rows from
        ``num_tokens`` on are undefined."""

    @abstractmethod
    def next_state(self, hidden: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return the states of tokens that the target has not seen, from the last layer's output."""

    def mask_state(self, target: CausalLM) -> Float[Array, " D"] | None:
        """Return the state that stands for one that is not known, before mask tokens; None if it was not trained to
        guess several tokens in one pass."""
        return None

    def hidden(
        self,
        embedded: Float[Array, "T D"],
        state: Float[Array, "T D"],
        batch: Batch,
        pools: Sequence[Pools],
        settings: AttentionSettings,
    ) -> HiddenStates:
        """Compute the hidden state of each token before the head's norm, and the pools with the tokens' entries.

        Args:
            embedded: Embeddings of the batch's tokens.
            state: State of the token before each of them.
            batch: The tokens' positions and page tables.
            pools: Key and value pages; ``settings.layer_indices`` says which are those of each layer of the head.
            settings: Settings fixed at compile time.
        """
        num_tokens, positions = batch.attention[0].query_lens.sum(), batch.positions
        rotations = tuple(rope_cos_sin(rope, positions, batch.lengths) for rope in self.ropes)
        inputs = [AttentionInputs(table, num_tokens, positions, rotations) for table in batch.attention]
        layers = cast(Sequence[DecoderLayer], self.layers)
        return run_layers(layers, self.combined(embedded, state, num_tokens), pools, inputs, settings)


class TokenIds:
    """The target's ids of the tokens of a head with a smaller vocabulary, as in a checkpoint's ``d2t``.

    Args:
        ids: The target's id of each token of the head.
        vocab_size: Tokens of the target.
    """

    def __init__(self, ids: Sequence[int], vocab_size: int):
        self.ids, self.vocab_size = tuple(ids), vocab_size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and (self.ids, self.vocab_size) == (other.ids, other.vocab_size)

    def __hash__(self) -> int:
        return hash((self.ids, self.vocab_size))

    def spread(self, scores: Float[Array, "R draft"]) -> Float[Array, "R V"]:
        """Return the logits of all tokens of the target from those of the head's."""
        everything = jnp.full((len(scores), self.vocab_size), -jnp.inf, scores.dtype)
        return everything.at[:, np.array(self.ids)].set(scores)
