"""Gemma 1 (arXiv:2403.08295): embeddings scaled by sqrt(D), norms with ``1 + weight``, a GELU-gated MLP."""

import dataclasses
import math
from typing import Final

import jax.numpy as jnp
import numpy as np

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder

DEFAULTS: Final = FamilyDefaults(
    head_dim=256,
    tie_embeddings=True,
    bos_token_id=2,
    eos_token_ids=(1,),
    activation="gelu_pytorch_tanh",
    attention_bias=False,
    norm_offset=1.0,
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of GemmaForCausalLM; its ``hidden_act`` gelu means the tanh approximation it was trained with."""
    base = read_decoder(fields, architecture, DEFAULTS)
    is_plain = base.activation == "gelu"
    return dataclasses.replace(base, activation="gelu_pytorch_tanh" if is_plain else base.activation)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module, with scaled embeddings."""
    return build_decoder(config, scope, embedding_multiplier=embedding_scale(config, scope))


def embedding_scale(config: DecoderConfig, scope: Scope) -> float:
    """Return sqrt(D), rounded to the type of the weights as in transformers."""
    return float(np.asarray(math.sqrt(config.hidden_size), jnp.dtype(scope.policy.weights)))
