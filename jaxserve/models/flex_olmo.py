"""FlexOLMo (arXiv:2507.07024): OLMo-2 with OLMoE's experts in every layer."""

from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.olmo2 import PostNormLayer, build_post_norm_layer
from jaxserve.models.olmoe import read_olmoe
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_mlp

_DEFAULTS: Final = FamilyDefaults(
    rope=RopeDefaults(theta=500_000.0),
    bos_token_id=None,
    eos_token_ids=(100257,),
    attention_bias=False,
    sizes=class_sizes(100352, 4096, 11008, 32, 32, 4096),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of FlexOlmoForCausalLM: ``intermediate_size`` is that of each expert."""
    return read_olmoe(fields, architecture, _DEFAULTS, experts=7, per_token=5)


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: SparseConfig, index: int, scope: Scope) -> PostNormLayer:
    return build_post_norm_layer(config, index, scope, mlp=build_sparse_mlp(config, scope.at("mlp")), qk_norm="width")
