"""Kimi-Linear: Kimi's delta attention in most layers, latent attention without positions in the others, and experts."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.decoder import Layer
from jaxserve.layers.kimi_delta import KimiDelta
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.parallel import Scope
from jaxserve.layers.recurrent_decoder import RecurrentLayer
from jaxserve.layers.sparse_mlp import ExpertNames, SparseMLP
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder, build_layer, build_mlp, build_norm, extra_layers
from jaxserve.models.deepseek_v2 import DeepseekConfig, build_latent_attention, read_deepseek
from jaxserve.models.deepseek_v3 import read_corrected_routing
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes
from jaxserve.models.hybrid import no_windows, read_recurrent_layers
from jaxserve.models.sparse_decoder import build_sparse_mlp, read_listed_sparse_layers

_DEFAULTS: Final = FamilyDefaults(
    norm_eps=1e-5,
    head_dim=64,
    bos_token_id=163584,
    eos_token_ids=(163586,),
    attention_bias=False,
    windows=no_windows,
    sizes=class_sizes(163840, 2304, 9216, 27, 32, 1048576),
)
_ALIASES: Final = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names of fields in published files, and those of DeepSeek-V3."""
_MISSING: Final = {"q_lora_rank": None, "moe_intermediate_size": 1024, "n_shared_experts": 1}
_NESTED: Final = "linear_attn_config"
_SIZES: Final = {
    "num_heads": ("linear_num_heads", 32),
    "head_dim": ("linear_head_dim", 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}
"""Sizes in ``linear_attn_config``: their names outside it, which transformers writes, and their defaults."""
_LISTS: Final = {"kda_layers": True, "full_attn_layers": False}
_KINDS: Final = {"linear_attention": True, "full_attention": False}
_NAMES: Final = ExpertNames(("experts.{}.w1", "experts.{}.w3"), "experts.{}.w2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(DeepseekConfig):
    """Kimi-Linear.

    Attributes:
        recurrent_layers: For each layer, whether it is recurrent.
        delta_heads: Heads of the recurrent layers.
        delta_dim: Features of each of them.
        taps: Tokens that a convolution spans.
    """

    recurrent_layers: tuple[bool, ...]
    delta_heads: int
    delta_dim: int
    taps: int


def config_from_hf(fields: ConfigFields, architecture: str) -> KimiLinearConfig:
    """Read a config of KimiLinearForCausalLM, whose attention has no rotary embedding, whatever ``rope_theta`` says."""
    if not fields.flag("mla_use_nope", True):
        fields.note("mla_use_nope", "expected true: attention with a rotary embedding is not supported here")
    fields = fields.with_aliases(_ALIASES).with_missing(_MISSING)
    base = read_deepseek(
        fields,
        architecture,
        _DEFAULTS,
        partial(read_corrected_routing, experts=256, per_token=8, scale=2.446, groups=(1, 1)),
        dense_layers=1,
        is_interleaved=False,
        num_extra_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
    )
    if base.rope.kind != "default":
        fields.note("rope_scaling", f"expected none, as attention has no rotary embedding, got {base.rope.kind}")
    if fields.is_given("mlp_layer_types"):
        base = dataclasses.replace(base, sparse_layers=read_listed_sparse_layers(fields, base.num_layers))
    heads, head_dim, taps = _read_sizes(fields)
    return KimiLinearConfig(
        **{**vars(base), "rope_layers": (False,) * base.num_layers},
        recurrent_layers=_read_layers(fields, base.num_layers),
        delta_heads=heads,
        delta_dim=head_dim,
        taps=taps,
    )


def _read_sizes(fields: ConfigFields) -> list[int]:
    """Return the heads of recurrent layers, their features, and the taps of the convolutions."""
    nested, found = fields.nested(_NESTED), list[int]()
    for name, (outside, default) in _SIZES.items():
        least = 2 if name == "short_conv_kernel_size" else 1
        stated = fields.integer(outside, default, minimum=least)
        found.append(nested.integer(name, stated, minimum=least))
        if fields.is_given(outside) and found[-1] != stated:
            nested.note(name, f"expected {stated}, as {outside} says, got {found[-1]}")
    return found


def _read_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers are recurrent: lists in ``linear_attn_config`` have the layers' numbers from 1 on; without
    them and ``layer_types``, every fourth layer after the first has attention."""
    types, lists = read_recurrent_layers(fields, num_layers, _KINDS), _read_lists(fields, num_layers)
    if types is None:
        return lists or tuple(index == 0 or index % 4 != 0 for index in range(num_layers))
    if lists is not None and lists != types:
        layers = [str(index + 1) for index in range(num_layers) if lists[index] != types[index]]
        fields.note("layer_types", f"differs from the lists in {_NESTED}, which count from 1, in {', '.join(layers)}")
    return types


def _read_lists(fields: ConfigFields, num_layers: int) -> tuple[bool, ...] | None:
    """Return which layers the lists in ``linear_attn_config`` name recurrent; None if there are none or wrong ones."""
    nested, kinds = fields.nested(_NESTED), dict[int, bool]()
    if not any(map(nested.is_given, _LISTS)):
        return None
    for name, is_recurrent in _LISTS.items():
        numbers = _read_numbers(nested, name, num_layers)
        twice = sorted({each for each in numbers if each in kinds or numbers.count(each) > 1})
        if twice:
            nested.note(name, f"has layers that are listed already: {', '.join(map(str, twice))}")
        kinds |= dict.fromkeys(numbers, is_recurrent)
    lost = [str(number) for number in range(1, num_layers + 1) if number not in kinds]
    if lost and all(map(nested.is_given, _LISTS)):
        nested.note("kda_layers", f"neither this nor full_attn_layers has the layers {', '.join(lost)}")
    return None if lost else tuple(kinds[number] for number in range(1, num_layers + 1))


def _read_numbers(nested: ConfigFields, name: str, num_layers: int) -> list[int]:
    """Return the numbers of layers in a list."""
    items = nested.items(name)
    if items is None:
        nested.note(name, f"expected numbers of layers, 1 to {num_layers}, but it is missing")
        return []
    numbers, wrong = list[int](), list[str]()
    for each in items:
        if isinstance(each, int) and not isinstance(each, bool) and 1 <= each <= num_layers:
            numbers.append(each)
        else:
            wrong.append(repr(each))
    if wrong:
        nested.note(name, f"expected numbers of layers, 1 to {num_layers}, got {', '.join(wrong)}")
    return numbers


def build(config: KimiLinearConfig, scope: Scope) -> CausalLM:
    """Return the module; layers for multi-token prediction are not loaded.

    Files that transformers saved have the dense layers' MLP under the name of the experts.
    """
    ignored = extra_layers(config.num_layers, config.num_extra_layers)
    model = build_decoder(config, scope, _build_layer, ignored=ignored, ropes=())
    model.renamed = (r"\.mlp\.", ".block_sparse_moe.")
    return model


def _build_layer(config: KimiLinearConfig, index: int, scope: Scope) -> Layer:
    mlp, inner = _build_mlp(config, index, scope), scope.at("self_attn")
    if not config.recurrent_layers[index]:
        attention = build_latent_attention(config, inner, rope=None)
        return build_layer(config, index, scope, mlp=mlp, attention=attention)
    sizes = config.hidden_size, config.delta_heads, config.delta_dim, config.taps
    mixer = KimiDelta(*sizes, norm_eps=config.norm_eps, scope=inner)
    norms = [build_norm(config, scope.at(name)) for name in ("input_layernorm", "post_attention_layernorm")]
    return RecurrentLayer(norms[0], mixer, norms[1], mlp)


def _build_mlp(config: KimiLinearConfig, index: int, scope: Scope) -> GatedMLP | SparseMLP:
    if config.sparse_layers[index]:
        return build_sparse_mlp(config, scope.at("block_sparse_moe"), names=_NAMES, shared="shared_experts")
    return build_mlp(config, scope.at("mlp"))
