"""dots.llm1: Qwen3's attention, and experts whose choice a bias balances, as in DeepSeek-V3."""

from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder
from jaxserve.models.deepseek_v3 import read_corrected_routing
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, Windows, class_sizes, read_decoder, read_windows
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer


def _read_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Read the windows: in the layers from ``max_window_layers`` on."""
    window = fields.nullable_integer("sliding_window", 4096)
    first = fields.integer("max_window_layers", 62, minimum=0)
    return read_windows(fields, window, [window is not None and index >= first for index in range(num_layers)])


_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=32,
    bos_token_id=None,
    eos_token_ids=(),
    attention_bias=False,
    windows=_read_windows,
    sizes=class_sizes(152064, 4608, 10944, 62, 32, 2048),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of Dots1ForCausalLM, whose published files call a sigmoid with a bias ``noaux_tc``."""
    fields = fields.with_defaults({"norm_topk_prob": False})
    if fields.raw.get("scoring_func") == "noaux_tc":
        fields = fields.replaced({"scoring_func": "sigmoid"})
    base = read_decoder(fields, architecture, _DEFAULTS)
    dense, expert_ffn_size = (
        fields.integer("first_k_dense_replace", 0, minimum=0),
        fields.integer("moe_intermediate_size", 1408),
    )
    return SparseConfig(
        **vars(base),
        routing=read_corrected_routing(fields, experts=128, per_token=6, scale=1.0, groups=(1, 1)),
        expert_ffn_size=expert_ffn_size,
        shared_ffn_size=expert_ffn_size * fields.integer("n_shared_experts", 2, minimum=0),
        sparse_layers=tuple(index >= dense for index in range(base.num_layers)),
    )


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module, with a norm of each query and key head."""
    return build_decoder(config, scope, partial(build_sparse_layer, qk_norm="head", shared="shared_experts"))
