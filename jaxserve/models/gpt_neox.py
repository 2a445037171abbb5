"""GPT-NeoX and Pythia (arXiv:2204.06745): layer norms with biases, a plain MLP, and branches that run in parallel."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.decoder import LayerNormLayer
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.mlp import PlainMLP
from jaxserve.layers.norm import LayerNorm
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder
from jaxserve.models.hf_rope import RopeDefaults

_DEFAULTS: Final = FamilyDefaults(
    rope=RopeDefaults(is_partial=True, partial_factor=0.25),
    bos_token_id=0,
    activation="gelu",
    attention_bias=True,
)
_PREFIX: Final = "gpt_neox"
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
    given = dataclasses.replace(
        base,
        num_kv_heads=base.num_heads,
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        mlp_bias=True,
    )
    return NeoXConfig(**vars(given), is_parallel=fields.flag("use_parallel_residual", True))


def build(config: NeoXConfig, scope: Scope) -> CausalLM:
    """Return the module, with the names of its own checkpoints."""
    sizes, inner = (config.vocab_size, config.hidden_size), scope.at(_PREFIX)
    return CausalLM(
        config,
        embed=VocabEmbedding(*sizes, scope=inner.at("embed_in")),
        layers=[_build_layer(config, index, inner.at(f"layers.{index}")) for index in range(config.num_layers)],
        norm=LayerNorm(config.hidden_size, eps=config.norm_eps, scope=inner.at("final_layer_norm")),
        head=None if config.tie_embeddings else VocabEmbedding(*sizes, scope=scope.at("embed_out")),
        ignored=(r".*\.rotary_emb\.inv_freq", r".*\.attention\.(masked_)?bias"),
        optional_prefix=f"{_PREFIX}.",
        head_names=("embed_out.weight", "lm_head.weight"),
    )


def _build_layer(config: NeoXConfig, index: int, scope: Scope) -> LayerNormLayer:
    norm = partial(LayerNorm, config.hidden_size, eps=config.norm_eps)
    return LayerNormLayer(
        norm(scope=scope.at("input_layernorm")),
        build_attention(
            config, index, scope.at("attention"), qkv=("query_key_value",), is_interleaved=True, out="dense"
        ),
        norm(scope=scope.at("post_attention_layernorm")),
        PlainMLP(
            config.hidden_size,
            config.ffn_size,
            activation=config.activation,
            scope=scope.at("mlp"),
            up="dense_h_to_4h",
            down="dense_4h_to_h",
        ),
        is_parallel=config.is_parallel,
    )
