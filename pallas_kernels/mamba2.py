"""The update of a Mamba-2 layer (arXiv:2405.21060): interface, cases and a plain reference.

From a token's projection to the input of the output projection, in one call for a step of many rows: a causal
convolution of x, B and C with SiLU, the state-space update of a state per head, the gate and its norm. For each head,
with the group of B and C that serves it,

    S = exp(-exp(a_log) * dt) * S + B (dt * x)^T;  y = S^T C + d * x

where ``dt`` is ``softplus(dt + dt_bias)`` within its limits. States are matrices [state_dim, head_dim]: transposes
of those in other programs, so that they lie as those of ``delta_net``. See ``recurrent_states`` for pages and rows.
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


class Mamba2Sizes(NamedTuple):
    """Heads of one device. Group j of B and C serves the heads from ``j * num_heads / num_groups`` on."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: all of x, of B and of C."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def width(self) -> int:
        """Features of a token's projection."""
        return self.inner + self.num_channels + self.num_heads


class Mamba2Weights(NamedTuple):
    """Parameters; implementations compute with them in float32."""

    convolution: Convolution
    a_log: Float[Array, " heads"]
    dt_bias: Float[Array, " heads"]
    d: Float[Array, " heads"]


class StepLimits(NamedTuple):
    """The limits of dt, in prefill and decode alike."""

    least: float = 0.0
    most: float = float("inf")


class GroupNorm(NamedTuple):
    """The norm of each token's features, by root mean square over ``num_groups`` equal groups."""

    weight: Float[Array, " inner"]
    eps: float
    num_groups: int
    is_before_gate: bool = False


@runtime_checkable
class Mamba2Kernel(Protocol):
    """The functions of an implementation module."""

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None; the dtype is that of projections and tails.

        Sizes are ``num_heads``, ``head_dim``, ``num_groups``, ``state_dim`` and ``taps``.
        """
        ...

    def state_shape(self, num_heads: int, num_keys: int, num_values: int) -> tuple[int, ...]:
        """Return the shape of one page of states, with heads first; keys are ``state_dim``, values ``head_dim``."""
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
        weights: Mamba2Weights,
        states: States,
        rows: StateRows,
        *,
        sizes: Mamba2Sizes,
        limits: StepLimits,
        norm: GroupNorm | None,
        is_gated: bool = True,
    ) -> tuple[Float[Array, "T inner"], States]:
        """Compute the layer's tokens and update its states.

        Args:
            projected: The features z | x | B | C | dt of each token; z are the gates.
            weights: Parameters of the layer.
            states: Tails in the dtype of ``projected``, and states; donate them to update them in place.
            rows: Rows of the step.
            sizes: Heads.
            limits: Limits of dt.
            norm: Norm of y * SiLU(z), or of y before that. None where the layer has none, or where devices share its
                groups: then the caller normalizes what it gets, with a mean over all of them.
            is_gated: Whether the result is multiplied by SiLU(z); False without a norm only, for a caller that
                normalizes before the gate.

        Returns:
            The heads in float32, undefined but finite for padding tokens; and the states.
        """
        ...


class Case(NamedTuple):
    """One shape; ``spare_rows`` and ``spare_tokens`` are padding. Without norm groups there is no norm."""

    rows: tuple[Row, ...]
    num_heads: int = 4
    head_dim: int = 32
    num_groups: int = 2
    state_dim: int = 32
    taps: int = 4
    has_bias: bool = True
    norm_groups: int = 2
    is_before_gate: bool = False
    is_gated: bool = True
    limits: StepLimits = StepLimits()
    dtype: str = "float32"
    spare_rows: int = 1
    spare_tokens: int = 3

    @property
    def heads(self) -> Mamba2Sizes:
        """The heads of the case."""
        return Mamba2Sizes(self.num_heads, self.head_dim, self.num_groups, self.state_dim)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step with its padding."""
        return num_tokens_of(self.rows) + self.spare_tokens


class Inputs(NamedTuple):
    """Arguments of a call; states are matrices until they are prepared."""

    projected: Float[Array, "T width"]
    weights: Mamba2Weights
    states: States
    rows: StateRows
    norm_weight: Float[Array, " inner"]


IS_IN_PLACE = True
CASES: Mapping[str, Case] = {
    "one_token": Case((Row(1),), spare_rows=0, spare_tokens=0),
    "decode": Case((Row(1), Row(1, is_new=True), Row(1, snapshots=(1,)), Row(1))),
    "ragged": Case(RAGGED),
    "ragged_bf16": Case(RAGGED, dtype="bfloat16"),
    "long": Case((Row(150, is_new=True, snapshots=(77,)), Row(70)), num_heads=2, num_groups=1, norm_groups=1),
    "odd_heads": Case(RAGGED, num_heads=6, head_dim=24, state_dim=20, num_groups=3, norm_groups=3),
    "small_heads": Case(RAGGED, head_dim=16, state_dim=16, num_groups=4, norm_groups=4),
    "tiny_heads": Case((Row(3), Row(4, is_new=True)), head_dim=3, state_dim=5, norm_groups=1),
    "production": Case((Row(9), Row(1)), num_heads=2, head_dim=64, state_dim=128, num_groups=1),
    "without_bias": Case(RAGGED, has_bias=False),
    "one_norm_group": Case(RAGGED, norm_groups=1),
    "without_norm": Case(RAGGED, norm_groups=0),
    "before_the_gate": Case(RAGGED, is_before_gate=True),
    "not_gated": Case(RAGGED, norm_groups=0, is_gated=False),
    "limits": Case(RAGGED, limits=StepLimits(0.03, 0.1)),
    "two_taps": Case(RAGGED, taps=2),
    "shorter_than_taps": Case(
        (Row(2), Row(3, is_new=True, snapshots=(1,)), Row(1, is_new=True), Row(2, snapshots=(1,)))
    ),
    "only_padding": Case((Row(0),)),
}
_WIDE = Case(RAGGED, num_heads=16, head_dim=64, state_dim=128)
DEVICE_CASES: Mapping[str, Case] = {
    **CASES,
    "wide": _WIDE,
    "wide_bf16": _WIDE._replace(dtype="bfloat16"),
}
_MODELS = {"nemotron_8b": (128, 64, 8, 128), "granite_350m": (48, 32, 1, 128)}
_STEPS = {f"decode_{count}": (Row(1),) * count for count in (1, 8, 32)} | {"prefill_512": (Row(512, is_new=True),)}
BENCHES: Mapping[str, Case] = {
    f"{model}_{step}": Case(rows, *heads, norm_groups=heads[2], spare_rows=0, spare_tokens=0)
    for model, heads in _MODELS.items()
    for step, rows in _STEPS.items()
}
_EPS = 1e-5


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make random projections, weights whose states matter for some hundred tokens, and states in every page."""
    keys = jax.random.split(key, 10)
    sizes, num_pages = case.heads, num_pages_of(case.rows, case.spare_rows)
    heads = (case.num_heads,)
    weights = Mamba2Weights(
        Convolution(
            0.5 * jax.random.normal(keys[0], (case.taps, sizes.num_channels)),
            0.2 * jax.random.normal(keys[1], (sizes.num_channels,)) if case.has_bias else None,
        ),
        a_log=jnp.log(jax.random.uniform(keys[2], heads, minval=0.02, maxval=1.0)),
        dt_bias=jax.random.normal(keys[3], heads) - 3,
        d=jax.random.normal(keys[4], heads),
    )
    tail = jax.random.normal(keys[5], (num_pages, case.taps - 1, sizes.num_channels)).astype(case.dtype)
    state = 0.3 * jax.random.normal(keys[6], (num_pages, case.num_heads, case.state_dim, case.head_dim))
    projected = jax.random.normal(keys[7], (case.num_tokens, sizes.width)).astype(case.dtype)
    norm_weight = 1 + 0.1 * jax.random.normal(keys[8], (sizes.inner,))
    rows = make_rows(case.rows, case.spare_rows, keys[9])
    return Inputs(projected, weights, States(tail, state), rows, norm_weight)


def prepare(implementation: Mamba2Kernel, case: Case, inputs: Inputs) -> Inputs:
    """Convert the states to the layout of the implementation."""
    del case
    states = inputs.states
    return inputs._replace(states=states._replace(state=implementation.to_layout(states.state)))


def run(implementation: Mamba2Kernel, case: Case, prepared: Inputs) -> tuple[Array, Array, Array]:
    """Return the heads of all tokens, and all tails and states."""
    norm = GroupNorm(prepared.norm_weight, _EPS, case.norm_groups, case.is_before_gate) if case.norm_groups else None
    y, (tail, state) = implementation.update(
        *prepared[:4], sizes=case.heads, limits=case.limits, norm=norm, is_gated=case.is_gated
    )
    by_head = y.reshape(case.num_tokens, case.num_heads, case.head_dim)
    return by_head, tail, implementation.from_layout(state, case.head_dim)


def expected(case: Case, inputs: Inputs) -> tuple[Array, Array, Array]:
    """Compute each row by itself, token by token, in float32."""
    projected, _, (tail, state), batch, _ = inputs
    outputs = [jnp.zeros((0, case.num_heads, case.head_dim))]
    for stretch in stretches(case.rows, batch):
        old_tail, old_state = (jnp.where(stretch.is_new, 0, pages[stretch.source]) for pages in (tail, state))
        tokens = projected[stretch.first : stretch.last]
        y, new_tail, new_state = _reference(case, inputs, tokens, old_tail, old_state)
        outputs.append(y.reshape(-1, case.num_heads, case.head_dim))
        if len(tokens):
            tail, state = write_stretch(tail, stretch, new_tail), write_stretch(state, stretch, new_state)
    return jnp.pad(jnp.concatenate(outputs), ((0, case.spare_tokens), (0, 0), (0, 0))), tail, state


def _reference(
    case: Case,
    inputs: Inputs,
    tokens: Float[Array, "n width"],
    tail: Float[Array, "history channels"],
    state: Float[Array, "heads N P"],
) -> tuple[Float[Array, "n inner"], Float[Array, "history channels"], Float[Array, "heads N P"]]:
    """Compute some tokens of a sequence; return the next tail and state too."""
    sizes, weights, count = case.heads, inputs.weights, tokens.shape[0]
    z, mixed, dt = jnp.split(tokens, np.cumsum([sizes.inner, sizes.num_channels]), axis=1)
    z, dt = z.astype(jnp.float32), dt.astype(jnp.float32)
    mixed, new_tail = reference_convolution(mixed, tail, weights.convolution)
    groups = sizes.num_groups * sizes.state_dim
    x, b, c = jnp.split(jax.nn.silu(mixed), np.cumsum([sizes.inner, groups]), axis=1)
    x = x.reshape(count, sizes.num_heads, sizes.head_dim)
    b, c = (
        jnp.repeat(part.reshape(count, sizes.num_groups, sizes.state_dim), sizes.num_heads // sizes.num_groups, axis=1)
        for part in (b, c)
    )
    dt = jnp.clip(jax.nn.softplus(dt + weights.dt_bias), *case.limits)
    decay = jnp.exp(-jnp.exp(weights.a_log) * dt)

    def step(matrix, token):
        x, b, c, dt, decay = token
        matrix = matrix * decay[:, None, None] + b[:, :, None] * (dt[:, None] * x)[:, None]
        return matrix, jnp.einsum("hnp,hn->hp", matrix, c, precision=lax.Precision.HIGHEST)

    new_state, y = lax.scan(step, state, (x, b, c, dt, decay))
    y, gate = (y + weights.d[:, None] * x).reshape(count, sizes.inner), jax.nn.silu(z)
    y = y if case.is_before_gate or not case.is_gated else y * gate
    if case.norm_groups:
        by_group = y.reshape(count, case.norm_groups, sizes.inner // case.norm_groups)
        by_group = by_group * lax.rsqrt(jnp.square(by_group).mean(-1, keepdims=True) + _EPS)
        y = by_group.reshape(y.shape) * inputs.norm_weight
    return y * gate if case.is_before_gate else y, new_tail, new_state


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
    """Count the states of rows once in and once out, projections and results, and 6 operations per element."""
    sizes, num_rows, num_tokens = case.heads, sum(row.length > 0 for row in case.rows), num_tokens_of(case.rows)
    elements = sizes.inner * sizes.state_dim
    width = jnp.dtype(case.dtype).itemsize
    tail = (case.taps - 1) * sizes.num_channels * width
    num_bytes = num_rows * 2 * (4 * elements + tail) + num_tokens * (sizes.width * width + 4 * sizes.inner)
    return Cost(num_bytes, 6 * elements * num_tokens)


def sizes(case: Case) -> dict[str, int]:
    """Return heads, their sizes, and the taps of the convolution."""
    return {**case.heads._asdict(), "taps": case.taps}


def dtype(case: Case) -> str:
    """Return the dtype of projections and tails."""
    return case.dtype
