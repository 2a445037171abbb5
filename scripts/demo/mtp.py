"""A small DeepSeek-V3 without experts, trained together with its layer for multi-token prediction (MTP)."""

import json
from functools import partial
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from scripts.demo import network
from scripts.demo.model_directory import ENDS_IDS, MAX_POSITIONS, ROPE_THETA, write_model_directory
from scripts.demo.network import Params, Rows, attend, mlp, rotate, split_heads
from scripts.demo.training import save_weights
from scripts.demo.training_text import PIECES

NUM_LAYERS = 2
HIDDEN_SIZE = 96
FFN_SIZE = 192
NUM_HEADS = 4
PLAIN_SIZE, ROTATED_SIZE, VALUE_SIZE = 16, 16, 24
QUERY_RANK, LATENT_RANK = 48, 32
NORM_EPSILON = 1e-6
MTP_WEIGHT = 0.5
"""Weight of the MTP layer's loss; the model's own has 1."""
_MTP_LAYER = f"model.layers.{NUM_LAYERS}."
rms_norm = partial(network.rms_norm, epsilon=NORM_EPSILON)
_COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}


def target_config() -> dict[str, object]:
    """Return the content of config.json."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "first_k_dense_replace": NUM_LAYERS,
        "hidden_act": "silu",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": FFN_SIZE,
        "kv_lora_rank": LATENT_RANK,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": FFN_SIZE,
        "n_group": 1,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_attention_heads": NUM_HEADS,
        "num_experts_per_tok": 1,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": NUM_HEADS,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": QUERY_RANK,
        "qk_nope_head_dim": PLAIN_SIZE,
        "qk_rope_head_dim": ROTATED_SIZE,
        "rms_norm_eps": NORM_EPSILON,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "v_head_dim": VALUE_SIZE,
        "vocab_size": len(PIECES),
        **ENDS_IDS,
    }


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, without the MTP layer's copies of embedding and output head."""
    size, both = HIDDEN_SIZE, PLAIN_SIZE + ROTATED_SIZE
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
        "self_attn.q_a_proj": (QUERY_RANK, size),
        "self_attn.q_a_layernorm": (QUERY_RANK,),
        "self_attn.q_b_proj": (NUM_HEADS * both, QUERY_RANK),
        "self_attn.kv_a_proj_with_mqa": (LATENT_RANK + ROTATED_SIZE, size),
        "self_attn.kv_a_layernorm": (LATENT_RANK,),
        "self_attn.kv_b_proj": (NUM_HEADS * (PLAIN_SIZE + VALUE_SIZE), LATENT_RANK),
        "self_attn.o_proj": (size, NUM_HEADS * VALUE_SIZE),
        "mlp.gate_proj": (FFN_SIZE, size),
        "mlp.up_proj": (FFN_SIZE, size),
        "mlp.down_proj": (size, FFN_SIZE),
    }
    norms = {_MTP_LAYER + name: (size,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes: dict[str, tuple[int, ...]] = {
        **{f"model.layers.{i}.{name}": shape for i in range(NUM_LAYERS + 1) for name, shape in layer.items()},
        **norms,
        _MTP_LAYER + "eh_proj": (size, 2 * size),
        "model.norm": (size,),
        **{name: (len(PIECES), size) for name in _COPIES.values()},
    }
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def latent_attention(
    x: Float[Array, "B T D"], params: Params, prefix: str, mask: Bool[Array, "B T T"]
) -> Float[Array, "B T D"]:
    """Return the attention of a layer, whose keys and values are projections of a latent."""
    query = rms_norm(x @ params[prefix + "q_a_proj.weight"].T, params[prefix + "q_a_layernorm.weight"])
    q = split_heads(query @ params[prefix + "q_b_proj.weight"].T, NUM_HEADS)
    down = x @ params[prefix + "kv_a_proj_with_mqa.weight"].T
    latent = rms_norm(down[..., :LATENT_RANK], params[prefix + "kv_a_layernorm.weight"])
    up = split_heads(latent @ params[prefix + "kv_b_proj.weight"].T, NUM_HEADS)
    shared = rotate(split_heads(down[..., LATENT_RANK:], 1), neighbours=True)
    q = jnp.concatenate([q[..., :PLAIN_SIZE], rotate(q[..., PLAIN_SIZE:], neighbours=True)], axis=-1)
    k = jnp.concatenate([up[..., :PLAIN_SIZE], jnp.repeat(shared, NUM_HEADS, axis=1)], axis=-1)
    return attend(q, k, up[..., PLAIN_SIZE:], mask) @ params[prefix + "o_proj.weight"].T


def layer_output(x: Float[Array, "B T D"], params: Params, layer: int, mask: Bool[Array, "B T T"]) -> Array:
    """Return the output [B, T, D] of a decoder layer."""
    prefix = f"model.layers.{layer}."
    x += latent_attention(rms_norm(x, params[prefix + "input_layernorm.weight"]), params, prefix + "self_attn.", mask)
    return x + mlp(rms_norm(x, params[prefix + "post_attention_layernorm.weight"]), params, prefix + "mlp.")


def seen_states(params: Params, rows: Rows) -> Float[Array, "B T D"]:
    """Return what the model's output head reads."""
    x, mask = params["model.embed_tokens.weight"][rows.token_ids], rows.mask
    for layer in range(NUM_LAYERS):
        x = layer_output(x, params, layer, mask)
    return rms_norm(x, params["model.norm.weight"])


def drafted_states(params: Params, rows: Rows, seen: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Return what the output head reads for the MTP layer, which has the seen state of the token before each."""
    embedded, before = params["model.embed_tokens.weight"][rows.token_ids], rows.before(seen)
    parts = (
        rms_norm(embedded, params[_MTP_LAYER + "enorm.weight"]),
        rms_norm(before, params[_MTP_LAYER + "hnorm.weight"]),
    )
    x = jnp.concatenate(parts, axis=-1) @ params[_MTP_LAYER + "eh_proj.weight"].T
    return rms_norm(layer_output(x, params, NUM_LAYERS, rows.mask), params[_MTP_LAYER + "shared_head.norm.weight"])


def loss_of(params: Params, fixed: Params, rows: Rows) -> Float[Array, ""]:
    """Return the loss of the model and its MTP layer."""
    seen, head = seen_states(params, rows), params["lm_head.weight"].T
    drafted = rows.loss(drafted_states(params, rows, seen) @ head, rows.is_drafted)
    return rows.loss(seen @ head, rows.is_answer) + MTP_WEIGHT * drafted


def save(params: Params, directory: Path) -> None:
    """Write the model."""
    write_model_directory(directory)
    (directory / "config.json").write_text(json.dumps(target_config(), indent=2, sort_keys=True) + "\n")
    copies = {f"{_MTP_LAYER}{name}.weight": params[f"{source}.weight"] for name, source in _COPIES.items()}
    save_weights(params | copies, directory)
