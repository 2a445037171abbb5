"""K-EXAONE: EXAONE 4's windows with norms before each branch, and DeepSeek-V3's experts after a dense layer."""

from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder
from jaxserve.models.deepseek_v3 import read_corrected_routing
from jaxserve.models.exaone4 import read_exaone, read_exaone_windows
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_listed_sparse_layers

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=32,
    norm_eps=1e-5,
    eos_token_ids=(53,),
    windows=read_exaone_windows,
    sizes=class_sizes(102400, 4096, 16384, 32, 32, 2048),
)
_NAMES: Final = ExpertNames(correction="e_score_correction_bias")


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of ExaoneMoeForCausalLM."""
    fields = fields.with_aliases({"num_experts": "n_routed_experts"})
    base = read_exaone(fields, architecture, _DEFAULTS)
    dense = fields.integer("first_k_dense_replace", 1, minimum=0)
    expert_ffn_size = fields.integer("moe_intermediate_size", 1024)
    return SparseConfig(
        **vars(base),
        routing=read_corrected_routing(fields, experts=64, per_token=8, scale=2.5, groups=(1, 1)),
        expert_ffn_size=expert_ffn_size,
        shared_ffn_size=expert_ffn_size * fields.integer("num_shared_experts", 1, minimum=0),
        sparse_layers=read_listed_sparse_layers(fields, base.num_layers, num_dense=dense),
    )


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module; layers for multi-token prediction are not loaded."""
    layer = partial(build_sparse_layer, qk_norm="head", names=_NAMES, shared="shared_experts")
    return build_decoder(config, scope, layer, ignored=(r"mtp\..*",))
