"""The decoder with a mixture of experts in some or all layers; a family's own file has its differences."""

import dataclasses
from typing import Any

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.parallel import Scope
from jaxserve.layers.routing import Routing, Scoring
from jaxserve.layers.sparse_mlp import DEFAULT_NAMES, ExpertNames, SharedExpert, SparseMLP, replicated_linear
from jaxserve.models.decoder import DecoderConfig, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import read_layer_indices, read_layer_list


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseConfig(DecoderConfig):
    """A decoder-only model with experts.

    Attributes:
        routing: How experts are chosen.
        expert_ffn_size: F of each expert.
        shared_ffn_size: F of the shared expert; 0 for none.
        sparse_layers: For each layer, whether its MLP is a mixture of experts.
        num_extra_layers: Layers for multi-token prediction at the end of checkpoints, which are not loaded.
    """

    routing: Routing
    expert_ffn_size: int
    shared_ffn_size: int = 0
    sparse_layers: tuple[bool, ...]
    num_extra_layers: int = 0

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts."""
        return any(self.sparse_layers)


def read_routing(
    fields: ConfigFields,
    experts: str,
    default: int,
    per_token: int,
    *,
    is_normalized: bool,
    scoring: Scoring = "softmax",
) -> Routing:
    """Read the numbers of experts; a ``scoring_func`` that is not the family's is a problem.

    Args:
        fields: Fields of config.json.
        experts: Name of the field with the number of experts.
        default: The number if the field is missing.
        per_token: ``num_experts_per_tok`` if that is missing.
        is_normalized: As in ``Routing``.
        scoring: As in ``Routing``.
    """
    count = fields.integer(experts, default)
    chosen = fields.integer("num_experts_per_tok", per_token)
    if chosen > count:
        fields.note("num_experts_per_tok", f"expected at most the {count} experts, got {chosen}")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        fields.note("hidden_act", f"expected silu for experts, got {fields.text('hidden_act', 'silu')!r}")
    given = fields.text("scoring_func", scoring)
    if given != scoring:
        fields.note("scoring_func", f"expected {scoring}, got {given!r}")
    per_token = min(chosen, count)
    return Routing(num_experts=count, experts_per_token=per_token, is_normalized=is_normalized, scoring=scoring)


def read_listed_sparse_layers(fields: ConfigFields, num_layers: int, num_dense: int = 1) -> tuple[bool, ...]:
    """Return which layers have experts: those that ``mlp_layer_types`` calls sparse, or all but the first
    ``num_dense``."""
    types = read_layer_list(fields, "mlp_layer_types", num_layers, ("dense", "sparse"))
    if types is None:
        return tuple(index >= num_dense for index in range(num_layers))
    return tuple(each == "sparse" for each in types)


def read_sparse_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every ``decoder_sparse_step``-th, but none of ``mlp_only_layers``."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = read_layer_indices(fields, "mlp_only_layers", num_layers) or (False,) * num_layers
    return tuple(not dense[layer] and (layer + 1) % step == 0 for layer in range(num_layers))


def build_sparse_layer(
    config: SparseConfig,
    index: int,
    scope: Scope,
    *,
    module: str = "mlp",
    names: ExpertNames = DEFAULT_NAMES,
    shared: str = "shared_expert",
    shared_gate: str | None = None,
    **options: Any,
) -> PreNormLayer:
    """Build a layer; where the config says so, its MLP is a mixture of experts.

    Args:
        config: The model.
        index: Of the layer.
        scope: Scope of the layer.
        module: Name of the mixture of experts, relative to the layer.
        names: Names relative to the mixture of experts.
        shared: Module of the shared expert, if the model has one.
        shared_gate: Module of its gate; None for no gate.
        options: Options of ``build_layer``.
    """
    if not config.sparse_layers[index]:
        return build_layer(config, index, scope, **options)
    sparse = build_sparse_mlp(config, scope.at(module), names=names, shared=shared, shared_gate=shared_gate)
    return build_layer(config, index, scope, mlp=sparse, **options)


def build_sparse_mlp(
    config: SparseConfig,
    scope: Scope,
    *,
    names: ExpertNames = DEFAULT_NAMES,
    shared: str = "shared_expert",
    shared_gate: str | None = None,
    **options: Any,
) -> SparseMLP:
    """Build a mixture of experts, with a shared expert if the config has one.

    Args:
        config: The model.
        scope: Scope of the module.
        names: As in :func:`build_sparse_layer`, like ``shared`` and ``shared_gate``.
        shared: Module of the shared expert.
        shared_gate: Module of its gate.
        options: Further options of ``SparseMLP``.
    """
    expert, sizes = None, (config.hidden_size, config.expert_ffn_size)
    if config.shared_ffn_size:
        mlp = GatedMLP(config.hidden_size, config.shared_ffn_size, activation=config.activation, scope=scope.at(shared))
        gate = None if shared_gate is None else replicated_linear(config.hidden_size, shared_gate, 1, scope)
        expert = SharedExpert(mlp, gate)
    return SparseMLP(*sizes, config.routing, scope=scope, names=names, shared=expert, **options)
