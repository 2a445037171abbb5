"""GPT-NeoX and Pythia (arXiv:2204.06745): layer norms with biases, a plain MLP, and branches that run in parallel."""

import dataclasses
from typing import Final

from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention
from jaxserve.layers.decoder import DecoderLayer
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.mlp import PlainMLP
from jaxserve.layers.norm import LayerNorm
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_one_window
from jaxserve.models.hf_rope import RopeDefaults

_DEFAULTS: Final = FamilyDefaults(
    rope=RopeDefaults(is_partial=True, partial_factor=0.25),
    bos_token_id=0,
    activation="gelu",
)
_OLDER_NAMES: Final = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeoXConfig(DecoderConfig):
    """A decoder of GPT-NeoX's form.

    Attributes:
        is_parallel: Whether both branches read the layer's input.
    """

    is_parallel: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> NeoXConfig:
    """Read a config of GPTNeoXForCausalLM; every head has its own keys and values."""
    base = read_decoder(fields.with_aliases(_OLDER_NAMES), architecture, _DEFAULTS)
    has_bias = fields.flag("attention_bias", True)
    given = dataclasses.replace(
        base,
        num_kv_heads=base.num_heads,
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=True,
        sliding_windows=read_one_window(fields, None, base.num_layers),
    )
    return NeoXConfig(**vars(given), is_parallel=fields.flag("use_parallel_residual", True))


def build(config: NeoXConfig, scope: Scope) -> CausalLM:
    """Return the module, with the names of its own checkpoints."""
    sizes, inner = (config.vocab_size, config.hidden_size), scope.at("gpt_neox")
    unused = (r".*\.rotary_emb\.inv_freq", r".*\.attention\.(masked_)?bias")
    return CausalLM(
        config,
        embed=VocabEmbedding(*sizes, scope=inner.at("embed_in")),
        layers=[NeoXLayer(config, index, inner.at(f"layers.{index}")) for index in range(config.num_layers)],
        norm=LayerNorm(config.hidden_size, eps=config.norm_eps, scope=inner.at("final_layer_norm")),
        head=None if config.tie_embeddings else VocabEmbedding(*sizes, scope=scope.at("embed_out")),
        ignored=(*unused, *((r"embed_out\.weight",) if config.tie_embeddings else ())),
    )


class NeoXLayer(DecoderLayer):
    """``x + attention(norm(x)) + mlp(other_norm(x))``, or one branch after the other."""

    def __init__(self, config: NeoXConfig, index: int, scope: Scope):
        attention: Attention = build_attention(
            config, index, scope.at("attention"), qkv=("query_key_value",), is_interleaved=True, out="dense"
        )
        super().__init__(attention)
        size = config.hidden_size
        self.is_parallel = config.is_parallel
        self.attention_norm = LayerNorm(size, eps=config.norm_eps, scope=scope.at("input_layernorm"))
        self.mlp_norm = LayerNorm(size, eps=config.norm_eps, scope=scope.at("post_attention_layernorm"))
        self.mlp = PlainMLP(
            size,
            config.ffn_size,
            activation=config.activation,
            scope=scope.at("mlp"),
            up="dense_h_to_4h",
            down="dense_4h_to_h",
        )

    @property
    def has_fused_norms(self) -> bool:
        """Return False: no kernel fuses a layer norm."""
        return False

    def projected(self, x: Float[Array, "T D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        """Compute queries, keys and values of the normalized input."""
        return self.attention.project(self.attention_norm(x), num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "T D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "T D"]:
        """Return the layer's output from its input and the attention output."""
        after = self.attention.output(attended, residual=x, num_rows=num_rows)
        normed = self.mlp_norm(x if self.is_parallel else after)
        return self.mlp(normed, residual=after, num_rows=num_rows)
