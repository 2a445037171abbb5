"""Gemma 4: layers that differ in head size and key/value heads, some of which read the keys and values of others."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints import whole
from jaxserve.layers.attention import AttentionInputs, AttentionSettings, Pools
from jaxserve.layers.decoder import LayerOutput, RMSNormLayer
from jaxserve.layers.embedding import PerLayerEmbedding
from jaxserve.layers.expert_activations import ActivationGLU
from jaxserve.layers.grouped_query_attention import GroupedQueryAttention
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.model_config import RopeConfig
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import vector
from jaxserve.layers.routing import Routing
from jaxserve.layers.rows import map_rows
from jaxserve.layers.sparse_mlp import ExpertNames, SparseMLP, replicated_linear
from jaxserve.models import gemma
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_mlp, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import Windows, class_sizes, read_decoder, read_windows
from jaxserve.models.hf_rope import RopeDefaults, read_rope
from pallas_kernels.linear import ACTIVATIONS

_PATTERN: Final = 6
_NAMES: Final = ExpertNames(router="router.proj")
_OF_LAYER: Final = ("head_dim", "num_key_value_heads")


def _read_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Read the windows: the last layer has none, whatever the file says."""
    window = fields.integer("sliding_window", 512)
    windows = read_windows(fields, window, [(index + 1) % _PATTERN != 0 for index in range(num_layers)])
    return (*windows[:-1], None)


_DEFAULTS: Final = dataclasses.replace(
    gemma.DEFAULTS,
    num_kv_heads=4,
    activation_field="hidden_activation",
    norm_offset=0.0,
    rope=RopeDefaults(layer_type="sliding_attention"),
    windows=_read_windows,
    sizes=class_sizes(262144, 2304, 9216, 30, 8, 131072),
)
_ROPES: Final[dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """A decoder of Gemma 4's form.

    Attributes:
        full_rope: Rotary embedding of the layers without a window.
        head_dims: H of each layer.
        kv_heads: K of each layer.
        ffn_sizes: F of each layer.
        reads: For each layer, the layer whose keys and values it reads; None for its own.
        has_equal_values: Whether keys and values of layers without a window come from one projection.
        per_layer_vocab: Rows of the table of per-layer embeddings.
        per_layer_width: P, features of a token's own input of each layer; 0 for none.
        logits_soft_cap: Cap of the logits; None for none.
        routing: How experts are chosen; None for a model without experts.
        expert_ffn_size: F of each expert.
    """

    full_rope: RopeConfig
    head_dims: tuple[int, ...]
    kv_heads: tuple[int, ...]
    ffn_sizes: tuple[int, ...]
    reads: tuple[int | None, ...]
    has_equal_values: bool
    per_layer_vocab: int
    per_layer_width: int
    logits_soft_cap: float | None
    routing: Routing | None
    expert_ffn_size: int

    @property
    def has_experts(self) -> bool:
        """Whether the layers have experts."""
        return self.routing is not None


def config_from_hf(fields: ConfigFields, architecture: str) -> Gemma4Config:
    """Read a config of Gemma4ForCausalLM or Gemma4UnifiedForCausalLM."""
    is_unified = architecture.startswith("Gemma4Unified")
    fields = fields.with_defaults({"rope_parameters": _ROPES})
    if is_unified:
        fields = fields.with_defaults({"sliding_window": 1024, "max_position_embeddings": 262144})
    if fields.raw.get("use_bidirectional_attention") not in (None, "vision"):
        fields.note("use_bidirectional_attention", "expected null or vision: tokens attend to earlier ones only")
    base = read_decoder(fields, architecture, _DEFAULTS)
    has_equal_values = fields.flag("attention_k_eq_v", False)
    head_dims, kv_heads = _read_heads(fields, base, has_equal_values)
    full = [index for index, window in enumerate(base.sliding_windows) if window is None]
    reads = _read_sharing(fields, base.sliding_windows)
    doubled = fields.flag("use_double_wide_mlp", False)
    has_experts = not is_unified and fields.flag("enable_moe_block", False)
    rope = read_rope(
        fields.with_defaults(_DEFAULTS.sizes),
        head_dims[full[-1]],
        RopeDefaults(theta=1_000_000.0, is_partial=True, layer_type="full_attention"),
    )
    return Gemma4Config(
        **vars(base),
        full_rope=rope,
        head_dims=head_dims,
        kv_heads=kv_heads,
        ffn_sizes=tuple(base.ffn_size * (2 if doubled and read is not None else 1) for read in reads),
        reads=reads,
        has_equal_values=has_equal_values,
        per_layer_vocab=fields.integer("vocab_size_per_layer_input", 262144),
        per_layer_width=0 if is_unified else fields.integer("hidden_size_per_layer_input", 256, minimum=0),
        logits_soft_cap=fields.nullable_number("final_logit_softcapping", None),
        routing=_read_routing(fields) if has_experts else None,
        expert_ffn_size=fields.integer("moe_intermediate_size") if has_experts else 0,
    )


def _read_heads(
    fields: ConfigFields, base: DecoderConfig, has_equal_values: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Read H and K of each layer: from ``per_layer_config``, or from two fields for all layers without a window."""
    given = fields.nested("per_layer_config") if fields.is_given("per_layer_config") else None
    if given is not None:
        _check_layer_fields(given, base.num_layers)
    sizes, heads = list[int](), list[int]()
    for index, window in enumerate(base.sliding_windows):
        size, count = base.head_dim, base.num_kv_heads
        if given is not None:
            own = given.nested(str(index))
            size, count = own.integer("head_dim", size), own.integer("num_key_value_heads", count)
        elif window is None:
            size = fields.integer("global_head_dim", 512)
            count = fields.nullable_integer("num_global_key_value_heads", count) if has_equal_values else count
        sizes.append(size)
        heads.append(base.num_kv_heads if count is None else count)
    wrong = sorted({count for count in heads if base.num_heads % count})
    if wrong:
        fields.note("num_global_key_value_heads", f"expected a divisor of {base.num_heads} query heads, got {wrong[0]}")
    return tuple(sizes), tuple(heads)


def _check_layer_fields(given: ConfigFields, num_layers: int) -> None:
    """Record what ``per_layer_config`` says of layers that do not exist, or of fields that layers share."""
    layers = {str(index) for index in range(num_layers)}
    for name in given.raw:
        if name not in layers:
            given.note(name, f"expected the index of a layer, 0 to {num_layers - 1}")
        for field in given.nested(name).raw.keys() - _OF_LAYER:
            given.nested(name).note(field, f"expected only {' and '.join(_OF_LAYER)} to differ by layer")


def _read_sharing(fields: ConfigFields, windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the layer whose keys and values each layer reads: the last of its kind that has its own."""
    count = fields.integer("num_kv_shared_layers", 0, minimum=0)
    first = len(windows) - count
    own = {window is None: index for index, window in enumerate(windows[: max(first, 0)])}
    if count and {window is None for window in windows[max(first, 0) :]} - own.keys():
        fields.note("num_kv_shared_layers", f"with {count}, layers share keys and values that no layer has")
        return (None,) * len(windows)
    return tuple(own[window is None] if count and index >= first else None for index, window in enumerate(windows))


def _read_routing(fields: ConfigFields) -> Routing:
    count, chosen = fields.integer("num_experts"), fields.integer("top_k_experts")
    if chosen > count:
        fields.note("top_k_experts", f"expected at most the {count} experts, got {chosen}")
    return Routing(num_experts=count, experts_per_token=min(chosen, count), is_normalized=True)


def build(config: Gemma4Config, scope: Scope) -> CausalLM:
    """Return the module: layers with a window have the first rotary embedding, full layers the second."""
    sizes = (config.per_layer_vocab, config.hidden_size, config.num_layers, config.per_layer_width)
    per_layer = (
        PerLayerEmbedding(*sizes, eps=config.norm_eps, scope=scope.at("model")) if config.per_layer_width else None
    )
    return build_decoder(
        config,
        scope,
        Gemma4Layer,
        ropes=(config.rope, config.full_rope),
        embedding_multiplier=gemma.embedding_scale(config, scope),
        logits_soft_cap=config.logits_soft_cap,
        per_layer=per_layer,
        ignored=(_unused(config),) if any(read is not None for read in config.reads) else (),
    )


def _unused(config: Gemma4Config) -> str:
    """Return the pattern of the projections that layers have in some checkpoints although they read other layers'."""
    layers = "|".join(str(index) for index, read in enumerate(config.reads) if read is not None)
    return rf"model\.layers\.({layers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"


class Gemma4Layer(RMSNormLayer):
    """Norms before and after each branch, experts beside the MLP, an input of its own, and a factor of the output.

    Args:
        config: The model.
        index: Of the layer.
        scope: Scope of the layer.
    """

    def __init__(self, config: Gemma4Config, index: int, scope: Scope):
        norm = partial(build_norm, config)
        sized = dataclasses.replace(config, ffn_size=config.ffn_sizes[index])
        super().__init__(
            norm(scope.at("input_layernorm")),
            _build_attention(config, index, scope.at("self_attn")),
            norm(scope.at("pre_feedforward_layernorm")),
            build_mlp(sized, scope.at("mlp")),
        )
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
        self.after = nnx.List[RMSNorm]([norm(scope.at(name)) for name in names])
        self.scalar = vector(whole(scope.at("layer_scalar").module, (1,)), "embed", scope, fill=1.0)
        self.experts = _build_experts(config, scope) if config.routing else None
        names = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        self.expert_norms = nnx.List[RMSNorm]([norm(scope.at(name)) for name in names] if config.routing else [])
        self.own_input = OwnInput(config, scope) if config.per_layer_width else None

    @property
    def has_fused_norms(self) -> bool:
        """Return False: no kernel fuses a norm that follows a matmul."""
        return False

    @property
    def num_experts(self) -> int:
        """Number of experts that each token is routed to some of; 0 for a layer without a router."""
        return 0 if self.experts is None else self.experts.routing.num_experts

    def projected(self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        """Compute queries, keys and values of the normalized input."""
        return self.attention.project_input(x, norm=self.attention_norm, num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        """Return the layer's output from its input and the attention output, before its own input is added."""
        return self.after_attention_with_experts(x, attended, num_rows)[0]

    def after_attention_with_experts(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> tuple[Float[Array, "rows D"], Int[Array, "T k"] | None]:
        """Return the same, and the experts of each token if the layer has experts."""
        x, chosen = x + self.after[0](self.attention.output(attended, num_rows=num_rows)), None
        assert isinstance(self.mlp, GatedMLP)
        branch = self.mlp(x, norm=self.mlp_norm, num_rows=num_rows)
        if self.experts is not None:
            after_mlp, after_experts, before_experts = self.expert_norms
            routed, chosen = self.experts.with_experts(x, norm=before_experts, num_rows=num_rows)
            branch = after_mlp(branch) + after_experts(routed)
        x = x + self.after[1](branch)
        return (x * self.scalar[...] if self.own_input is None else x), chosen

    def __call__(
        self, x: Float[Array, "rows D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> LayerOutput:
        """Run the layer: attention and MLP, then its own input."""
        made = super().__call__(x, pools, inputs, settings)
        if inputs.layer_input is None:
            return made
        added = map_rows(self._add_input, (made.x, inputs.layer_input), inputs.num_tokens, settings.row_tile)
        return made._replace(x=added)

    def _add_input(self, x: Float[Array, "rows D"], own: Float[Array, "rows P"]) -> Float[Array, "rows D"]:
        assert self.own_input is not None
        return (x + self.own_input(x, own)) * self.scalar[...]


class OwnInput(nnx.Module):
    """``norm(projection(activation(gate(x)) * own))``, with a layer's own input of each token.

    Args:
        config: The model.
        scope: Scope of the layer.
    """

    def __init__(self, config: Gemma4Config, scope: Scope):
        sizes = (config.hidden_size, config.per_layer_width)
        self.gate = replicated_linear(sizes[0], "per_layer_input_gate", sizes[1], scope)
        self.projection = replicated_linear(sizes[1], "per_layer_projection", sizes[0], scope)
        self.norm = build_norm(config, scope.at("post_per_layer_input_norm"))
        self.activation = config.activation

    def __call__(self, x: Float[Array, "rows D"], own: Float[Array, "rows P"]) -> Float[Array, "rows D"]:
        """Compute what the layer adds."""
        gated = ACTIVATIONS[self.activation](self.gate(x)) * own
        return self.norm(self.projection(gated.astype(x.dtype)))


def _build_attention(config: Gemma4Config, index: int, scope: Scope) -> GroupedQueryAttention:
    is_full = config.sliding_windows[index] is None
    sized = dataclasses.replace(config, head_dim=config.head_dims[index], num_kv_heads=config.kv_heads[index])
    values = "k_proj" if is_full and config.has_equal_values else "v_proj"
    return build_attention(
        sized,
        index,
        scope,
        qkv=("q_proj", "k_proj", values),
        qk_norm="head",
        has_value_norm=config.reads[index] is None,
        reads=config.reads[index],
        scale=1.0,
        rope=int(is_full),
    )


def _build_experts(config: Gemma4Config, scope: Scope) -> SparseMLP:
    assert config.routing is not None
    return SparseMLP(
        config.hidden_size,
        config.expert_ffn_size,
        config.routing,
        scope=scope,
        names=_NAMES,
        activation=ActivationGLU(config.activation),
        router_norm=RMSNorm(config.hidden_size, eps=config.norm_eps, scope=scope.at("router"), tensor="scale"),
        router_scale=config.hidden_size**-0.5,
        expert_scales="router.per_expert_scale",
    )
