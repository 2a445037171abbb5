"""Small models of families whose layers are recurrent and attention in turn: Qwen3.5, Bamba and LFM2.

They have the sizes of the demo model, from which their weights are taken where they can be (``conversion.py``).
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxtyping import Array, Float

from scripts.demo import mixers
from scripts.demo.model_directory import (
    DEMO,
    ENDS_IDS,
    MAX_POSITIONS,
    NORM_EPSILON,
    ROPE_THETA,
    write_model_directory,
)
from scripts.demo.network import Params, Rows, mlp, project, rms_norm
from scripts.demo.training import save_weights
from scripts.demo.training_text import PIECES

HIDDEN_SIZE, FFN_SIZE, NUM_HEADS = DEMO.hidden_size, DEMO.ffn_size, DEMO.num_heads
IS_RECURRENT = (True, False, True, False)
"""Whether each layer is recurrent; the others have attention."""
TAPS = {"linear_attn.conv1d": 4, "mamba.conv1d": 4, "conv.conv": 3}
"""Tokens that each convolution spans."""

DELTA_NET = mixers.DeltaNet(num_key_heads=4, num_value_heads=4, key_size=32, value_size=32)
MAMBA = mixers.Mamba(num_heads=8, head_size=32, num_groups=4, state_size=32)
WIDE_HEADS = mixers.Attention(NUM_HEADS, head_size=2 * DEMO.head_size, rotated=DEMO.head_size)
"""Of families that rotate half of each head, the half that the demo model's heads have."""

Mixer = Callable[[Array, Params, str, Rows], Array]
"""Maps a layer's normalized input, the weights, the prefix of the mixer's and the rows to the mixer's output."""


class Part(NamedTuple):
    """A mixer of a layer: its module, what it computes, and the shapes of its weights."""

    module: str
    mix: Mixer
    shapes: dict[str, tuple[int, ...]]


class Hybrid(NamedTuple):
    """A model of one family.

    Attributes:
        fields: Fields of config.json that only this family has.
        recurrent: What recurrent layers have.
        heads: Of the attention in the others.
        norms: Names of the norms before the mixer and before the MLP.
        last_norm: Name of the norm before the output head, which is the embedding.
        norm_offset: Is added to the weights of the norms.
        mlp: Module of the MLP.
        mlp_names: Its projections: gate, up and down.
    """

    fields: dict[str, object]
    recurrent: Part
    heads: mixers.Attention
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    last_norm: str = "model.norm"
    norm_offset: float = 0.0
    mlp: str = "mlp"
    mlp_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def _attention(heads: mixers.Attention) -> Part:
    width = heads.num_heads * heads.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (width * (2 if heads.is_gated else 1), HIDDEN_SIZE),
        "k_proj.weight": (width, HIDDEN_SIZE),
        "v_proj.weight": (width, HIDDEN_SIZE),
        f"{heads.out}.weight": (HIDDEN_SIZE, width),
    }
    shapes |= {f"{name}.weight": (heads.head_size,) for name in heads.norms or ()}
    return Part("self_attn", partial(mixers.attention, heads=heads), shapes)


def _delta_net() -> Part:
    keys, values = DELTA_NET.num_key_heads * DELTA_NET.key_size, DELTA_NET.num_value_heads * DELTA_NET.value_size
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (2 * keys + values, HIDDEN_SIZE),
        "in_proj_z.weight": (values, HIDDEN_SIZE),
        "in_proj_b.weight": (DELTA_NET.num_value_heads, HIDDEN_SIZE),
        "in_proj_a.weight": (DELTA_NET.num_value_heads, HIDDEN_SIZE),
        "conv1d.weight": (2 * keys + values, 1, TAPS["linear_attn.conv1d"]),
        "A_log": (DELTA_NET.num_value_heads,),
        "dt_bias": (DELTA_NET.num_value_heads,),
        "norm.weight": (DELTA_NET.value_size,),
        "out_proj.weight": (HIDDEN_SIZE, values),
    }
    return Part("linear_attn", partial(mixers.delta_net, heads=DELTA_NET), shapes)


def _mamba() -> Part:
    inner = MAMBA.num_heads * MAMBA.head_size
    channels = inner + 2 * MAMBA.num_groups * MAMBA.state_size
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (inner + channels + MAMBA.num_heads, HIDDEN_SIZE),
        "conv1d.weight": (channels, 1, TAPS["mamba.conv1d"]),
        "conv1d.bias": (channels,),
        **{name: (MAMBA.num_heads,) for name in ("A_log", "dt_bias", "D")},
        "norm.weight": (inner,),
        "out_proj.weight": (HIDDEN_SIZE, inner),
    }
    return Part("mamba", partial(mixers.mamba, heads=MAMBA), shapes)


def _short_convolution() -> Part:
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (3 * HIDDEN_SIZE, HIDDEN_SIZE),
        "conv.weight": (HIDDEN_SIZE, 1, TAPS["conv.conv"]),
        "out_proj.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
    }
    return Part("conv", mixers.short_convolution, shapes)


def _kinds(recurrent: str) -> list[str]:
    return [recurrent if each else "full_attention" for each in IS_RECURRENT]


HYBRIDS: dict[str, Hybrid] = {
    "qwen3_5": Hybrid(
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "head_dim": WIDE_HEADS.head_size,
            "layer_types": _kinds("linear_attention"),
            "linear_conv_kernel_dim": TAPS["linear_attn.conv1d"],
            "linear_key_head_dim": DELTA_NET.key_size,
            "linear_num_key_heads": DELTA_NET.num_key_heads,
            "linear_num_value_heads": DELTA_NET.num_value_heads,
            "linear_value_head_dim": DELTA_NET.value_size,
            "partial_rotary_factor": 0.5,
        },
        _delta_net(),
        WIDE_HEADS._replace(norms=("q_norm", "k_norm"), norm_offset=1.0, is_gated=True),
        norm_offset=1.0,
    ),
    "bamba": Hybrid(
        {
            "architectures": ["BambaForCausalLM"],
            "model_type": "bamba",
            "attn_layer_indices": [index for index, each in enumerate(IS_RECURRENT) if not each],
            "head_dim": WIDE_HEADS.head_size,
            "mamba_conv_bias": True,
            "mamba_d_conv": TAPS["mamba.conv1d"],
            "mamba_d_head": MAMBA.head_size,
            "mamba_d_state": MAMBA.state_size,
            "mamba_expand": MAMBA.num_heads * MAMBA.head_size // HIDDEN_SIZE,
            "mamba_n_groups": MAMBA.num_groups,
            "mamba_n_heads": MAMBA.num_heads,
            "mamba_proj_bias": False,
        },
        _mamba(),
        WIDE_HEADS,
        norms=("input_layernorm", "pre_ff_layernorm"),
        last_norm="model.final_layernorm",
        mlp="feed_forward",
    ),
    "lfm2": Hybrid(
        {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": TAPS["conv.conv"],
            "conv_bias": False,
            "layer_types": _kinds("conv"),
            "norm_eps": NORM_EPSILON,
        },
        _short_convolution(),
        mixers.Attention(
            NUM_HEADS, DEMO.head_size, DEMO.head_size, out="out_proj", norms=("q_layernorm", "k_layernorm")
        ),
        norms=("operator_norm", "ffn_norm"),
        last_norm="model.embedding_norm",
        mlp="feed_forward",
        mlp_names=("w1", "w3", "w2"),
    ),
}
"""The models, by the name of their family."""


def config(hybrid: Hybrid) -> dict[str, object]:
    """Return the content of config.json."""
    return {
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": FFN_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": NUM_HEADS,
        "num_hidden_layers": len(IS_RECURRENT),
        "num_key_value_heads": NUM_HEADS,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": len(PIECES),
        **ENDS_IDS,
        **hybrid.fields,
    }


def part_of(hybrid: Hybrid, layer: int) -> Part:
    """Return the mixer of a layer."""
    return hybrid.recurrent if IS_RECURRENT[layer] else _attention(hybrid.heads)


def weight_shapes(hybrid: Hybrid) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the checkpoint; the output head is the embedding."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(PIECES), HIDDEN_SIZE),
        f"{hybrid.last_norm}.weight": (HIDDEN_SIZE,),
    }
    for layer in range(len(IS_RECURRENT)):
        prefix, part = f"model.layers.{layer}.", part_of(hybrid, layer)
        shapes |= {f"{prefix}{name}.weight": (HIDDEN_SIZE,) for name in hybrid.norms}
        shapes |= {f"{prefix}{part.module}.{name}": shape for name, shape in part.shapes.items()}
        gate, up, down = (f"{prefix}{hybrid.mlp}.{name}.weight" for name in hybrid.mlp_names)
        shapes |= {gate: (FFN_SIZE, HIDDEN_SIZE), up: (FFN_SIZE, HIDDEN_SIZE), down: (HIDDEN_SIZE, FFN_SIZE)}
    return shapes


def _normed(x: Float[Array, "B T D"], params: Params, name: str, hybrid: Hybrid) -> Float[Array, "B T D"]:
    return rms_norm(x, hybrid.norm_offset + params[f"{name}.weight"])


def hybrid_states(params: Params, rows: Rows, hybrid: Hybrid) -> list[Float[Array, "B T D"]]:
    """Return the input of each layer, and the output of the last."""
    states = [params["model.embed_tokens.weight"][rows.token_ids]]
    for layer in range(len(IS_RECURRENT)):
        prefix, part, x = f"model.layers.{layer}.", part_of(hybrid, layer), states[-1]
        x += part.mix(_normed(x, params, prefix + hybrid.norms[0], hybrid), params, f"{prefix}{part.module}.", rows)
        inner = _normed(x, params, prefix + hybrid.norms[1], hybrid)
        states.append(x + mlp(inner, params, f"{prefix}{hybrid.mlp}.", hybrid.mlp_names))
    return states


def last_logits(params: Params, state: Float[Array, "B T D"], hybrid: Hybrid) -> Float[Array, "B T V"]:
    """Return next-token logits, from the output of the last layer."""
    return project(_normed(state, params, hybrid.last_norm, hybrid), params["model.embed_tokens.weight"])


def logits(params: Params, rows: Rows, hybrid: Hybrid) -> Float[Array, "B T V"]:
    """Return next-token logits."""
    return last_logits(params, hybrid_states(params, rows, hybrid)[-1], hybrid)


def save(params: Params, directory: Path, hybrid: Hybrid) -> None:
    """Write the model."""
    write_model_directory(directory)
    (directory / "config.json").write_text(json.dumps(config(hybrid), indent=2, sort_keys=True) + "\n")
    save_weights(params, directory)
