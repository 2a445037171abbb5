"""Mixtral: Mistral with a mixture of experts in every layer (arXiv:2401.04088)."""

from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_one_window
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_routing

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8, norm_eps=1e-5, rope=RopeDefaults(theta=1_000_000.0), windows=read_one_window
)
_NAMES: Final = ExpertNames(("experts.{}.w1", "experts.{}.w3"), "experts.{}.w2")


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of MixtralForCausalLM; ``intermediate_size`` is that of each expert."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    return SparseConfig(
        **vars(base),
        routing=read_routing(fields, "num_local_experts", 8, 2, is_normalized=True),
        expert_ffn_size=base.ffn_size,
        sparse_layers=(True,) * base.num_layers,
    )


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, partial(build_sparse_layer, module="block_sparse_moe", names=_NAMES))
