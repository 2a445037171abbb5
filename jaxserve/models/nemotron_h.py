"""Nemotron-H and Nemotron 3: each layer is one mixer after one norm: Mamba-2, attention, an MLP or experts."""

import dataclasses
from typing import Any, Final

from jaxserve.layers.decoder import Layer
from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.expert_activations import SquaredReLU
from jaxserve.layers.mamba2 import Mamba2, Mamba2Options
from jaxserve.layers.mlp import PlainMLP
from jaxserve.layers.parallel import Scope
from jaxserve.layers.recurrent_decoder import AttentionLayer, MLPLayer, RecurrentLayer
from jaxserve.layers.sparse_mlp import ExpertNames, LatentProjections, SharedExpert, SparseMLP
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_norm
from jaxserve.models.deepseek_v3 import read_corrected_routing
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_layer_list
from jaxserve.models.hybrid import NO_ROUTING, HybridConfig, no_windows, read_mamba
from pallas_kernels.mamba2 import Mamba2Sizes, StepLimits

_KINDS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_LISTED: Final = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    head_dim=128,
    activation="relu2",
    activation_field="mlp_hidden_act",
    has_gates=False,
    mlp_bias=False,
    windows=no_windows,
    sizes=class_sizes(131072, 4096, 21504, 52, 32, 4096),
)
_MAMBA: Final = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "mamba_num_heads": "mamba_n_heads",
    "ssm_state_size": "mamba_d_state",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
"""Names of the fields of Mamba-2 layers, and those of other families."""
_EXPERTS: Final = ExpertNames(("experts.{}.up_proj",), "experts.{}.down_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig(HybridConfig):
    """Nemotron-H.

    Attributes:
        kinds: Kind of each layer, one of the values of ``_KINDS``.
        mamba: Heads of the recurrent layers, and their options.
        latent_size: Features that experts compute; None for the hidden size.
    """

    kinds: tuple[str, ...]
    mamba: tuple[Mamba2Sizes, Mamba2Options]
    latent_size: int | None


def config_from_hf(fields: ConfigFields, architecture: str) -> NemotronHConfig:
    """Read a config of NemotronHForCausalLM, whose number of layers is that of its list of kinds."""
    fields = fields.with_defaults({"layer_norm_epsilon": 1e-5, "time_step_min": 0.001, "mamba_num_heads": 128})
    fields = fields.with_defaults({"mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128})
    kinds = _read_kinds(fields)
    fields = fields.replaced(
        {
            **{own: fields.raw.get(name) for name, own in _MAMBA.items()},
            "rms_norm_eps": fields.raw["layer_norm_epsilon"],
            "num_hidden_layers": len(kinds),
            "mamba_d_head": fields.raw["mamba_head_dim"],
        }
    )
    base = read_decoder(fields, architecture, _DEFAULTS)
    base = dataclasses.replace(base, rope_layers=(False,) * len(kinds))
    inner = fields.integer("mamba_n_heads") * fields.integer("mamba_d_head")
    limits = StepLimits(fields.number("time_step_min", is_zero_allowed=True))
    return NemotronHConfig(
        **vars(base),
        **_read_experts(fields, kinds),
        recurrent_layers=tuple(kind == "mamba" for kind in kinds),
        kinds=kinds,
        mamba=read_mamba(fields, base, 128, inner=inner, limits=limits),
    )


def _read_kinds(fields: ConfigFields) -> tuple[str, ...]:
    """Return the kind of each layer."""
    pattern = fields.text("hybrid_override_pattern", "")
    for name in ("layers_block_type", "layer_types"):
        if fields.is_given(name):
            count = len(fields.items(name) or ()) or 1
            listed = read_layer_list(fields, name, count, tuple(_LISTED))
            return ("mlp",) if listed is None else tuple(_LISTED[str(each)] for each in listed)
    unknown = sorted({*pattern} - _KINDS.keys())
    if unknown or not pattern:
        found = f"got {', '.join(unknown)}" if unknown else "but it is missing"
        fields.note("hybrid_override_pattern", f"expected one of {', '.join(_KINDS)} for each layer, {found}")
        return ("mlp",)
    return tuple(_KINDS[each] for each in pattern)


def _read_experts(fields: ConfigFields, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of ``SparseConfig``, and the size of the latents."""
    if "moe" not in kinds:
        dense = (False,) * len(kinds)
        return {"routing": NO_ROUTING, "expert_ffn_size": 0, "sparse_layers": dense, "latent_size": None}
    if fields.flag("mlp_bias", False):
        fields.note("mlp_bias", "expected false for a model with experts")
    routing = read_corrected_routing(
        fields.replaced({"hidden_act": "silu"}), experts=8, per_token=2, scale=1.0, groups=(1, 1)
    )
    return {
        "routing": routing,
        "expert_ffn_size": fields.integer("moe_intermediate_size", 7688),
        "shared_ffn_size": fields.integer("moe_shared_expert_intermediate_size", 7688),
        "sparse_layers": tuple(kind == "moe" for kind in kinds),
        "latent_size": fields.nullable_integer("moe_latent_size", None),
    }


def build(config: NemotronHConfig, scope: Scope) -> CausalLM:
    """Return the module, with the names of published files; layers for multi-token prediction are not loaded."""
    sizes, inner = (config.vocab_size, config.hidden_size), scope.at("backbone")
    model = CausalLM(
        config,
        embed=VocabEmbedding(*sizes, scope=inner.at("embeddings")),
        layers=[_build_layer(config, index, inner.at(f"layers.{index}")) for index in range(config.num_layers)],
        norm=build_norm(config, inner.at("norm_f")),
        head=None if config.tie_embeddings else VocabEmbedding(*sizes, scope=scope.at("lm_head")),
        ignored=(r"mtp\..*",),
        ropes=(),
        optional_prefix="backbone.",
    )
    model.prefixes = (("model.", ""),)
    return model


def _build_layer(config: NemotronHConfig, index: int, scope: Scope) -> Layer:
    norm, inner = build_norm(config, scope.at("norm")), scope.at("mixer")
    if config.kinds[index] == "mamba":
        return RecurrentLayer(norm, Mamba2(config.hidden_size, *config.mamba, scope=inner))
    if config.kinds[index] == "attention":
        return AttentionLayer(norm, build_attention(config, index, inner))
    if config.kinds[index] == "moe":
        return MLPLayer(norm, _build_experts(config, inner))
    return MLPLayer(norm, _build_mlp(config, config.ffn_size, inner))


def _build_mlp(config: NemotronHConfig, ffn_size: int, scope: Scope) -> PlainMLP:
    return PlainMLP(
        config.hidden_size,
        ffn_size,
        activation=config.activation,
        bias=config.mlp_bias,
        scope=scope,
        up="up_proj",
        down="down_proj",
    )


def _build_experts(config: NemotronHConfig, scope: Scope) -> SparseMLP:
    latent = None
    if config.latent_size is not None:
        names = ("fc1_latent_proj", "fc2_latent_proj")
        latent = LatentProjections(config.hidden_size, config.latent_size, names, scope)
    shared = _build_mlp(config, config.shared_ffn_size, scope.at("shared_experts"))
    return SparseMLP(
        config.hidden_size,
        config.expert_ffn_size,
        config.routing,
        scope=scope,
        names=_EXPERTS,
        shared=SharedExpert(shared, None),
        activation=SquaredReLU(),
        latent=latent,
    )
