"""Command A+: Cohere 2 with experts, whose sum and the shared expert's output are averaged, after dense layers."""

import dataclasses
from typing import Final

from jaxserve.layers.decoder import LayerNormLayer
from jaxserve.layers.norm import LayerNorm, RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.routing import Routing
from jaxserve.models import cohere2
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_decoder, build_layer_norm, build_mlp, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import Windows, read_decoder, read_windows
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_mlp, read_listed_sparse_layers, read_routing


def _read_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Read the windows: the first, dense layers have a pattern of their own."""
    window = fields.nullable_integer("sliding_window", 4096)
    first = fields.integer("prefix_dense_sliding_window_pattern", 1)
    pattern = fields.integer("sliding_window_pattern", 4)
    dense = min(fields.integer("first_k_dense_replace", 0, minimum=0), num_layers)
    sliding = [(index + 1) % first != 0 for index in range(dense)]
    sliding += [(index + 1) % pattern != 0 for index in range(num_layers - dense)]
    return read_windows(fields, window, sliding)


_DEFAULTS: Final = dataclasses.replace(cohere2.DEFAULTS, head_dim=128, windows=_read_windows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohere2MoeConfig(SparseConfig):
    """A decoder of Cohere 2 MoE's form.

    Attributes:
        logits_scale: Factor of the logits.
        has_layer_norm: Whether its norms are layer norms, rather than RMSNorms.
        is_mean: As in ``SparseMLP``.
    """

    logits_scale: float
    has_layer_norm: bool
    is_mean: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> Cohere2MoeConfig:
    """Read a config of Cohere2MoeForCausalLM: ``rms_norm_eps`` means RMSNorms; dense layers rotate although they are
    full, unless their windows have a pattern."""
    has_layer_norm = not fields.is_given("rms_norm_eps")
    if has_layer_norm:
        fields = fields.replaced({"rms_norm_eps": fields.raw.get("layer_norm_eps")})
    base = read_decoder(fields, architecture, _DEFAULTS)
    dense = fields.integer("first_k_dense_replace", 0, minimum=0)
    sparse_layers = read_listed_sparse_layers(fields, base.num_layers, num_dense=dense)
    is_prefix_full = fields.integer("prefix_dense_sliding_window_pattern", 1) == 1
    kinds = zip(base.sliding_windows, sparse_layers, strict=True)
    rope_layers = [window is not None or (is_prefix_full and not is_sparse) for window, is_sparse in kinds]
    dense_ffn_size = fields.nullable_integer("prefix_dense_intermediate_size", None) or base.ffn_size
    return Cohere2MoeConfig(
        **vars(dataclasses.replace(base, rope_layers=tuple(rope_layers), ffn_size=dense_ffn_size)),
        routing=_read_routing(fields),
        expert_ffn_size=base.ffn_size,
        shared_ffn_size=base.ffn_size * fields.integer("num_shared_experts", 0, minimum=0),
        sparse_layers=sparse_layers,
        logits_scale=fields.number("logit_scale", 0.0625),
        has_layer_norm=has_layer_norm,
        is_mean=_choice(fields, "shared_expert_combination_strategy", ("average", "sum")) == "average",
    )


def _read_routing(fields: ConfigFields) -> Routing:
    """Read how experts are chosen: a softmax over the chosen ones, or a sigmoid of each."""
    is_softmax = _choice(fields, "expert_selection_fn", ("softmax", "sigmoid")) == "softmax"
    is_normalized = fields.flag("norm_topk_prob", True) or is_softmax
    scoring = "softmax" if is_softmax else "sigmoid"
    return read_routing(fields, "num_experts", 8, 2, is_normalized=is_normalized, scoring=scoring)


def _choice(fields: ConfigFields, field: str, choices: tuple[str, str]) -> str:
    """Read one of two strings, the first by default."""
    given = fields.text(field, choices[0])
    if given not in choices:
        fields.note(field, f"expected {' or '.join(choices)}, got {given!r}")
    return given


def build(config: Cohere2MoeConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    norm = _build_norm(config, scope.at("model.norm"))
    return build_decoder(config, scope, _build_layer, norm=norm, logits_divisor=1.0 / config.logits_scale)


def _build_norm(config: Cohere2MoeConfig, scope: Scope) -> LayerNorm | RMSNorm:
    return build_layer_norm(config, scope, has_bias=False) if config.has_layer_norm else build_norm(config, scope)


def _build_layer(config: Cohere2MoeConfig, index: int, scope: Scope) -> LayerNormLayer:
    inner, paired_dim = scope.at("mlp"), config.head_dim if config.rope_layers[index] else 0
    norm = _build_norm(config, scope.at("input_layernorm"))
    attention = build_attention(config, index, scope.at("self_attn"), paired_dim=paired_dim)
    if config.sparse_layers[index]:
        mlp = build_sparse_mlp(config, inner, shared="shared_experts", is_mean=config.is_mean)
    else:
        mlp = build_mlp(config, inner)
    return LayerNormLayer(norm, attention, None, mlp, is_parallel=True)
