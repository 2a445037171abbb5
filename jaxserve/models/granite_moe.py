"""Granite 3 MoE: Granite with a mixture of experts in every layer, one tensor for all experts."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames
from jaxserve.models import granite
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_routing

_NAMES: Final = ExpertNames(("input_linear",), "output_linear", "router.layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(SparseConfig, granite.GraniteConfig):
    """A decoder with experts and Granite's constants."""


def config_from_hf(fields: ConfigFields, architecture: str) -> GraniteMoeConfig:
    """Read a config of GraniteMoeForCausalLM; ``intermediate_size`` is that of each expert."""
    base = granite.config_from_hf(fields, architecture)
    return GraniteMoeConfig(
        **vars(base),
        routing=read_routing(fields, "num_local_experts", 8, 2, is_normalized=True),
        expert_ffn_size=base.ffn_size,
        sparse_layers=(True,) * base.num_layers,
    )


def build(config: GraniteMoeConfig, scope: Scope) -> CausalLM:
    """Return the module, with the config's constants."""
    return granite.build_with(config, scope, partial(build_sparse_layer, module="block_sparse_moe", names=_NAMES))
