"""Choosing tokens from logits, inside the step.

A row's choice depends on its logits, its numbers, its slot's tables and the pair (seed, position) alone, never on other
rows.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar, cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jaxserve.config_checks import LOGPROBS_MODES
from jaxserve.sampling.draw import draw
from jaxserve.sampling.logits_processors import LogitsProcessor
from jaxserve.sampling.logprobs import MAX_LOGPROBS, TokenLogprobs, no_logprobs, token_logprobs
from jaxserve.sampling.penalties import SamplerInputs, SlotTables, adjust
from pallas_kernels import Choice, argmax_xla, choose, truncation_xla
from pallas_kernels.argmax import ArgmaxKernel
from pallas_kernels.truncation import Truncation
from sharding.mesh import Device

VARIANTS = ("greedy", "sampled", "full")
NO_TOKEN = -1
"""Sampled, as ``argmax`` gives it, where a row's logits have NaN, or nothing to choose from."""

Chosen = TypeVar("Chosen", bound=PyTree)


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """What is fixed when a step is compiled.

    Attributes:
        max_logprobs: Alternatives reported with each token, where any are.
        logprobs_mode: One of ``LOGPROBS_MODES``: of the model's own logits (raw), or of those the token was chosen by,
            behind masks, bias, processors, penalties, temperature and truncation (processed).
        processors: The engine's own changes to logits.
        truncation: Implementation of min-p, top-k and top-p.
        argmax: Implementation of the choice of the likeliest token.
    """

    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: str = LOGPROBS_MODES[0]
    processors: tuple[LogitsProcessor, ...] = ()
    truncation: Truncation = truncation_xla
    argmax: ArgmaxKernel = argmax_xla

    @property
    def is_normalized(self) -> bool:
        """Return whether logprobs are reported, and not logits."""
        return self.logprobs_mode.endswith("logprobs")

    @property
    def is_processed(self) -> bool:
        """Return whether the logits the token was chosen by are reported, and not the model's own."""
        return self.logprobs_mode.startswith("processed")


def choose_truncation(device: Device, name: str | None = None) -> Choice:
    """Return the implementation of truncation for a device; see ``pallas_kernels.choose``."""
    kind = device.device_kind
    return choose("truncation", platform=device.platform, device_kind=kind, dtype="float32", name=name)


def select_truncation(device: Device, name: str | None = None) -> Truncation:
    """``choose_truncation`` without its reasons."""
    return cast(Truncation, choose_truncation(device, name).implementation)


def sample(
    logits: Float[Array, "R V"],
    inputs: SamplerInputs,
    mask: Int[Array, "R words"],
    tables: SlotTables,
    variant: str | Int[Array, ""],
    settings: SamplerSettings,
) -> tuple[Int[Array, " R"], TokenLogprobs]:
    """Return a token for each row.

    Args:
        logits: Scores, float32.
        inputs: Numbers of each row.
        mask: Allowed tokens as bits, used by ``full`` alone.
        tables: What is known of the rows' slots, used by ``full`` alone.
        variant: ``greedy`` (every row takes the likeliest token), ``sampled``, or ``full`` (all that a request can ask
            for); or its index in ``VARIANTS``, known only when the step runs.
        settings: What is fixed.

    Returns:
        Tokens, ``NO_TOKEN`` for rows with NaN among their logits or nothing to choose from; and logprobs (zeros unless
        ``full``).
    """
    is_greedy, is_full = _takes(variant, "greedy"), _takes(variant, "full")
    adjusted = _choose(is_full, lambda: adjust(logits, inputs, mask, tables, settings.processors), lambda: logits)
    best = settings.argmax.argmax(adjusted)
    no_floor = jnp.full(len(logits), -jnp.inf)

    def sampled() -> tuple[Int[Array, " R"], Float[Array, " R"]]:
        return _sampled(adjusted, inputs, best, settings.truncation)

    tokens, floor = _choose(is_greedy, lambda: (best, no_floor), sampled)

    def logprobs() -> TokenLogprobs:
        tracked_ids = tables.tracked_ids.at[inputs.slots].get(mode="clip")
        scores = _processed(adjusted, inputs, floor) if settings.is_processed else logits
        return token_logprobs(scores, tokens, tracked_ids, settings.max_logprobs, settings.is_normalized)

    num_tracked = tables.tracked_ids.shape[1]
    return tokens, _choose(is_full, logprobs, lambda: no_logprobs(len(logits), settings.max_logprobs, num_tracked))


def _takes(variant: str | Int[Array, ""], name: str) -> bool | Array:
    return variant == name if isinstance(variant, str) else variant == VARIANTS.index(name)


def _choose(condition: bool | Array, yes: Callable[[], Chosen], no: Callable[[], Chosen]) -> Chosen:
    """One of two results, chosen now or when the step runs."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    return lax.cond(condition, yes, no)


def _sampled(
    logits: Float[Array, "R V"], inputs: SamplerInputs, best: Int[Array, " R"], truncation: Truncation
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Return a random token for rows with a temperature, the likeliest for the others; and the lowest score each row
    kept."""
    scores = _scaled(logits, inputs)
    weights = jnp.exp(scores - scores.max(1, keepdims=True))
    options = inputs.options
    floor = truncation.floor(scores, options.top_k, options.top_p, options.min_p)
    drawn, weight = draw(jnp.where(scores >= floor[:, None], weights, 0.0), inputs.seeds, inputs.positions)
    drawn = jnp.where((best >= 0) & (weight > 0), drawn, NO_TOKEN)
    is_random = options.temperature > 0
    return jnp.where(is_random, drawn, best), jnp.where(is_random, floor, -jnp.inf)


def _scaled(logits: Float[Array, "R V"], inputs: SamplerInputs) -> Float[Array, "R V"]:
    temperature = inputs.options.temperature
    return logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]


def _processed(logits: Float[Array, "R V"], inputs: SamplerInputs, floor: Float[Array, " R"]) -> Float[Array, "R V"]:
    """What a row's token was drawn from; rows without a temperature keep all that is allowed."""
    scores = _scaled(logits, inputs)
    return jnp.where(scores >= floor[:, None], scores, -jnp.inf)
