"""Recurrent mixers and attention in JAX over packed rows, written for training.

A recurrence is computed for all tokens of a row at once: what a token reads is a sum over the earlier tokens of its own
segment, each of which has decayed since. A row is short, so that one such matrix per head is cheap.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scripts.demo.network import Params, Rows, attend, project, rms_norm, rotate, split_heads

BLOCK = 16
"""Tokens of a block whose system a solver solves; rows are multiples of it."""


class DeltaNet(NamedTuple):
    """Heads of a gated delta net."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int


class Mamba(NamedTuple):
    """Heads of Mamba-2."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int


class Attention(NamedTuple):
    """Heads of attention, and what families choose.

    Attributes:
        num_heads: Heads of queries, and of keys and values.
        head_size: Features of a head.
        rotated: How many of them are rotated.
        out: Name of the output projection.
        norms: Names of the norms of a head's query and key; None for none.
        norm_offset: Is added to the weights of these norms.
        is_gated: Whether each head's query is followed by a gate of its output.
    """

    num_heads: int
    head_size: int
    rotated: int
    out: str = "o_proj"
    norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    is_gated: bool = False


def convolved(x: Float[Array, "B T C"], params: Params, name: str, rows: Rows) -> Float[Array, "B T C"]:
    """Return the causal convolution of each channel over its latest tokens, of which the last tap has the newest."""
    weight = params[f"{name}.weight"][:, 0]
    summed = x * weight[:, -1] + params.get(f"{name}.bias", 0.0)
    for tap in range(2, weight.shape[1] + 1):
        x = rows.before(x)
        summed += x * weight[:, -tap]
    return summed


def decays(logs: Float[Array, "B T N"], rows: Rows) -> Float[Array, "B N T T"]:
    """Return what is left at each token of what each earlier one of its segment has written; 0 of all others.

    Args:
        logs: Logarithm of the factor by which each token shrinks the state before it writes.
        rows: The rows.
    """
    total, is_seen = jnp.cumsum(logs, axis=1).swapaxes(1, 2), rows.mask[:, None]
    since = jnp.where(is_seen, total[..., :, None] - total[..., None, :], 0.0)
    return jnp.where(is_seen, jnp.exp(since), 0.0)


def delta_net(
    x: Float[Array, "B T D"], params: Params, prefix: str, rows: Rows, heads: DeltaNet
) -> Float[Array, "B T D"]:
    """Return the output of a gated delta net with the modules of Qwen3.5.

    A token writes the difference between its value and what the state has at its key. The differences depend on those
    of earlier tokens: they solve a triangular system.
    """
    key_width, repeats = heads.num_key_heads * heads.key_size, heads.num_value_heads // heads.num_key_heads
    mixed = jax.nn.silu(convolved(project(x, params[f"{prefix}in_proj_qkv.weight"]), params, f"{prefix}conv1d", rows))
    q, k, v = jnp.split(mixed, (key_width, 2 * key_width), axis=-1)
    q, k = (jnp.repeat(_unit(split_heads(each, heads.num_key_heads)), repeats, axis=1) for each in (q, k))
    rate = jax.nn.sigmoid(project(x, params[f"{prefix}in_proj_b.weight"])).swapaxes(1, 2)[..., None]
    step = jax.nn.softplus(project(x, params[f"{prefix}in_proj_a.weight"]) + params[f"{prefix}dt_bias"])
    left = decays(-jnp.exp(params[f"{prefix}A_log"]) * step, rows)
    overlap = rate * left * (k @ k.swapaxes(2, 3))
    written = _solved(overlap, rate * split_heads(v, heads.num_value_heads))
    read = (left * (q @ k.swapaxes(2, 3)) / math.sqrt(heads.key_size)) @ written
    normed = rms_norm(read, params[f"{prefix}norm.weight"])
    gate = jax.nn.silu(project(x, params[f"{prefix}in_proj_z.weight"]))
    return project(_side_by_side(normed) * gate, params[f"{prefix}out_proj.weight"])


def _solved(overlap: Float[Array, "B N T T"], right: Float[Array, "B N T H"]) -> Float[Array, "B N T H"]:
    """Return the X for which X plus what is below the diagonal of ``overlap`` times X is the right side.

    Only blocks on the diagonal are inverted: the solver is slow, and the rest are products.
    """
    spans = [slice(start, start + BLOCK) for start in range(0, right.shape[2], BLOCK)]
    diagonal = jnp.stack([overlap[:, :, span, span] for span in spans])
    identity = jnp.broadcast_to(jnp.eye(BLOCK), diagonal.shape)
    inverses = jax.scipy.linalg.solve_triangular(diagonal, identity, lower=True, unit_diagonal=True)
    found = right[:, :, :0]
    for inverse, span in zip(inverses, spans, strict=True):
        rest = right[:, :, span] - overlap[:, :, span, : span.start] @ found
        found = jnp.concatenate([found, inverse @ rest], axis=2)
    return found


def _unit(x: Float[Array, "B N T H"]) -> Float[Array, "B N T H"]:
    """Return vectors of length one."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _side_by_side(x: Float[Array, "B N T H"]) -> Float[Array, "B T NH"]:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def mamba(x: Float[Array, "B T D"], params: Params, prefix: str, rows: Rows, heads: Mamba) -> Float[Array, "B T D"]:
    """Return the output of Mamba-2."""
    inner, group_width = heads.num_heads * heads.head_size, heads.num_groups * heads.state_size
    projected = project(x, params[f"{prefix}in_proj.weight"])
    gate, mixed, step = jnp.split(projected, (inner, 2 * inner + 2 * group_width), axis=-1)
    mixed = jax.nn.silu(convolved(mixed, params, f"{prefix}conv1d", rows))
    value, b, c = jnp.split(mixed, (inner, inner + group_width), axis=-1)
    value, (b, c) = split_heads(value, heads.num_heads), (split_heads(each, heads.num_groups) for each in (b, c))
    step = jax.nn.softplus(step + params[f"{prefix}dt_bias"])
    left = decays(-jnp.exp(params[f"{prefix}A_log"]) * step, rows)
    scores = jnp.repeat(c @ b.swapaxes(2, 3), heads.num_heads // heads.num_groups, axis=1)
    read = (left * scores) @ (value * step.swapaxes(1, 2)[..., None]) + params[f"{prefix}D"][:, None, None] * value
    gated = _side_by_side(read) * jax.nn.silu(gate)
    groups = gated.reshape(*gated.shape[:2], heads.num_groups, -1)
    normed = rms_norm(groups, params[f"{prefix}norm.weight"].reshape(heads.num_groups, -1))
    return project(normed.reshape(gated.shape), params[f"{prefix}out_proj.weight"])


def short_convolution(x: Float[Array, "B T D"], params: Params, prefix: str, rows: Rows) -> Float[Array, "B T D"]:
    """Return the output of a gated short convolution."""
    b, c, value = jnp.split(project(x, params[f"{prefix}in_proj.weight"]), 3, axis=-1)
    return project(c * convolved(b * value, params, f"{prefix}conv", rows), params[f"{prefix}out_proj.weight"])


def attention(
    x: Float[Array, "B T D"], params: Params, prefix: str, rows: Rows, heads: Attention
) -> Float[Array, "B T D"]:
    """Return the output of attention."""
    q, k, v = (split_heads(project(x, params[f"{prefix}{name}_proj.weight"]), heads.num_heads) for name in "qkv")
    gate = None
    if heads.is_gated:
        q, gate = jnp.split(q, 2, axis=-1)
    if heads.norms is not None:
        q, k = (
            rms_norm(each, heads.norm_offset + params[f"{prefix}{name}.weight"])
            for each, name in zip((q, k), heads.norms, strict=True)
        )
    q, k = (
        jnp.concatenate([rotate(each[..., : heads.rotated]), each[..., heads.rotated :]], axis=-1) for each in (q, k)
    )
    attended = attend(q, k, v, rows.mask)
    if gate is not None:
        attended *= jax.nn.sigmoid(_side_by_side(gate))
    return project(attended, params[f"{prefix}{heads.out}.weight"])
