"""OLMoE (arXiv:2409.02060): queries and keys normalized over all heads at once, and experts in every layer."""

from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_routing

_DEFAULTS: Final = FamilyDefaults(
    norm_eps=1e-5,
    bos_token_id=None,
    eos_token_ids=(50279,),
    attention_bias=False,
    sizes=class_sizes(50304, 2048, 2048, 16, 16, 4096),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of OlmoeForCausalLM: ``intermediate_size`` is that of each expert."""
    if fields.is_given("clip_qkv"):
        fields.note(
            "clip_qkv", f"expected null: queries, keys and values are not clipped, got {fields.raw['clip_qkv']}"
        )
    return read_olmoe(fields, architecture, _DEFAULTS, experts=64, per_token=8)


def read_olmoe(
    fields: ConfigFields, architecture: str, defaults: FamilyDefaults, *, experts: int, per_token: int
) -> SparseConfig:
    """Read the fields that OLMoE and FlexOLMo share; ``experts`` and ``per_token`` are the class's numbers."""
    base = read_decoder(fields, architecture, defaults)
    normalized = fields.flag("norm_topk_prob", False)
    return SparseConfig(
        **vars(base),
        routing=read_routing(fields, "num_experts", experts, per_token, is_normalized=normalized),
        expert_ffn_size=base.ffn_size,
        sparse_layers=(True,) * base.num_layers,
    )


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, partial(build_sparse_layer, qk_norm="width"))
