"""Networks in JAX that read weights under their Hugging Face names, over packed rows; matrices are [out, in]."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from scripts.demo.model_directory import DEMO, NORM_EPSILON, ROPE_THETA, Sizes
from scripts.demo.training_text import Batch

Params = dict[str, Array]


class Rows(NamedTuple):
    """The arrays of a ``Batch``."""

    token_ids: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    is_answer: Bool[Array, "B T"]

    @classmethod
    def of(cls, batch: Batch) -> "Rows":
        """Return the arrays of a batch on the device."""
        return cls(*map(jnp.asarray, (batch.token_ids, batch.segments, batch.is_answer)))

    @property
    def mask(self) -> Bool[Array, "B T T"]:
        """What each token sees: the earlier ones of its own segment, and itself."""
        causal = jnp.tril(jnp.ones((self.token_ids.shape[1], self.token_ids.shape[1]), bool))
        return causal & (self.segments[:, :, None] == self.segments[:, None, :])

    def before(self, states: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the state of the token before each, zeros where a segment begins."""
        is_same = self.segments[:, 1:] == self.segments[:, :-1]
        return jnp.zeros_like(states).at[:, 1:].set(jnp.where(is_same[:, :, None], states[:, :-1], 0))

    def loss(self, logits: Float[Array, "B T V"], is_counted: Bool[Array, "B T"]) -> Float[Array, ""]:
        """Return the mean cross-entropy of the tokens that are counted, in nats."""
        logits, counted = logits[:, :-1], is_counted[:, 1:]
        chosen = jnp.take_along_axis(logits, self.token_ids[:, 1:, None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        return jnp.sum(losses * counted) / jnp.sum(counted)

    @property
    def is_drafted(self) -> Bool[Array, "B T"]:
        """Whether each token is an answer token that follows one: what a draft head guesses."""
        return self.is_answer.at[:, 1:].set(self.is_answer[:, 1:] & self.is_answer[:, :-1])


def init_params(shapes: dict[str, tuple[int, ...]], seed: int) -> Params:
    """Return float32 weights: vectors of ones, and small random matrices."""
    source = np.random.default_rng(seed)
    return {
        name: jnp.ones(shape) if len(shape) == 1 else jnp.asarray(source.normal(0, 0.02, shape), jnp.float32)
        for name, shape in shapes.items()
    }


def rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, "*groups D"], *, epsilon: float = NORM_EPSILON
) -> Float[Array, "*rows D"]:
    """Return x over its root mean square, times the weight."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def rotate(x: Float[Array, "B N T H"], *, neighbours: bool = False) -> Float[Array, "B N T H"]:
    """Return heads rotated by their position in the row: pairs of features are half a head apart, or neighbours."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[2])[:, None] * ROPE_THETA ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    rotated = first * cos - second * sin, second * cos + first * sin
    return jnp.stack(rotated, axis=-1).reshape(x.shape) if neighbours else jnp.concatenate(rotated, axis=-1)


def project(x: Float[Array, "B T D"], weight: Float[Array, "O D"]) -> Float[Array, "B T O"]:
    """Return x times a matrix: one product of all tokens, whose gradient is one as well."""
    return (x.reshape(-1, x.shape[-1]) @ weight.T).reshape(*x.shape[:-1], -1)


def split_heads(x: Float[Array, "B T NH"], num_heads: int) -> Float[Array, "B N T H"]:
    """Return the heads that features consist of."""
    return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)


def attend(
    q: Float[Array, "B N T H"], k: Float[Array, "B N S H"], v: Float[Array, "B N S V"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T NV"]:
    """Return the heads' attention, side by side."""
    scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    return (weights @ v).swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)


def attention(
    x: Float[Array, "B T D"], params: Params, prefix: str, mask: Bool[Array, "B T T"], num_heads: int
) -> Float[Array, "B T D"]:
    """Return the attention of a Llama's layer."""
    q, k, v = (split_heads(x @ params[f"{prefix}{name}_proj.weight"].T, num_heads) for name in "qkv")
    return attend(rotate(q), rotate(k), v, mask) @ params[prefix + "o_proj.weight"].T


def mlp(
    x: Float[Array, "B T D"],
    params: Params,
    prefix: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Float[Array, "B T D"]:
    """Return the gated MLP of a layer."""
    gate, up, down = (params[f"{prefix}{name}.weight"] for name in names)
    return project(jax.nn.silu(project(x, gate)) * project(x, up), down)


def llama_states(params: Params, rows: Rows, sizes: Sizes = DEMO) -> list[Float[Array, "B T D"]]:
    """Return the input of each layer of a Llama, and the output of the last."""
    mask, states = rows.mask, [params["model.embed_tokens.weight"][rows.token_ids]]
    for layer in range(sizes.num_layers):
        prefix, x = f"model.layers.{layer}.", states[-1]
        normed = rms_norm(x, params[prefix + "input_layernorm.weight"])
        x += attention(normed, params, prefix + "self_attn.", mask, sizes.num_heads)
        x += mlp(rms_norm(x, params[prefix + "post_attention_layernorm.weight"]), params, prefix + "mlp.")
        states.append(x)
    return states


def llama_logits(params: Params, rows: Rows, sizes: Sizes = DEMO) -> Float[Array, "B T V"]:
    """Return next-token logits of a Llama whose output head is its embedding."""
    last = llama_states(params, rows, sizes)[-1]
    return rms_norm(last, params["model.norm.weight"]) @ params["model.embed_tokens.weight"].T
