"""Hybrids from the demo model: what they take from it, and losses by which the rest learns to do the same.

The demo model's layers have attention. A hybrid has its embeddings, norms and MLPs; the attention of the layers that
keep it, in the family's own form; and recurrent mixers in place of the attention of the others.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from safetensors.numpy import load_file

from jaxserve.demo import MODEL_DIRECTORY
from scripts.demo import mixers, network
from scripts.demo.hybrids import IS_RECURRENT, Hybrid, hybrid_states, last_logits, part_of, weight_shapes
from scripts.demo.model_directory import DEMO
from scripts.demo.network import Params, Rows, init_params, llama_states, rms_norm

TEACHER = "demo."
"""Precedes the names of the demo model's weights among those that stay."""
STATES_SHARE = 0.3
"""Weight of the error of the states beside the cross-entropy of the answers, in nats."""
WIDENED = 0.02
"""Standard deviation of the projections of features that the demo model's heads do not have."""


def teacher() -> Params:
    """Return the demo model's weights, under names of their own."""
    return {TEACHER + name: weight for name, weight in _demo_weights().items()}


def first_weights(hybrid: Hybrid, seed: int) -> Params:
    """Return a hybrid's weights before training: the demo model's, and random ones in recurrent mixers.

    Some of their states last for a hundred tokens, some for a few.
    """
    demo, source = _demo_weights(), np.random.default_rng(seed + 1)
    params = init_params(weight_shapes(hybrid), seed)
    for name, weight in params.items():
        if name.endswith("A_log"):
            params[name] = jnp.asarray(np.log(source.uniform(0.5, 4.0, weight.shape)), jnp.float32)
        elif name.endswith("dt_bias"):
            steps = np.exp(source.uniform(np.log(0.01), np.log(0.3), weight.shape))
            params[name] = jnp.asarray(np.log(np.expm1(steps)), jnp.float32)
        elif weight.ndim == 3:
            params[name] = jnp.asarray(source.uniform(-1, 1, weight.shape) * weight.shape[2] ** -0.5, jnp.float32)
        elif name.endswith(".bias"):
            params[name] = jnp.zeros_like(weight)
        elif weight.ndim == 2 and "out_proj" not in name:
            params[name] = jnp.asarray(source.standard_normal(weight.shape) * weight.shape[1] ** -0.5, jnp.float32)
    return params | _taken(hybrid, demo, source)


def _demo_weights() -> Params:
    stored = load_file(MODEL_DIRECTORY / "model.safetensors")
    return {name: jnp.asarray(tensor, jnp.float32) for name, tensor in stored.items()}


def _of_teacher(fixed: Params) -> Params:
    return {name.removeprefix(TEACHER): weight for name, weight in fixed.items() if name.startswith(TEACHER)}


def _taken(hybrid: Hybrid, demo: Params, source: np.random.Generator) -> Params:
    """Return what a hybrid has from the demo model."""
    taken = {"model.embed_tokens.weight": demo["model.embed_tokens.weight"]}
    norms = {f"{hybrid.last_norm}.weight": "model.norm.weight"}
    for layer, is_recurrent in enumerate(IS_RECURRENT):
        prefix = f"model.layers.{layer}."
        for own, name in zip(hybrid.norms, ("input_layernorm", "post_attention_layernorm"), strict=True):
            norms[f"{prefix}{own}.weight"] = f"{prefix}{name}.weight"
        for own, name in zip(hybrid.mlp_names, ("gate", "up", "down"), strict=True):
            taken[f"{prefix}{hybrid.mlp}.{own}.weight"] = demo[f"{prefix}mlp.{name}_proj.weight"]
        if not is_recurrent:
            taken |= _attention(demo, prefix, hybrid.heads, source)
    return taken | {own: demo[name] - hybrid.norm_offset for own, name in norms.items()}


def _attention(demo: Params, layer: str, heads: mixers.Attention, source: np.random.Generator) -> Params:
    """Return the attention of a layer in another form: heads may be wider, and have norms and gates.

    Gates are half open. Each norm has one weight for all features, by which the heads' queries and keys are about as
    long as without it.
    """
    prefix, num_more = f"{layer}self_attn.", heads.head_size - DEMO.head_size
    q, k, v = (
        demo[f"{prefix}{name}_proj.weight"].reshape(heads.num_heads, DEMO.head_size, DEMO.hidden_size) for name in "qkv"
    )
    more = WIDENED * source.standard_normal((3, heads.num_heads, num_more, DEMO.hidden_size))
    q *= math.sqrt(heads.head_size / DEMO.head_size)
    q, k, v = (jnp.concatenate([each, rest], axis=1) for each, rest in zip((q, k, v), more, strict=True))
    out = demo[f"{prefix}o_proj.weight"].reshape(DEMO.hidden_size, heads.num_heads, DEMO.head_size)
    out = jnp.pad(out, ((0, 0), (0, 0), (0, num_more)))
    norms = {}
    for name, weight in zip(heads.norms or (), (q, k), strict=False):
        sizes = jnp.sqrt(jnp.mean(jnp.sum((weight * demo[f"{layer}input_layernorm.weight"]) ** 2, axis=2), axis=1))
        usual = jnp.exp(jnp.mean(jnp.log(sizes))) - heads.norm_offset
        norms[f"{prefix}{name}.weight"] = jnp.full(heads.head_size, usual)
    if heads.is_gated:
        q, out = jnp.concatenate([q, jnp.zeros_like(q)], axis=1), 2 * out
    projections = {
        f"{prefix}{name}_proj.weight": each.reshape(-1, DEMO.hidden_size)
        for name, each in zip("qkv", (q, k, v), strict=True)
    }
    return projections | norms | {f"{prefix}{heads.out}.weight": out.reshape(DEMO.hidden_size, -1)}


def is_new(hybrid: Hybrid, name: str) -> bool:
    """Return whether a weight belongs to a mixer that is not the demo model's attention."""
    is_other = hybrid.heads.is_gated or hybrid.heads.norms is not None
    return any(
        name.startswith(f"model.layers.{layer}.{part_of(hybrid, layer).module}.")
        for layer, is_recurrent in enumerate(IS_RECURRENT)
        if is_recurrent or is_other
    )


def mixer_loss(params: Params, fixed: Params, rows: Rows, hybrid: Hybrid) -> Float[Array, ""]:
    """Return the mean error of the new mixers' outputs, for inputs from the demo model, of which theirs should be the
    attention's."""
    demo, errors = _of_teacher(fixed), list[Array]()
    for layer, state in enumerate(llama_states(demo, rows)[:-1]):
        prefix, part = f"model.layers.{layer}.", part_of(hybrid, layer)
        if not any(name.startswith(f"{prefix}{part.module}.") for name in params):
            continue
        normed = rms_norm(state, demo[f"{prefix}input_layernorm.weight"])
        wanted = network.attention(normed, demo, f"{prefix}self_attn.", rows.mask, DEMO.num_heads)
        errors.append(_error(part.mix(normed, params, f"{prefix}{part.module}.", rows), wanted, rows))
    return jnp.mean(jnp.stack(errors))


def answer_loss(params: Params, fixed: Params, rows: Rows, hybrid: Hybrid) -> Float[Array, ""]:
    """Return the cross-entropy of the answer tokens, nats, plus a share of the error of the states after each layer."""
    states, wanted = hybrid_states(params, rows, hybrid), llama_states(_of_teacher(fixed), rows)
    errors = jnp.stack([_error(*pair, rows) for pair in zip(states[1:], wanted[1:], strict=True)])
    loss = rows.loss(last_logits(params, states[-1], hybrid), rows.is_answer)
    return loss + STATES_SHARE * jnp.mean(errors)


def _error(found: Float[Array, "B T D"], wanted: Float[Array, "B T D"], rows: Rows) -> Float[Array, ""]:
    """Return the squared error of all tokens, as a share of the squares of what is wanted."""
    is_text = (rows.segments > 0)[..., None]
    return jnp.sum(is_text * (found - wanted) ** 2) / jnp.sum(is_text * wanted**2)
