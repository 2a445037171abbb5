"""GPT-Neo, and models of its form such as TinyStories: GPT-2 with windows in every other layer and unscaled scores."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

from jaxserve.layers.decoder import LayerNormLayer
from jaxserve.layers.grouped_query_attention import GroupedQueryAttention
from jaxserve.layers.mlp import PlainMLP
from jaxserve.layers.norm import LayerNorm
from jaxserve.layers.parallel import Scope
from jaxserve.models import gpt2
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.gpt2 import GPT2Config
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import MAX_LAYERS, Windows

_NAMES: Final = {"num_heads": "n_head", "num_layers": "n_layer", "intermediate_size": "n_inner"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoConfig(GPT2Config):
    """One model of GPT-Neo's form.

    Attributes:
        sliding_windows: For each layer, the number of latest tokens that a query sees, itself included; None for all.
    """

    sliding_windows: Windows


def config_from_hf(fields: ConfigFields, architecture: str) -> GPTNeoConfig:
    """Read a config of GPTNeoForCausalLM."""
    given = fields.with_aliases(_NAMES).replaced({"scale_attn_weights": False})
    base = gpt2.config_from_hf(given, architecture)
    return GPTNeoConfig(**vars(base), sliding_windows=_read_windows(fields, base.num_layers))


def _read_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Read ``attention_types``: lists of kinds of layers, each with the number of its repetitions."""
    window, types = fields.integer("window_size", 256), fields.items("attention_types")
    if types is None:
        types = ((("global", "local"), num_layers),)
        kinds = _expanded(types)[:num_layers]
    else:
        kinds = _expanded(types)
    if len(kinds) != num_layers or any(kind not in ("global", "local") for kind in kinds):
        expected = f"expected global or local for each of {num_layers} layers, in lists with a number of repetitions"
        fields.note("attention_types", f"{expected}, got {[*types]}")
        return (None,) * num_layers
    return tuple(window if kind == "local" else None for kind in kinds)


def _expanded(types: Sequence[object]) -> list[object]:
    """Return the kind of each layer; what is not a list of kinds with a number is one entry."""
    kinds = list[object]()
    for each in types:
        match each:
            case [[*names], int(count)]:
                kinds += cast(list[object], names) * min(count, MAX_LAYERS)
            case _:
                kinds.append(each)
    return kinds


def build(config: GPTNeoConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return gpt2.build_with(config, scope, _build_layer)


def _build_layer(config: GPTNeoConfig, index: int, scope: Scope) -> LayerNormLayer:
    size, num_heads = config.hidden_size, config.num_heads
    norm = partial(LayerNorm, size, eps=config.norm_eps)
    attention = GroupedQueryAttention(
        size,
        num_heads,
        num_heads,
        size // num_heads,
        scope=scope.at("attn.attention"),
        out="out_proj",
        out_bias=True,
        scale=1.0,
        rope=None,
        window=config.sliding_windows[index],
    )
    mlp = PlainMLP(size, config.ffn_size, activation=config.activation, scope=scope.at("mlp"), up="c_fc", down="c_proj")
    return LayerNormLayer(norm(scope=scope.at("ln_1")), attention, norm(scope=scope.at("ln_2")), mlp)
