"""OLMo-2: norms after each branch, and queries and keys normalized over all heads at once."""

from functools import partial
from typing import Any, Final

from jaxtyping import Array, Float, Int

from jaxserve.layers.decoder import RMSNormLayer, run_mlp
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import SparseMLP
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_mlp, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder

_DEFAULTS: Final = FamilyDefaults(norm_eps=1e-5, bos_token_id=None, eos_token_ids=(50279,), attention_bias=False)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of Olmo2ForCausalLM: ``attention_bias`` applies to all four projections."""
    return read_decoder(fields, architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module, of its own layers."""
    return build_decoder(config, scope, partial(build_post_norm_layer, qk_norm="width"))


class PostNormLayer(RMSNormLayer):
    """Norms follow each branch."""

    @property
    def has_fused_norms(self) -> bool:
        """Return False: no kernel fuses a norm that follows a matmul."""
        return False

    def projected(self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        """Compute queries, keys and values of the layer's input, without a norm."""
        return self.attention.project_input(x, num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        """Return the layer's output from its input and the attention output."""
        return self.after_attention_with_experts(x, attended, num_rows)[0]

    def after_attention_with_experts(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> tuple[Float[Array, "rows D"], Int[Array, "T k"] | None]:
        """Return the same, and the experts of each token if the MLP is a mixture of experts."""
        x = x + self.attention_norm(self.attention.output(attended, num_rows=num_rows))
        branch, experts = run_mlp(self.mlp, x, num_rows=num_rows)
        return x + self.mlp_norm(branch), experts


def build_post_norm_layer(
    config: DecoderConfig, index: int, scope: Scope, *, mlp: SparseMLP | None = None, **options: Any
) -> PostNormLayer:
    """Build a layer; ``mlp`` replaces the dense MLP, ``options`` are those of ``GroupedQueryAttention``."""
    return PostNormLayer(
        build_norm(config, scope.at("post_attention_layernorm")),
        build_attention(config, index, scope.at("self_attn"), **options),
        build_norm(config, scope.at("post_feedforward_layernorm")),
        build_mlp(config, scope.at("mlp")) if mlp is None else mlp,
    )
