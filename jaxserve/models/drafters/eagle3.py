"""EAGLE-3 heads (arXiv:2503.01840): a small Llama over the inputs of a few of the target's layers.

Those of P-EAGLE guess all tokens in one pass: a learned state is before each mask token.
"""

import dataclasses
from typing import Any, Final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints import whole
from jaxserve.layers.decoder import DecoderLayer, run_mlp
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import matrix
from jaxserve.layers.sparse_mlp import replicated_linear
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_layer, build_mlp, build_norm
from jaxserve.models.drafters.draft_head import ChainHead, TokenIds

MASK_STATE: Final = "mask_hidden"
"""The tensor with the state before mask tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(DecoderConfig):
    """One EAGLE-3 head; ``vocab_size`` is the target's.

    Attributes:
        target_size: Hidden size of the target.
        aux_layers: Layers of the target whose inputs the head reads.
        token_ids: The target's ids of the head's vocabulary; None: it has the whole vocabulary.
        has_embedding: Whether the head has a token embedding of its own.
        norm_before_residual: Whether the first layer's residual is the normalized state.
        norm_before_fc: Whether all inputs together are normalized before they are projected.
        fc_norm: Whether the inputs of each layer of the target are.
        norm_output: Whether the state of a drafted token is normalized.
        mask_size: Features of the state that is before mask tokens: those of all inputs of ``aux_layers``, which are
            projected like them, or of a projected state; None: the head has none.
    """

    target_size: int
    aux_layers: tuple[int, ...]
    token_ids: TokenIds | None = None
    has_embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_size: int | None = None


class Eagle3Layer(DecoderLayer):
    """The first layer of a head: it attends with embedding and state, and adds to the state.

    Args:
        config: The head.
        scope: Scope of the layer.
    """

    def __init__(self, config: Eagle3Config, scope: Scope):
        super().__init__(build_attention(config, 0, scope.at("self_attn"), input_size=2 * config.hidden_size))
        self.embedding_norm = build_norm(config, scope.at("input_layernorm"))
        self.state_norm = build_norm(config, scope.at("hidden_norm"))
        self.mlp_norm = build_norm(config, scope.at("post_attention_layernorm"))
        self.mlp = build_mlp(config, scope.at("mlp"))
        self.size, self.norm_before_residual = config.hidden_size, config.norm_before_residual

    @property
    def has_fused_norms(self) -> bool:
        """Return False: the input of attention has two parts, each with its norm."""
        return False

    def projected(
        self, x: Float[Array, "rows both"], num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Compute queries, keys and values of the normalized embedding and state."""
        embedded, state = self.embedding_norm(x[:, : self.size]), self.state_norm(x[:, self.size :])
        return self.attention.project_input(jnp.concatenate([embedded, state], 1), num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "rows both"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        """Return the layer's output from its input and the attention output."""
        state = x[:, self.size :]
        residual = self.state_norm(state) if self.norm_before_residual else state
        state = self.attention.output(attended, residual=residual, num_rows=num_rows)
        return run_mlp(self.mlp, state, norm=self.mlp_norm, residual=state, num_rows=num_rows)[0]


class Eagle3Head(ChainHead):
    """The head: a projection of the target's hidden states, and the layers of a Llama.

    Args:
        config: The head.
        scope: Scope of the target.
    """

    def __init__(self, config: Eagle3Config, *, scope: Scope):
        first = Eagle3Layer(config, scope.at("layers.0"))
        others = [build_layer(config, i, scope.at(f"layers.{i}")) for i in range(1, config.num_layers)]
        embed = VocabEmbedding(config.vocab_size, config.hidden_size, scope=scope.at("embed_tokens"))
        own = config.vocab_size if config.token_ids is None else len(config.token_ids.ids)
        super().__init__(
            layers=[first, *others],
            norm=build_norm(config, scope.at("norm")),
            ropes=(config.rope,),
            embed=embed if config.has_embedding else None,
            head=VocabEmbedding(own, config.hidden_size, scope=scope.at("lm_head")),
            aux_layers=config.aux_layers,
            token_ids=config.token_ids,
            ignored=(
                "d2t",
                "t2d",
                r"(.*\.)?rotary_emb\.inv_freq",
                r"embed_tokens\.weight",
                r"verifier_.*",
                MASK_STATE,
            ),
        )
        width, size, eps = len(config.aux_layers) * config.target_size, config.target_size, config.norm_eps
        self.projection = replicated_linear(width, "fc", config.hidden_size, scope)
        self.norm_before_fc = RMSNorm(width, eps=eps, scope=scope.at("input_norm")) if config.norm_before_fc else None
        norms = [RMSNorm(size, eps=eps, scope=scope.at(f"fc_norm.{i}")) for i in range(len(config.aux_layers))]
        self.fc_norms = nnx.List[Any](norms if config.fc_norm else [])
        self.norm_output, self.projects_mask = config.norm_output, config.mask_size == width
        mask = None if config.mask_size is None else whole(scope.at(MASK_STATE).module, (1, config.mask_size))
        self.mask_hidden = None if mask is None else matrix(mask, (None, "embed"), scope, 0)

    def seen_state(
        self,
        target: CausalLM,
        hidden: Float[Array, "T target"],
        aux: Float[Array, "T aux"] | None,
        num_tokens: Int[Array, ""] | None = None,
    ) -> Float[Array, "T D"]:
        """Return the projection of the inputs of ``aux_layers``, those of the lowest layer first."""
        assert aux is not None, "the target returns the inputs of aux_layers"
        if self.norm_before_fc is not None:
            aux = self.norm_before_fc(aux)
        if self.fc_norms:
            parts = zip(self.fc_norms, jnp.split(aux, len(self.fc_norms), 1), strict=True)
            aux = jnp.concatenate([norm(part) for norm, part in parts], 1)
        return self.projection(aux, num_rows=num_tokens)

    def combined(
        self, embedded: Float[Array, "T D"], state: Float[Array, "T D"], num_tokens: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Return embedding and state side by side."""
        return jnp.concatenate([embedded, state.astype(embedded.dtype)], 1)

    def next_state(self, hidden: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return the last layer's output, normalized if the head's config says so."""
        return self.final(hidden) if self.norm_output else hidden

    def mask_state(self, target: CausalLM) -> Float[Array, " D"] | None:
        """Return the state before mask tokens; None if the head has none."""
        if self.mask_hidden is None:
            return None
        given = self.mask_hidden[...]
        return (self.seen_state(target, given, given) if self.projects_mask else given)[0]

    def names_of(self, tensor: str) -> tuple[str, ...]:
        """Return the names of a tensor in speculators' checkpoints, and in original ones."""
        return tensor, tensor.replace("layers.0.", "midlayer.", 1)
