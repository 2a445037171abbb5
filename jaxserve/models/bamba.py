"""Bamba: Mamba-2 in most layers, attention that rotates half of each head in the others."""

import dataclasses
from typing import Final

from jaxserve.layers.decoder import Layer
from jaxserve.layers.mamba2 import Mamba2, Mamba2Options
from jaxserve.layers.parallel import Scope
from jaxserve.layers.recurrent_decoder import RecurrentLayer
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder, build_layer, build_mlp, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_layer_indices
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.hybrid import no_windows, read_mamba
from pallas_kernels.mamba2 import Mamba2Sizes

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    norm_eps=1e-5,
    rope=RopeDefaults(is_partial=True, partial_factor=0.5),
    attention_bias=False,
    mlp_bias=False,
    windows=no_windows,
    sizes=class_sizes(128000, 4096, 14336, 32, 32, 262144),
)
_NORMS: Final = ("input_layernorm", "pre_ff_layernorm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BambaConfig(DecoderConfig):
    """Bamba.

    Attributes:
        recurrent_layers: For each layer, whether it is recurrent.
        mamba: Heads of the recurrent layers, and their options.
    """

    recurrent_layers: tuple[bool, ...]
    mamba: tuple[Mamba2Sizes, Mamba2Options]


def config_from_hf(fields: ConfigFields, architecture: str) -> BambaConfig:
    """Read a config of BambaForCausalLM, whose class always rotates half of each head."""
    base = read_decoder(fields.replaced({"partial_rotary_factor": 0.5}), architecture, _DEFAULTS)
    attends = read_layer_indices(fields, "attn_layer_indices", base.num_layers) or (False,) * base.num_layers
    return BambaConfig(
        **vars(base), recurrent_layers=tuple(not each for each in attends), mamba=read_mamba(fields, base, 128)
    )


def build(config: BambaConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    norm = build_norm(config, scope.at("model.final_layernorm"))
    return build_decoder(config, scope, _build_layer, norm=norm)


def _build_layer(config: BambaConfig, index: int, scope: Scope) -> Layer:
    mlp = build_mlp(config, scope.at("feed_forward"))
    if not config.recurrent_layers[index]:
        return build_layer(config, index, scope, mlp=mlp, norms=_NORMS)
    mixer = Mamba2(config.hidden_size, *config.mamba, scope=scope.at("mamba"))
    norms = [build_norm(config, scope.at(name)) for name in _NORMS]
    return RecurrentLayer(norms[0], mixer, norms[1], mlp)
