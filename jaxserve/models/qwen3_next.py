"""Qwen3-Next and the language models of Qwen3.5: gated delta nets in most layers, gated attention in the others.

Qwen3.5 differs in what it leaves out of ``config.json``, and in the modules of the delta net's projection.
"""

import dataclasses
from typing import Any, Final

from jaxserve.layers.decoder import Layer
from jaxserve.layers.delta_net import DeltaNet, delta_net_rows, grouped_delta_net_rows
from jaxserve.layers.grouped_query_attention import OutputGate
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.parallel import Scope
from jaxserve.layers.recurrent_decoder import RecurrentLayer
from jaxserve.layers.sparse_mlp import SparseMLP
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_decoder, build_layer, build_mlp, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.hybrid import NO_ROUTING, HybridConfig, no_windows, read_recurrent_layers
from jaxserve.models.sparse_decoder import build_sparse_mlp, read_routing, read_sparse_layers
from pallas_kernels.delta_net import DeltaNetSizes

_KINDS: Final = {"linear_attention": True, "full_attention": False}
_SIZES: Final = {
    "Qwen3NextForCausalLM": class_sizes(151936, 2048, 5632, 48, 16, 32768),
    "Qwen3_5ForCausalLM": class_sizes(248320, 4096, 12288, 32, 16, 32768),
    "Qwen3_5MoeForCausalLM": class_sizes(248320, 2048, 512, 40, 16, 32768),
}
_EXPERTS: Final[dict[str, tuple[int, int]]] = {"Qwen3NextForCausalLM": (512, 10), "Qwen3_5MoeForCausalLM": (256, 8)}
"""Experts, and experts per token, of the classes that have some."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(HybridConfig):
    """Qwen3-Next or Qwen3.5.

    Attributes:
        delta_net: Heads of the delta nets.
        taps: Tokens that a convolution spans.
        is_grouped: Whether checkpoints have the delta net's projection in groups of one key head.
    """

    delta_net: DeltaNetSizes
    taps: int
    is_grouped: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> Qwen3NextConfig:
    """Read a config of Qwen3NextForCausalLM, Qwen3_5ForCausalLM or Qwen3_5MoeForCausalLM."""
    defaults = FamilyDefaults(
        num_kv_heads=4 if architecture == "Qwen3_5ForCausalLM" else 2,
        head_dim=256,
        rope=RopeDefaults(is_partial=True, partial_factor=0.25),
        bos_token_id=None,
        eos_token_ids=(),
        attention_bias=False,
        norm_offset=1.0,
        windows=no_windows,
        sizes=_SIZES[architecture],
    )
    base = read_decoder(fields, architecture, defaults)
    recurrent = read_recurrent_layers(fields, base.num_layers, _KINDS)
    if recurrent is None:
        interval = fields.integer("full_attention_interval", 4)
        recurrent = tuple((index + 1) % interval != 0 for index in range(base.num_layers))
    return Qwen3NextConfig(
        **vars(base),
        **_read_experts(fields, architecture, base.num_layers),
        recurrent_layers=recurrent,
        delta_net=_read_delta_net(fields),
        taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        is_grouped=architecture.startswith("Qwen3Next"),
    )


def _read_experts(fields: ConfigFields, architecture: str, num_layers: int) -> dict[str, Any]:
    """Return the fields of ``SparseConfig``."""
    if architecture not in _EXPERTS:
        return {"routing": NO_ROUTING, "expert_ffn_size": 0, "sparse_layers": (False,) * num_layers}
    may_be_dense = architecture.startswith("Qwen3Next")
    normalized = not may_be_dense or fields.flag("norm_topk_prob", True)
    return {
        "routing": read_routing(fields, "num_experts", *_EXPERTS[architecture], is_normalized=normalized),
        "expert_ffn_size": fields.integer("moe_intermediate_size", 512),
        "shared_ffn_size": fields.integer("shared_expert_intermediate_size", 512),
        "sparse_layers": read_sparse_layers(fields, num_layers) if may_be_dense else (True,) * num_layers,
    }


def _read_delta_net(fields: ConfigFields) -> DeltaNetSizes:
    keys, values = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if values % keys:
        fields.note("linear_num_value_heads", f"expected a multiple of the {keys} key heads, got {values}")
        values = keys
    return DeltaNetSizes(
        keys, values, fields.integer("linear_key_head_dim", 128), fields.integer("linear_value_head_dim", 128)
    )


def build(config: Qwen3NextConfig, scope: Scope) -> CausalLM:
    """Return the module; layers for multi-token prediction are not loaded."""
    return build_decoder(config, scope, build_qwen_layer, ignored=(r"mtp\..*",))


def build_qwen_layer(config: Qwen3NextConfig, index: int, scope: Scope) -> Layer:
    """Build a layer: recurrent, or with attention."""
    mlp = _build_mlp(config, index, scope.at("mlp"))
    if not config.recurrent_layers[index]:
        gate = OutputGate("q_proj", "sigmoid", follows_query=True)
        attention = build_attention(config, index, scope.at("self_attn"), qk_norm="head", gate=gate)
        return build_layer(config, index, scope, mlp=mlp, attention=attention)
    sizes = config.delta_net
    rows = delta_net_rows(sizes, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
    if config.is_grouped:
        rows = grouped_delta_net_rows(sizes, ("in_proj_qkvz", "in_proj_ba"))
    mixer = DeltaNet(
        config.hidden_size, sizes, config.taps, norm_eps=config.norm_eps, rows=rows, scope=scope.at("linear_attn")
    )
    norms = [build_norm(config, scope.at(name)) for name in ("input_layernorm", "post_attention_layernorm")]
    return RecurrentLayer(norms[0], mixer, norms[1], mlp)


def _build_mlp(config: Qwen3NextConfig, index: int, scope: Scope) -> GatedMLP | SparseMLP:
    if config.sparse_layers[index]:
        return build_sparse_mlp(config, scope, shared_gate="shared_expert_gate")
    return build_mlp(config, scope)
