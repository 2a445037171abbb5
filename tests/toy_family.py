"""A toy family for tests, with a layer type that no other has: attention and MLP read the same normed input (GPT-J)."""

from jaxtyping import Array, Float, Int

from jaxserve.layers.decoder import RMSNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_mlp, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder

ARCHITECTURE = "ToyForCausalLM"


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    return read_decoder(fields, architecture, FamilyDefaults())


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    return build_decoder(config, scope, _build_layer)


class ParallelLayer(RMSNormLayer):
    """``x + attention(norm(x)) + mlp(norm'(x))``."""

    @property
    def has_fused_norms(self) -> bool:
        return self.attention.has_fused_norms

    def projected(self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        return self.attention.project_input(x, norm=self.attention_norm, num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        branch = self.mlp(x, norm=self.mlp_norm, residual=x, num_rows=num_rows)
        return self.attention.output(attended, residual=branch, num_rows=num_rows)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> ParallelLayer:
    return ParallelLayer(
        build_norm(config, scope.at("norm_1")),
        build_attention(config, index, scope.at("attention"), qkv=("qkv",)),
        build_norm(config, scope.at("norm_2")),
        build_mlp(config, scope.at("mlp")),
    )
