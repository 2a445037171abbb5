"""Layers for multi-token prediction that checkpoints have after the model's own (DeepSeek-V3, arXiv:2412.19437)."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.api.errors import ConfigError
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import replicated_linear
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.drafters.draft_head import ChainHead
from jaxserve.models.registry import family
from jaxserve.models.sparse_decoder import SparseConfig

MTP_ARCHITECTURES: Final = (
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
)
"""Architectures whose checkpoints have the layer as ``model.layers.{num_hidden_layers}``."""
_PER_LAYER: Final = ("rope_layers", "sliding_windows", "sparse_layers")


class MTPHead(ChainHead):
    """A decoder layer of the target's family, whose input is a projection of embedding and state.

    The state of a token that the target has seen is what the target's output head reads, and so it is for a token that
    it has not: an output that is normalized. Embedding and output head are the target's; checkpoints have copies of
    them beside the layer. Of several layers the first drafts all tokens.

    Args:
        config: The target.
        scope: Scope of the target.
    """

    def __init__(self, config: SparseConfig, *, scope: Scope):
        built = family(config.architecture).build(_with_layer(config), scope)
        own = scope.at(f"model.layers.{config.num_layers}")
        width, eps = config.hidden_size, config.norm_eps
        super().__init__(
            layers=[built.layers[config.num_layers]],
            norm=RMSNorm(width, eps=eps, scope=own.at("shared_head.norm")),
            ropes=built.ropes,
        )
        self.embedding_norm = RMSNorm(width, eps=eps, scope=own.at("enorm"))
        self.state_norm = RMSNorm(width, eps=eps, scope=own.at("hnorm"))
        self.projection = replicated_linear(2 * width, "eh_proj", width, own)
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
    if config.architecture not in MTP_ARCHITECTURES:
        raise ConfigError(
            f"speculative_config.method='mtp': {config.architecture} has no layer for multi-token prediction that is "
            f"supported; supported: {', '.join(MTP_ARCHITECTURES)}"
        )
    assert isinstance(config, SparseConfig), config
    if not config.num_extra_layers:
        raise ConfigError(
            f"speculative_config.method='mtp': config.json says that this {config.architecture} has no layer for "
            "multi-token prediction (num_nextn_predict_layers=0)"
        )
    return config


def check_has_layer(config: SparseConfig, tensors: Collection[str], directory: Path) -> None:
    """Raise ConfigError unless a checkpoint with these tensors has the MTP layer that its config.json announces."""
    if not any(f"layers.{config.num_layers}." in name for name in tensors):
        raise ConfigError(
            f"speculative_config.method='mtp': {directory} has no tensors of the layer for multi-token prediction, "
            f"model.layers.{config.num_layers}, which quantized copies often leave out; use a checkpoint that has it"
        )


def _with_layer(config: SparseConfig) -> SparseConfig:
    """Return the model with one layer more, which is like the last."""
    changes: dict[str, Any] = {name: getattr(config, name) for name in _PER_LAYER}
    changes = {name: (*values, values[-1]) for name, values in changes.items()}
    return dataclasses.replace(config, num_layers=config.num_layers + 1, num_extra_layers=0, **changes)
