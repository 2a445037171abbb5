"""The optimiser and the training loop of the demo models."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors.numpy import save_file

from scripts.demo import training_text
from scripts.demo.network import Params, Rows

NUM_ROWS = 32
PRINT_STEPS = 50
WARM_UP_STEPS = 50
MUON_RATE, MUON_MOMENTUM = 0.02, 0.95
WEIGHT_DECAY = 0.1
ADAM_RATE, ADAM_DECAYS = 3e-3, (0.9, 0.98)

Loss = Callable[[Params, Params, Rows], Float[Array, ""]]
"""Maps the weights that are trained, others, and a batch to the batch's loss."""


@dataclass(frozen=True)
class Phase:
    """A stretch of training that starts from the rounded weights of the one before and ends at learning rate zero."""

    num_steps: int
    peak: float
    """Share of `MUON_RATE` and `ADAM_RATE` at the top of the schedule."""
    mix: training_text.TextMix
    num_rows: int = NUM_ROWS
    """Rows of a batch."""


class TrainState(NamedTuple):
    """Weights and the optimiser's moments, each under the weights' Hugging Face names."""

    params: Params
    first: Params
    second: Params


def orthogonalize(update: Float[Array, "O I"]) -> Float[Array, "O I"]:
    """Return the nearest half-orthogonal matrix, roughly (Muon's five quintic Newton-Schulz steps)."""
    is_tall = update.shape[0] > update.shape[1]
    x = update.T if is_tall else update
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


def learning_rate(step: Int[Array, ""], phase: Phase) -> Float[Array, ""]:
    """Return the share of the learning rates: a linear warm-up, then half a cosine to zero."""
    progress = jnp.maximum(0, step - WARM_UP_STEPS) / max(1, phase.num_steps - WARM_UP_STEPS)
    share = jnp.where(step < WARM_UP_STEPS, (step + 1) / WARM_UP_STEPS, 0.5 + 0.5 * jnp.cos(jnp.pi * progress))
    return phase.peak * share


def update(state: TrainState, grads: Params, step: Int[Array, ""], phase: Phase) -> TrainState:
    """Return the state after one optimiser step: Muon for the matrices of the layers, Adam for the rest."""
    rate = learning_rate(step, phase)
    params, first, second = dict(state.params), dict(state.first), dict(state.second)
    for name, grad in grads.items():
        if grad.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name:
            first[name] = MUON_MOMENTUM * first[name] + grad
            stretch = math.sqrt(max(1.0, grad.shape[0] / grad.shape[1]))
            change = MUON_RATE * stretch * orthogonalize(grad + MUON_MOMENTUM * first[name])
            params[name] = params[name] * (1 - rate * MUON_RATE * WEIGHT_DECAY) - rate * change
            continue
        first[name] = ADAM_DECAYS[0] * first[name] + (1 - ADAM_DECAYS[0]) * grad
        second[name] = ADAM_DECAYS[1] * second[name] + (1 - ADAM_DECAYS[1]) * grad * grad
        mean = first[name] / (1 - ADAM_DECAYS[0] ** (step + 1))
        scale = jnp.sqrt(second[name] / (1 - ADAM_DECAYS[1] ** (step + 1))) + 1e-8
        params[name] = params[name] - rate * ADAM_RATE * mean / scale
    return TrainState(params, first, second)


@partial(jax.jit, static_argnames=("loss_of", "phase"), donate_argnums=0)
def train_step(
    state: TrainState, fixed: Params, step: Int[Array, ""], rows: Rows, loss_of: Loss, phase: Phase
) -> tuple[TrainState, Float[Array, ""]]:
    """Return the state after one batch, and the batch's loss."""
    loss, grads = jax.value_and_grad(loss_of)(state.params, fixed, rows)
    return update(state, grads, step, phase), loss


def train(
    params: Params,
    loss_of: Loss,
    phase: Phase,
    seed: int,
    *,
    fixed: Params | None = None,
    report_steps: int = 200,
    report: Callable[[Params], None] = lambda params: None,
) -> Params:
    """Return the weights after a phase, as stored.

    Args:
        params: The weights before it.
        loss_of: The loss.
        phase: The phase.
        seed: Seed of the text.
        fixed: Weights that the loss reads and that stay.
        report_steps: Steps from one report to the next.
        report: Is called with the weights.
    """
    zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
    state = TrainState(jax.tree.map(jnp.copy, params), *zeros)  # copied, because train_step donates its state
    batches = training_text.packed_batches(training_text.training_examples(phase.mix, seed), phase.num_rows)
    started, losses = time.monotonic(), []
    for step, batch in zip(range(phase.num_steps), batches, strict=False):
        state, loss = train_step(state, fixed or {}, jnp.asarray(step), Rows.of(batch), loss_of=loss_of, phase=phase)
        losses.append(loss)
        if (step + 1) % PRINT_STEPS == 0:
            mean = np.mean(losses[-PRINT_STEPS:])
            print(f"{step + 1} {time.monotonic() - started:.0f} s loss {mean:.4f}", flush=True)
        if (step + 1) % report_steps == 0 or step + 1 == phase.num_steps:
            report(state.params)
    return mean_as_stored([state.params])


def mean_as_stored(ends: list[Params]) -> Params:
    """Return the mean of several sets of weights, rounded to the bfloat16 in which they are stored, as float32."""
    return {
        name: jnp.mean(jnp.stack([end[name] for end in ends]), axis=0).astype(jnp.bfloat16).astype(jnp.float32)
        for name in ends[0]
    }


def save_weights(params: Params, directory: Path, **others: np.ndarray) -> None:
    """Write weights in bfloat16, and other tensors as they are."""
    stored = {name: np.asarray(weight.astype(jnp.bfloat16)) for name, weight in sorted(params.items())}
    save_file(stored | others, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
