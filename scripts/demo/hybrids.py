"""Small models of families whose layers are recurrent and attention in turn: Qwen3.5, Bamba and LFM2."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scripts.demo import mixers
from scripts.demo.model_directory import ENDS_IDS, MAX_POSITIONS, NORM_EPSILON, ROPE_THETA, write_model_directory
from scripts.demo.network import Params, Rows, init_params, mlp, project, rms_norm
from scripts.demo.training import save_weights
from scripts.demo.training_text import PIECES

HIDDEN_SIZE = 96
FFN_SIZE = 192
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 24
IS_RECURRENT = (True, False, True, False)
"""Whether each layer is recurrent; the others have attention."""
TAPS = {"linear_attn.conv1d": 4, "mamba.conv1d": 4, "conv.conv": 3}
"""Tokens that each convolution spans."""

DELTA_NET = mixers.DeltaNet(num_key_heads=2, num_value_heads=4, key_size=32, value_size=24)
MAMBA = mixers.Mamba(num_heads=8, head_size=24, num_groups=1, state_size=32)

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
        attention: What the others have.
        norms: Names of the norms before the mixer and before the MLP.
        last_norm: Name of the norm before the output head, which is the embedding.
        norm_offset: Is added to the weights of the norms.
        mlp: Module of the MLP.
        mlp_names: Its projections: gate, up and down.
    """

    fields: dict[str, object]
    recurrent: Part
    attention: Part
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    last_norm: str = "model.norm"
    norm_offset: float = 0.0
    mlp: str = "mlp"
    mlp_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def _attention(**options: object) -> Part:
    heads = mixers.Attention(NUM_HEADS, NUM_KV_HEADS, **{"rotated": HEAD_SIZE, **options})
    width, kv_width = NUM_HEADS * HEAD_SIZE, NUM_KV_HEADS * HEAD_SIZE
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (width * (2 if heads.is_gated else 1), HIDDEN_SIZE),
        "k_proj.weight": (kv_width, HIDDEN_SIZE),
        "v_proj.weight": (kv_width, HIDDEN_SIZE),
        f"{heads.out}.weight": (HIDDEN_SIZE, width),
    }
    shapes |= {f"{name}.weight": (HEAD_SIZE,) for name in heads.norms or ()}
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
            "head_dim": HEAD_SIZE,
            "layer_types": _kinds("linear_attention"),
            "linear_conv_kernel_dim": TAPS["linear_attn.conv1d"],
            "linear_key_head_dim": DELTA_NET.key_size,
            "linear_num_key_heads": DELTA_NET.num_key_heads,
            "linear_num_value_heads": DELTA_NET.num_value_heads,
            "linear_value_head_dim": DELTA_NET.value_size,
            "partial_rotary_factor": 0.5,
        },
        _delta_net(),
        _attention(rotated=HEAD_SIZE // 2, norms=("q_norm", "k_norm"), norm_offset=1.0, is_gated=True),
        norm_offset=1.0,
    ),
    "bamba": Hybrid(
        {
            "architectures": ["BambaForCausalLM"],
            "model_type": "bamba",
            "attn_layer_indices": [index for index, each in enumerate(IS_RECURRENT) if not each],
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
        _attention(rotated=HEAD_SIZE // 2),
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
        _attention(out="out_proj", norms=("q_layernorm", "k_layernorm")),
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
        "num_key_value_heads": NUM_KV_HEADS,
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
    return hybrid.recurrent if IS_RECURRENT[layer] else hybrid.attention


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


def first_weights(hybrid: Hybrid, seed: int) -> Params:
    """Return weights to start from: some states last for a hundred tokens, some for a few."""
    source, params = np.random.default_rng(seed + 1), init_params(weight_shapes(hybrid), seed)
    for name, weight in params.items():
        if name.endswith("A_log"):
            params[name] = jnp.asarray(np.log(source.uniform(0.5, 4.0, weight.shape)), jnp.float32)
        elif name.endswith("dt_bias"):
            steps = np.exp(source.uniform(np.log(0.01), np.log(0.3), weight.shape))
            params[name] = jnp.asarray(np.log(np.expm1(steps)), jnp.float32)
        elif weight.ndim == 3:
            params[name] = jnp.asarray(source.uniform(-1, 1, weight.shape) * weight.shape[2] ** -0.5, jnp.float32)
        elif name.endswith(".bias") or ("norm" in name and "linear_attn" not in name and hybrid.norm_offset):
            params[name] = jnp.zeros_like(weight)
    return params


def logits(params: Params, rows: Rows, hybrid: Hybrid) -> Float[Array, "B T V"]:
    """Return next-token logits."""

    def normed(x: Array, name: str) -> Array:
        return rms_norm(x, hybrid.norm_offset + params[f"{name}.weight"])

    x = params["model.embed_tokens.weight"][rows.token_ids]
    for layer in range(len(IS_RECURRENT)):
        prefix, part = f"model.layers.{layer}.", part_of(hybrid, layer)
        x += part.mix(normed(x, prefix + hybrid.norms[0]), params, f"{prefix}{part.module}.", rows)
        x += mlp(normed(x, prefix + hybrid.norms[1]), params, f"{prefix}{hybrid.mlp}.", hybrid.mlp_names)
    return project(normed(x, hybrid.last_norm), params["model.embed_tokens.weight"])


def save(params: Params, directory: Path, hybrid: Hybrid) -> None:
    """Write the model."""
    write_model_directory(directory)
    (directory / "config.json").write_text(json.dumps(config(hybrid), indent=2, sort_keys=True) + "\n")
    save_weights(params, directory)
