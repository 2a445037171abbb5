"""GPT-OSS (arXiv:2508.10925): attention sinks, windows in every other layer, experts with biases in every layer."""

import dataclasses
from typing import Any, Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.expert_activations import ClampedSwiGLU
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames, SparseMLP
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_decoder, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, Windows, read_decoder, read_windows
from jaxserve.models.hf_rope import RopeDefaults, with_default_rope
from jaxserve.models.sparse_decoder import SparseConfig, read_routing


def _read_windows(fields: ConfigFields, num_layers: int) -> Windows:
    window = fields.nullable_integer("sliding_window", 128)
    return read_windows(fields, window, [layer % 2 == 0 for layer in range(num_layers)])


_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    head_dim=64,
    norm_eps=1e-5,
    rope=RopeDefaults(theta=150_000.0),
    bos_token_id=None,
    eos_token_ids=(),
    attention_bias=True,
    windows=_read_windows,
)
_YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_NAMES: Final = ExpertNames(
    ("experts.gate_up_proj",),
    "experts.down_proj",
    "router",
    tensor="",
    is_transposed=True,
    is_interleaved=True,
    biases=("experts.gate_up_proj_bias", "experts.down_proj_bias"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(SparseConfig):
    """A decoder of GPT-OSS's form.

    Attributes:
        gating: Activation of the experts.
    """

    gating: ClampedSwiGLU


def config_from_hf(fields: ConfigFields, architecture: str) -> GptOssConfig:
    """Read a config of GptOssForCausalLM: without ``layer_types`` every other layer slides, from the first on."""
    fields = fields.with_aliases({"num_experts": "num_local_experts"})
    fields = with_default_rope(fields, _YARN)
    base = read_decoder(fields, architecture, _DEFAULTS)
    return GptOssConfig(
        **vars(base),
        routing=read_routing(fields, "num_local_experts", 128, 4, is_normalized=True),
        expert_ffn_size=base.ffn_size,
        sparse_layers=(True,) * base.num_layers,
        gating=ClampedSwiGLU(
            alpha=fields.number("swiglu_alpha", 1.702),
            limit=fields.number("swiglu_limit", 7.0),
        ),
    )


def build(config: GptOssConfig, scope: Scope) -> CausalLM:
    """Return the module, of its own layers."""
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: GptOssConfig, index: int, scope: Scope) -> PreNormLayer:
    return PreNormLayer(
        build_norm(config, scope.at("input_layernorm")),
        build_attention(config, index, scope.at("self_attn"), has_sinks=True),
        build_norm(config, scope.at("post_attention_layernorm")),
        SparseMLP(
            config.hidden_size,
            config.expert_ffn_size,
            config.routing,
            scope=scope.at("mlp"),
            names=_NAMES,
            activation=config.gating,
            router_bias=True,
        ),
    )
