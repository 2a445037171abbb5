"""EAGLE heads (arXiv:2401.15077, also those of EAGLE-2): a layer of a Llama over the target's last hidden states."""

import dataclasses
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from checkpoints import open_checkpoint
from jaxserve.api.errors import ConfigError
from jaxserve.layers.decoder import DecoderLayer, run_mlp
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import replicated_linear
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_layer, build_mlp, build_norm
from jaxserve.models.drafters.draft_head import ChainHead
from jaxserve.models.drafters.head_files import check_architecture, check_projection
from jaxserve.models.hf_config import ConfigFields, read_config_json
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder

_DEFAULTS: Final = FamilyDefaults(attention_bias=False, mlp_bias=False)
_ARCHITECTURES: Final = ("LlamaForCausalLM", "EagleLlamaForCausalLM")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(DecoderConfig):
    """One EAGLE head.

    Attributes:
        projection_bias: Whether the projection of embedding and state has a bias.
    """

    projection_bias: bool = False


class EagleLayer(DecoderLayer):
    """The first layer of a head, whose attention has no norm before it.

    Args:
        config: The head.
        scope: Scope of the layer.
    """

    def __init__(self, config: EagleConfig, scope: Scope):
        super().__init__(build_attention(config, 0, scope.at("self_attn")))
        self.mlp_norm = build_norm(config, scope.at("post_attention_layernorm"))
        self.mlp = build_mlp(config, scope.at("mlp"))

    @property
    def has_fused_norms(self) -> bool:
        """Return True: its only norm is fused with the MLP."""
        return True

    def projected(self, x: Float[Array, "rows D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        """Compute queries, keys and values."""
        return self.attention.project_input(x, num_rows=num_rows)

    def after_attention(
        self, x: Float[Array, "rows D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows D"]:
        """Return the layer's output from its input and the attention output."""
        state = self.attention.output(attended, residual=x, num_rows=num_rows)
        return run_mlp(self.mlp, state, norm=self.mlp_norm, residual=state, num_rows=num_rows)[0]


class EagleHead(ChainHead):
    """A projection of embedding and state, and a layer of a Llama, whose output is both state and logits' input.

    The state of a token that the target has seen is what the target's output head reads. Embedding and output head are
    the target's.

    Args:
        config: The head.
        scope: Scope of the target.
    """

    def __init__(self, config: EagleConfig, *, scope: Scope):
        others = [build_layer(config, i, scope.at(f"layers.{i}")) for i in range(1, config.num_layers)]
        super().__init__(
            layers=[EagleLayer(config, scope.at("layers.0")), *others],
            norm=None,
            ropes=(config.rope,),
            ignored=(r"embed_tokens\.weight", r"lm_head\.weight", r"(.*\.)?rotary_emb\.inv_freq"),
        )
        size, bias = config.hidden_size, config.projection_bias
        self.projection = replicated_linear(2 * size, "fc", size, scope, bias=bias)

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
        """Return the projection of embedding and state, in this order."""
        both = jnp.concatenate([embedded, state.astype(embedded.dtype)], 1)
        return self.projection(both, num_rows=num_tokens)

    def next_state(self, hidden: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return the last layer's output."""
        return hidden

    def names_of(self, tensor: str) -> tuple[str, ...]:
        """Return the name of a tensor, which all checkpoints share."""
        return (tensor,)


def read_eagle(directory: Path, target: ModelConfig, load_format: str = "auto") -> EagleConfig:
    """Return the head in a directory, checked against the target that it drafts for.

    Args:
        directory: The head's directory.
        target: The target.
        load_format: As in ``EngineConfig``.

    Raises:
        ConfigError: The head is none that is supported, or not one of this target.
        CheckpointError: Its checkpoint cannot be read.
    """
    path = directory / "config.json"
    raw = read_config_json(path)
    check_architecture(raw, path, _ARCHITECTURES)
    with open_checkpoint(directory, None, load_format) as reader:
        tensors = reader.tensors
    check_projection(tensors, directory, "EAGLE")
    if "d2t" in tensors or "midlayer.hidden_norm.weight" in tensors:
        raise ConfigError(f"speculative_config.model: {directory} is an EAGLE-3 head; use the method eagle3")
    fields = ConfigFields(raw, str(path))
    base = read_decoder(fields, target.architecture, _DEFAULTS)
    for key, own, expected in (
        ("vocab_size", base.vocab_size, target.vocab_size),
        ("hidden_size", base.hidden_size, target.hidden_size),
    ):
        if own != expected:
            fields.note(key, f"expected the {expected} of the target ({target.architecture}), got {own}")
    fields.raise_problems()
    changes: dict[str, Any] = {"qkv_bias": "layers.0.self_attn.q_proj.bias" in tensors}
    return EagleConfig(**{**vars(base), **changes}, projection_bias="fc.bias" in tensors)
