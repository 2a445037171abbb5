"""Gemma 2 (arXiv:2408.00118): four norms a layer, windows in every other layer, soft caps of scores and logits."""

import dataclasses
from functools import partial
from typing import Any, Final

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention
from jaxserve.layers.decoder import RMSNormLayer, run_mlp
from jaxserve.layers.grouped_query_attention import QkNorm
from jaxserve.layers.linear import add_branch
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import SparseMLP
from jaxserve.models import gemma
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_mlp, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_repeated_windows

_DEFAULTS: Final = dataclasses.replace(
    gemma.DEFAULTS,
    num_kv_heads=4,
    activation_field="hidden_activation",
    windows=partial(read_repeated_windows, pattern=2),
)
_NORMS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """A decoder of Gemma 2's form.

    Attributes:
        attention_scale: Factor of query-key scores.
        attention_soft_cap: Cap of the scores; None for none.
        logits_soft_cap: Cap of the logits; None for none.
    """

    attention_scale: float
    attention_soft_cap: float | None
    logits_soft_cap: float | None


def config_from_hf(fields: ConfigFields, architecture: str) -> Gemma2Config:
    """Read a config of Gemma2ForCausalLM: without ``layer_types`` every other layer slides, from the first on."""
    return read_gemma2(fields, architecture, _DEFAULTS, soft_caps=(50.0, 30.0))


def read_gemma2(
    fields: ConfigFields,
    architecture: str,
    defaults: FamilyDefaults,
    *,
    soft_caps: tuple[float | None, float | None],
) -> Gemma2Config:
    """Read a config of Gemma 2's form.

    Args:
        fields: Fields of config.json.
        architecture: Name in ``architectures``.
        defaults: Defaults of the family.
        soft_caps: Of scores and of logits, if the fields are missing.
    """
    base = read_decoder(fields, architecture, defaults)
    return Gemma2Config(
        **vars(base),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=fields.nullable_number("attn_logit_softcapping", soft_caps[0]),
        logits_soft_cap=fields.nullable_number("final_logit_softcapping", soft_caps[1]),
    )


def build(config: Gemma2Config, scope: Scope) -> CausalLM:
    """Return the module, of its own layers."""
    return build_with(config, scope)


def build_with(
    config: Gemma2Config,
    scope: Scope,
    *,
    qk_norm: QkNorm = "none",
    layer_ropes: tuple[int, ...] | None = None,
    **options: Any,
) -> CausalLM:
    """Build a model of Gemma 2's layers.

    Args:
        config: The model.
        scope: Scope of the model.
        qk_norm: Norm of queries and keys.
        layer_ropes: Index of each layer's rotary embedding; None: all have the only one.
        options: Options of ``CausalLM``.
    """
    return build_decoder(
        config,
        scope,
        partial(_build_layer, qk_norm=qk_norm, ropes=layer_ropes or (0,) * config.num_layers),
        embedding_multiplier=gemma.embedding_scale(config, scope),
        logits_soft_cap=config.logits_soft_cap,
        **options,
    )


class SandwichLayer(RMSNormLayer):
    """Norms before and after each branch.

    Args:
        after: Norms after the attention and after the MLP.
        parts: Arguments of ``RMSNormLayer``.
        options: Further ones.
    """

    def __init__(self, *parts: Any, after: tuple[RMSNorm, RMSNorm], **options: Any):
        super().__init__(*parts, **options)
        self.after = nnx.List[RMSNorm](after)

    @property
    def has_fused_norms(self) -> bool:
        """Return False: no kernel fuses a norm that follows a matmul."""
        return False

    def projected(self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        """Compute queries, keys and values of the normalized input."""
        return self.attention.project_input(x, norm=self.attention_norm, num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        """Return the layer's output from its input and the attention output."""
        return self.after_attention_with_experts(x, attended, num_rows)[0]

    def after_attention_with_experts(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> tuple[Float[Array, "rows D"], Int[Array, "T k"] | None]:
        """Return the same, and the experts of each token if the MLP is a mixture of experts."""
        attended = self.attention.gated(attended, x, norm=self.attention_norm, num_rows=num_rows)
        scale = self.residual_multiplier
        x = add_branch(self.after[0](self.attention.output(attended, num_rows=num_rows)), x, scale)
        branch, experts = run_mlp(self.mlp, x, norm=self.mlp_norm, num_rows=num_rows)
        return add_branch(self.after[1](branch), x, scale), experts


def build_sandwich_layer(
    config: DecoderConfig,
    scope: Scope,
    norms: tuple[str, str, str, str],
    attention: Attention,
    mlp: GatedMLP | SparseMLP,
    **options: Any,
) -> SandwichLayer:
    """Build a layer with norms before and after each branch.

    Args:
        config: The model.
        scope: Scope of the layer.
        norms: Modules of the norms before and after the attention, and before and after the MLP.
        attention: The attention.
        mlp: The MLP.
        options: Options of ``RMSNormLayer``.
    """
    before, after, before_mlp, after_mlp = (build_norm(config, scope.at(name)) for name in norms)
    return SandwichLayer(before, attention, before_mlp, mlp, after=(after, after_mlp), **options)


def _build_layer(
    config: Gemma2Config, index: int, scope: Scope, *, qk_norm: QkNorm, ropes: tuple[int, ...]
) -> SandwichLayer:
    attention = build_attention(
        config,
        index,
        scope.at("self_attn"),
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        qk_norm=qk_norm,
        rope=ropes[index],
    )
    return build_sandwich_layer(config, scope, _NORMS, attention, build_mlp(config, scope.at("mlp")))
