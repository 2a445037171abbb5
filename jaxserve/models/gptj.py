"""GPT-J: attention and a plain MLP read the same layer norm; some features of each head rotate, in pairs."""

from typing import Final

from jaxserve.layers.decoder import LayerNormLayer
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_layer_norm, build_plain_mlp
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder
from jaxserve.models.hf_rope import RopeDefaults

_NAMES: Final = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
_DEFAULTS: Final = FamilyDefaults(
    norm_eps=1e-5,
    rope=RopeDefaults(is_partial=True),
    bos_token_id=50256,
    eos_token_ids=(50256,),
    activation="gelu_new",
    activation_field="activation_function",
    has_gates=False,
    mlp_bias=True,
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of GPTJForCausalLM: ``rotary_dim`` is the number of features of a head that rotate."""
    fields = fields.with_aliases(_NAMES)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = max(1, hidden_size // num_heads)
    rotary_dim = fields.nullable_integer("rotary_dim", 64) or head_dim
    implied = {
        "num_key_value_heads": num_heads,
        "head_dim": None,
        "mlp_bias": True,
        "intermediate_size": fields.nullable_integer("n_inner", None) or 4 * hidden_size,
        "rope_parameters": {"partial_rotary_factor": min(rotary_dim, head_dim) / head_dim},
        "rope_scaling": None,
        "rms_norm_eps": fields.raw.get("layer_norm_epsilon"),
    }
    return read_decoder(fields.replaced(implied), architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module, with the names of its own checkpoints."""
    sizes, inner = (config.vocab_size, config.hidden_size), scope.at("transformer")
    return CausalLM(
        config,
        embed=VocabEmbedding(*sizes, scope=inner.at("wte")),
        layers=[_build_layer(config, index, inner.at(f"h.{index}")) for index in range(config.num_layers)],
        norm=build_layer_norm(config, inner.at("ln_f")),
        head=None if config.tie_embeddings else VocabEmbedding(*sizes, scope=scope.at("lm_head"), has_bias=True),
        ignored=(r".*\.attn\.(masked_)?bias",),
        optional_prefix="transformer.",
    )


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> LayerNormLayer:
    attention = build_attention(config, index, scope.at("attn"), out="out_proj", paired_dim=config.rope.rotary_dim)
    mlp = build_plain_mlp(config, scope.at("mlp"), "fc_in", "fc_out")
    return LayerNormLayer(build_layer_norm(config, scope.at("ln_1")), attention, None, mlp, is_parallel=True)
