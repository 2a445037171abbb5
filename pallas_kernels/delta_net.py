"""The update of a gated delta net (arXiv:2412.06464; Qwen3-Next, Qwen3.5, Kimi-Linear): interface, cases and a plain
reference.

From a token's projection to the input of the output projection, in one call for a step of many rows: a causal
convolution of queries, keys and values with SiLU; unit queries and keys; the gated delta rule on each value head;
the norm of each head, and the gate after it. For each value head, with the key head that serves it,

    S = decay * S;  S = S + k (beta * (v - S^T k))^T;  o = S^T q

where ``beta = sigmoid(b)`` and ``decay = exp(-exp(a_log) * softplus(a + dt_bias))``. Unit vectors are
``x / sqrt(sum(x^2) + 1e-6)``, and queries also times ``key_dim ** -0.5``. See ``recurrent_states`` for pages and rows.

In Kimi's delta attention (KDA, arXiv:2510.26692) every key feature of a head has a decay of its own, with its own ``a``
and ``dt_bias``, and the gate is a sigmoid instead of SiLU.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.operation import Comparison, Cost, Tolerance, compare_rows
from pallas_kernels.recurrent_states import (
    RAGGED,
    Convolution,
    Row,
    StateRows,
    States,
    make_rows,
    num_pages_of,
    num_tokens_of,
    reference_convolution,
    stretches,
    write_stretch,
)

UNIT_EPS = 1e-6


class DeltaNetSizes(NamedTuple):
    """Heads of one device. Key head j serves the value heads from ``j * num_value_heads / num_key_heads`` on.

    ``has_key_decays`` says whether each key feature of a head has its own decay, as in Kimi's delta attention, whose
    gate is a sigmoid; otherwise each head has one decay, and its gate is SiLU.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    has_key_decays: bool = False

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: all queries, all keys, all values."""
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        """Features of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_decays(self) -> int:
        """Decays of a token: one per value head, or one per key feature of each."""
        return self.num_value_heads * (self.key_dim if self.has_key_decays else 1)

    @property
    def width(self) -> int:
        """Features of a token's projection."""
        return self.num_channels + self.inner + self.num_value_heads + self.num_decays


class DeltaNetWeights(NamedTuple):
    """Parameters; implementations compute with them in float32. ``norm`` is that of all heads."""

    convolution: Convolution
    a_log: Float[Array, " Hv"]
    dt_bias: Float[Array, " decays"]
    norm: Float[Array, " dv"]


@runtime_checkable
class DeltaNetKernel(Protocol):
    """The functions of an implementation module."""

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None; the dtype is that of projections and tails.

        Sizes are ``num_key_heads``, ``num_value_heads``, ``key_dim``, ``value_dim``, ``has_key_decays`` and ``taps``.
        """
        ...

    def state_shape(self, num_heads: int, num_keys: int, num_values: int) -> tuple[int, ...]:
        """Return the shape of one page of states, with heads first."""
        ...

    def to_layout(self, state: Float[Array, "P heads keys values"]) -> Float[Array, "P heads ..."]:
        """Return states in the implementation's layout."""
        ...

    def from_layout(self, state: Float[Array, "P heads ..."], num_values: int) -> Float[Array, "P heads keys values"]:
        """Return states as matrices: the inverse of ``to_layout``."""
        ...

    def copy_states(
        self, arrays: tuple[Float[Array, "P ..."], ...], sources: Int[Array, " C"], targets: Int[Array, " C"]
    ) -> tuple[Float[Array, "P ..."], ...]:
        """Return arrays with pages copied; see ``recurrent_states.copy_states``."""
        ...

    def update(
        self,
        projected: Float[Array, "T width"],
        weights: DeltaNetWeights,
        states: States,
        rows: StateRows,
        *,
        sizes: DeltaNetSizes,
        eps: float,
    ) -> tuple[Float[Array, "T inner"], States]:
        """Compute the layer's tokens and update its states.

        Args:
            projected: The features q | k | v | z | b | a of each token: all queries, all keys, all values, the gates of
                all values, a number per value head, and one per decay, in order of heads.
            weights: Parameters of the layer.
            states: Tails in the dtype of ``projected``, and states; donate them to update them in place.
            rows: Rows of the step.
            sizes: Heads.
            eps: Of the norm.

        Returns:
            Normalized and gated heads in float32, undefined but finite for padding tokens; and the states.
        """
        ...


class Case(NamedTuple):
    """One shape; ``spare_rows`` and ``spare_tokens`` are padding."""

    rows: tuple[Row, ...]
    num_key_heads: int = 2
    num_value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    taps: int = 4
    dtype: str = "float32"
    has_key_decays: bool = False
    spare_rows: int = 1
    spare_tokens: int = 3

    @property
    def heads(self) -> DeltaNetSizes:
        """The heads of the case."""
        return DeltaNetSizes(
            self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim, self.has_key_decays
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the step with its padding."""
        return num_tokens_of(self.rows) + self.spare_tokens


class Inputs(NamedTuple):
    """Arguments of a call; states are matrices until they are prepared."""

    projected: Float[Array, "T width"]
    weights: DeltaNetWeights
    states: States
    rows: StateRows


IS_IN_PLACE = True
CASES: Mapping[str, Case] = {
    "one_token": Case((Row(1),), spare_rows=0, spare_tokens=0),
    "decode": Case((Row(1), Row(1, is_new=True), Row(1, snapshots=(1,)), Row(1))),
    "ragged": Case(RAGGED),
    "ragged_bf16": Case(RAGGED, dtype="bfloat16"),
    "long": Case((Row(150, is_new=True, snapshots=(77,)), Row(70)), num_key_heads=1, num_value_heads=1),
    "small_heads": Case(RAGGED, key_dim=16, value_dim=16),
    "odd_heads": Case(RAGGED, num_key_heads=3, num_value_heads=3, key_dim=24, value_dim=20),
    "tiny_heads": Case((Row(3), Row(4, is_new=True)), key_dim=5, value_dim=3),
    "wide_values": Case((Row(9), Row(1)), key_dim=64, value_dim=128),
    "wide_keys": Case((Row(9), Row(1)), key_dim=128, value_dim=48),
    "six_values_per_key": Case((Row(7, snapshots=(3,)), Row(1)), num_key_heads=1, num_value_heads=6),
    "two_taps": Case(RAGGED, taps=2),
    "three_taps": Case(RAGGED, taps=3),
    "shorter_than_taps": Case(
        (Row(2), Row(3, is_new=True, snapshots=(1,)), Row(1, is_new=True), Row(2, snapshots=(1,)))
    ),
    "only_padding": Case((Row(0),)),
    "key_decays": Case(RAGGED, has_key_decays=True),
    "key_decays_bf16": Case(RAGGED, dtype="bfloat16", has_key_decays=True),
    "key_decays_decode": Case((Row(1), Row(1), Row(1, snapshots=(1,)), Row(1)), has_key_decays=True),
    "key_decays_odd_heads": Case(
        RAGGED, num_key_heads=3, num_value_heads=3, key_dim=21, value_dim=20, has_key_decays=True
    ),
    "key_decays_tiny_heads": Case((Row(3), Row(4, is_new=True)), key_dim=1, value_dim=3, has_key_decays=True),
    "key_decays_wide": Case(
        (Row(40, snapshots=(33,)), Row(1)), num_value_heads=2, key_dim=128, value_dim=128, has_key_decays=True
    ),
}
_WIDE = Case(RAGGED, key_dim=128, value_dim=128)
DEVICE_CASES: Mapping[str, Case] = {
    **CASES,
    "wide": _WIDE,
    "wide_bf16": _WIDE._replace(dtype="bfloat16"),
    "key_decays_wide_bf16": _WIDE._replace(dtype="bfloat16", has_key_decays=True),
}
_MODELS = {
    "qwen3.5_0.8b": DeltaNetSizes(16, 16, 128, 128),
    "qwen3.5_9b": DeltaNetSizes(16, 32, 128, 128),
    "kimi_linear_48b": DeltaNetSizes(32, 32, 128, 128, has_key_decays=True),
}
_STEPS = {f"decode_{count}": (Row(1),) * count for count in (1, 8, 32)} | {"prefill_512": (Row(512, is_new=True),)}
BENCHES: Mapping[str, Case] = {
    f"{model}_{step}": Case(rows, **sizes._asdict(), spare_rows=0, spare_tokens=0)
    for model, sizes in _MODELS.items()
    for step, rows in _STEPS.items()
}
_EPS = 1e-6


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make random projections, weights whose states matter for some hundred tokens, and states in every page."""
    keys = jax.random.split(key, 8)
    sizes, num_pages = case.heads, num_pages_of(case.rows, case.spare_rows)
    heads = sizes.num_value_heads
    weights = DeltaNetWeights(
        Convolution(0.5 * jax.random.normal(keys[0], (case.taps, sizes.num_channels))),
        a_log=jnp.log(jax.random.uniform(keys[1], (heads,), minval=0.002, maxval=0.2)),
        dt_bias=0.3 * jax.random.normal(keys[2], (sizes.num_decays,)),
        norm=1 + 0.1 * jax.random.normal(keys[3], (case.value_dim,)),
    )
    tail = jax.random.normal(keys[4], (num_pages, case.taps - 1, sizes.num_channels)).astype(case.dtype)
    state = 0.3 * jax.random.normal(keys[5], (num_pages, heads, case.key_dim, case.value_dim))
    projected = jax.random.normal(keys[6], (case.num_tokens, sizes.width)).astype(case.dtype)
    return Inputs(projected, weights, States(tail, state), make_rows(case.rows, case.spare_rows, keys[7]))


def prepare(implementation: DeltaNetKernel, case: Case, inputs: Inputs) -> Inputs:
    """Convert the states to the layout of the implementation."""
    del case
    states = inputs.states
    return inputs._replace(states=states._replace(state=implementation.to_layout(states.state)))


def run(implementation: DeltaNetKernel, case: Case, prepared: Inputs) -> tuple[Array, Array, Array]:
    """Return the heads of all tokens, and all tails and states."""
    y, (tail, state) = implementation.update(*prepared, sizes=case.heads, eps=_EPS)
    by_head = y.reshape(case.num_tokens, case.num_value_heads, case.value_dim)
    return by_head, tail, implementation.from_layout(state, case.value_dim)


def expected(case: Case, inputs: Inputs) -> tuple[Array, Array, Array]:
    """Compute each row by itself, token by token, in float32."""
    sizes, (projected, weights, (tail, state), batch) = case.heads, inputs
    outputs = [jnp.zeros((0, sizes.num_value_heads, sizes.value_dim))]
    for stretch in stretches(case.rows, batch):
        old_tail, old_state = (jnp.where(stretch.is_new, 0, pages[stretch.source]) for pages in (tail, state))
        tokens = projected[stretch.first : stretch.last]
        y, new_tail, new_state = _reference(tokens, weights, old_tail, old_state, sizes)
        outputs.append(y)
        if len(tokens):
            tail, state = write_stretch(tail, stretch, new_tail), write_stretch(state, stretch, new_state)
    return jnp.pad(jnp.concatenate(outputs), ((0, case.spare_tokens), (0, 0), (0, 0))), tail, state


def _reference(
    tokens: Float[Array, "n width"],
    weights: DeltaNetWeights,
    tail: Float[Array, "history channels"],
    state: Float[Array, "Hv dk dv"],
    sizes: DeltaNetSizes,
) -> tuple[Float[Array, "n Hv dv"], Float[Array, "history channels"], Float[Array, "Hv dk dv"]]:
    """Compute some tokens of a sequence; return the next tail and state too."""
    count, (key_heads, heads, key_dim, value_dim, has_key_decays) = tokens.shape[0], sizes
    mixed, z, b, a = jnp.split(tokens, np.cumsum([sizes.num_channels, sizes.inner, heads]), axis=1)
    z, b, a = (x.astype(jnp.float32) for x in (z, b, a))
    mixed, new_tail = reference_convolution(mixed, tail, weights.convolution)
    query, key, value = jnp.split(jax.nn.silu(mixed), [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    query, key = (x.reshape(count, key_heads, key_dim) for x in (query, key))
    query, key = (x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + UNIT_EPS) for x in (query, key))
    query, key = (jnp.repeat(x, heads // key_heads, axis=1) for x in (query * key_dim**-0.5, key))
    steps = jax.nn.softplus(a + weights.dt_bias).reshape(count, heads, sizes.num_decays // heads)
    decay = jnp.exp(-jnp.exp(weights.a_log)[:, None] * steps)

    def step(matrix, token):
        q, k, v, beta, decay = token
        matrix = matrix * decay[:, :, None]
        found = jnp.einsum("hkv,hk->hv", matrix, k, precision=lax.Precision.HIGHEST)
        matrix = matrix + k[:, :, None] * (beta[:, None] * (v - found))[:, None]
        return matrix, jnp.einsum("hkv,hk->hv", matrix, q, precision=lax.Precision.HIGHEST)

    values = value.reshape(count, heads, value_dim)
    new_state, o = lax.scan(step, state, (query, key, values, jax.nn.sigmoid(b), decay))
    o = o * lax.rsqrt(jnp.square(o).mean(-1, keepdims=True) + _EPS) * weights.norm
    gate = jax.nn.sigmoid if has_key_decays else jax.nn.silu
    return o * gate(z.reshape(o.shape)), new_tail, new_state


def compare(
    case: Case, inputs: Inputs, found: tuple[Array, Array, Array], expected: tuple[Array, Array, Array]
) -> Comparison:
    """Compare each head of each token, and every page's tail and state; padding tokens are ignored."""
    del inputs
    is_used = np.arange(case.num_tokens) < num_tokens_of(case.rows)
    return compare_rows(
        ("heads", "tail", "state"),
        found,
        expected,
        (is_used[:, None], np.array(True), np.array(True)),
        Tolerance(2e-5, 1e-2),
    )


def cost(case: Case) -> Cost:
    """Count the states of rows once in and once out, projections and results, and 8 operations per element."""
    sizes, num_rows, num_tokens = case.heads, sum(row.length > 0 for row in case.rows), num_tokens_of(case.rows)
    elements = sizes.num_value_heads * sizes.key_dim * sizes.value_dim
    width = jnp.dtype(case.dtype).itemsize
    tail = (case.taps - 1) * sizes.num_channels * width
    num_bytes = num_rows * 2 * (4 * elements + tail) + num_tokens * (sizes.width * width + 4 * sizes.inner)
    return Cost(num_bytes, 8 * elements * num_tokens)


def sizes(case: Case) -> dict[str, int]:
    """Return heads, their sizes and kind, and the taps of the convolution."""
    return {**case.heads._asdict(), "taps": case.taps}


def dtype(case: Case) -> str:
    """Return the dtype of projections and tails."""
    return case.dtype
