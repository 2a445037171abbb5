"""Layers for multi-token prediction that checkpoints have beside the model's own (DeepSeek-V3, arXiv:2412.19437)."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.api.errors import ConfigError
from jaxserve.layers.decoder import DecoderLayer
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import replicated_linear
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_norm
from jaxserve.models.drafters.draft_head import ChainHead
from jaxserve.models.qwen3_next import Qwen3NextConfig, build_qwen_layer
from jaxserve.models.registry import family
from jaxserve.models.sparse_decoder import SparseConfig

MTP_ARCHITECTURES: Final = (
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
)
"""Architectures whose checkpoints have the layer as ``model.layers.{num_hidden_layers}``."""
QWEN_ARCHITECTURES: Final = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""Architectures whose checkpoints have it as ``mtp``, with attention in its layer, and keep no copies of embedding and
output head there."""
_PER_LAYER: Final = ("rope_layers", "sliding_windows", "sparse_layers")


class MTPNames(NamedTuple):
    """Names of modules in checkpoints: the decoder layer, the norm after it, those of what it combines, and their
    projection."""

    layer: str
    norm: str
    embedding_norm: str
    state_norm: str
    projection: str

    @classmethod
    def of(cls, config: SparseConfig) -> "MTPNames":
        """Return the names for a target."""
        if config.architecture in QWEN_ARCHITECTURES:
            others = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")
            return cls("mtp.layers.0", *(f"mtp.{name}" for name in others))
        layer = f"model.layers.{config.num_layers}"
        return cls(layer, *(f"{layer}.{name}" for name in ("shared_head.norm", "enorm", "hnorm", "eh_proj")))


class MTPHead(ChainHead):
    """A decoder layer of the target's family, whose input is a projection of embedding and state.

    The state of a token that the target has seen is what the target's output head reads, and so it is for a token that
    it has not: an output that is normalized. Embedding and output head are the target's, of which checkpoints may have
    copies beside the layer. Of several layers the first drafts all tokens.

    Args:
        config: The target.
        scope: Scope of the target.
    """

    def __init__(self, config: SparseConfig, *, scope: Scope):
        names, longer, width = MTPNames.of(config), _with_layer(config), config.hidden_size
        built = family(config.architecture).build(longer, scope)
        layer = built.layers[config.num_layers]
        if isinstance(longer, Qwen3NextConfig):
            layer = build_qwen_layer(longer, config.num_layers, scope.at(names.layer))
        assert isinstance(layer, DecoderLayer), layer
        super().__init__(layers=[layer], norm=build_norm(config, scope.at(names.norm)), ropes=built.ropes)
        self.embedding_norm = build_norm(config, scope.at(names.embedding_norm))
        self.state_norm = build_norm(config, scope.at(names.state_norm))
        self.projection = replicated_linear(2 * width, names.projection, width, scope)
        self.optional_prefix = built.optional_prefix

    def seen_state(
        self,
        target: CausalLM,
        hidden: Float[Array, "T target"],
        aux: Float[Array, "T aux"] | None,
        num_tokens: Int[Array, ""] | None = None,
    ) -> Float[Array, "T D"]:
        """Return the input of the target's output head."""
        return target.final(hidden)

    def combined(
        self, embedded: Float[Array, "T D"], state: Float[Array, "T D"], num_tokens: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Return the projection of the normalized embedding and state, in this order."""
        both = jnp.concatenate([self.embedding_norm(embedded), self.state_norm(state)], 1)
        return self.projection(both, num_rows=num_tokens)

    def next_state(self, hidden: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return the input of the output head."""
        return self.final(hidden)

    def names_of(self, tensor: str) -> tuple[str, ...]:
        """Return the names of a tensor in checkpoints saved with the output head, and without."""
        return tensor, tensor.removeprefix(self.optional_prefix)


def mtp_config(config: ModelConfig) -> SparseConfig:
    """Return the configuration of a target with an MTP layer.

    Raises:
        ConfigError: The model has none.
    """
    supported = (*MTP_ARCHITECTURES, *QWEN_ARCHITECTURES)
    if config.architecture not in supported:
        raise ConfigError(
            f"speculative_config.method='mtp': {config.architecture} has no layer for multi-token prediction that is "
            f"supported; supported: {', '.join(supported)}"
        )
    assert isinstance(config, SparseConfig), config
    if config.architecture in QWEN_ARCHITECTURES:
        return config
    if not config.num_extra_layers:
        raise ConfigError(
            f"speculative_config.method='mtp': config.json says that this {config.architecture} has no layer for "
            "multi-token prediction (num_nextn_predict_layers=0)"
        )
    return config


def check_has_layer(config: SparseConfig, tensors: Collection[str], directory: Path) -> None:
    """Raise ConfigError unless a checkpoint with these tensors has the MTP layer that its config.json announces."""
    layer = MTPNames.of(config).layer
    if not any(f"{layer.removeprefix('model.')}." in name for name in tensors):
        raise ConfigError(
            f"speculative_config.method='mtp': {directory} has no tensors of the layer for multi-token prediction, "
            f"{layer}, which quantized copies often leave out; use a checkpoint that has it"
        )


def _with_layer(config: SparseConfig) -> SparseConfig:
    """Return the model with one layer more, which is like the last."""
    changes: dict[str, Any] = {name: getattr(config, name) for name in _PER_LAYER}
    changes = {name: (*values, values[-1]) for name, values in changes.items()}
    if isinstance(config, Qwen3NextConfig):
        changes["recurrent_layers"] = (*config.recurrent_layers, False)
    return dataclasses.replace(config, num_layers=config.num_layers + 1, num_extra_layers=0, **changes)
