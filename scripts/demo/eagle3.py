"""An EAGLE-3 head of the demo model, in the original format."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from scripts.demo.model_directory import DEMO, config
from scripts.demo.network import Params, Rows, attend, llama_states, mlp, rms_norm, rotate, split_heads
from scripts.demo.training import save_weights
from scripts.demo.training_text import CHARACTERS, PIECES, SPECIAL_TOKENS

AUX_LAYERS = (1, 2, 3)
FFN_SIZE = 160
NUM_PASSES = 3
"""Drafts in a row that the head is trained for, by feeding its own states back."""
DRAFT_IDS = np.array([i for i, piece in enumerate(PIECES) if piece in (*SPECIAL_TOKENS, *CHARACTERS)])
"""Token ids that the head drafts: all but bytes."""


def head_config() -> dict[str, object]:
    """Return the content of the head's config.json."""
    kept = "rms_norm_eps", "rope_theta", "vocab_size", "hidden_size", "head_dim", "max_position_embeddings"
    same = "num_attention_heads", "num_key_value_heads", "hidden_act", "torch_dtype"
    return {
        **{name: config()[name] for name in (*kept, *same)},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": len(DRAFT_IDS),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)},
        "intermediate_size": FFN_SIZE,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each of the head's weights."""
    size, heads = DEMO.hidden_size, DEMO.num_heads * DEMO.head_size
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {f"midlayer.{name}.weight": (size,) for name in norms}
    shapes |= {f"midlayer.self_attn.{name}_proj.weight": (heads, 2 * size) for name in "qkv"}
    shapes |= {f"midlayer.mlp.{name}_proj.weight": (FFN_SIZE, size) for name in ("gate", "up")}
    shapes |= {"midlayer.self_attn.o_proj.weight": (size, heads)}
    shapes |= {"midlayer.mlp.down_proj.weight": (size, FFN_SIZE), "norm.weight": (size,)}
    return shapes | {"fc.weight": (size, len(AUX_LAYERS) * size), "lm_head.weight": (len(DRAFT_IDS), size)}


def pass_mask(rows: Rows, number: int) -> Bool[Array, "B T S"]:
    """Return what each token sees of the entries of passes 1 to ``number`` side by side.

    In pass n, which drafts the n-th token after each, the latest n - 1 entries are those of later passes.
    """
    place = jnp.arange(rows.token_ids.shape[1])
    distance = place[:, None] - place
    seen = [distance >= number - 1, *(distance == number - each for each in range(2, number + 1))]
    return jnp.concatenate([rows.mask & part for part in seen], axis=-1)


def all_logits(head: Params, target: Params, rows: Rows) -> list[Float[Array, "B T draft"]]:
    """Return logits of the token after each for each pass: the first has the states of the target up to the token
    before each token, the others those of the pass before."""
    inputs = llama_states(target, rows)
    state = jnp.concatenate([inputs[i] for i in AUX_LAYERS], axis=-1) @ head["fc.weight"].T
    embedded = rms_norm(inputs[0], head["midlayer.input_layernorm.weight"])
    keys, values, logits = list[Array](), list[Array](), list[Array]()
    for number in range(1, NUM_PASSES + 1):
        before = rows.before(state)
        both = jnp.concatenate([embedded, rms_norm(before, head["midlayer.hidden_norm.weight"])], axis=-1)
        q, k, v = (split_heads(both @ head[f"midlayer.self_attn.{x}_proj.weight"].T, DEMO.num_heads) for x in "qkv")
        keys.append(rotate(k))
        values.append(v)
        entries = jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)
        attended = attend(rotate(q), entries[0], entries[1], pass_mask(rows, number))
        state = before + attended @ head["midlayer.self_attn.o_proj.weight"].T
        state += mlp(rms_norm(state, head["midlayer.post_attention_layernorm.weight"]), head, "midlayer.mlp.")
        logits.append(rms_norm(state, head["norm.weight"]) @ head["lm_head.weight"].T)
    return logits


def loss_of(head: Params, target: Params, rows: Rows) -> Float[Array, ""]:
    """Return the mean loss of all passes."""
    everything = jnp.full((*rows.token_ids.shape, len(PIECES)), -1e30)
    logits = all_logits(head, jax.lax.stop_gradient(target), rows)
    losses = [rows.loss(everything.at[:, :, DRAFT_IDS].set(each), rows.is_drafted) for each in logits]
    return sum(losses, jnp.zeros(())) / NUM_PASSES


def save(head: Params, directory: Path) -> None:
    """Write the head."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(head_config(), indent=2, sort_keys=True) + "\n")
    save_weights(
        head, directory, d2t=DRAFT_IDS - np.arange(len(DRAFT_IDS)), t2d=np.isin(np.arange(len(PIECES)), DRAFT_IDS)
    )
