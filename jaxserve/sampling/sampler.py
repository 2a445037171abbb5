"""Samples tokens from logits, inside the step.

A row's token depends only on its logits, its parameters, its slot's tables and the pair (seed, position), never on
other rows.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar, cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxserve.api.config_checks import LOGPROBS_MODES
from jaxserve.sampling.draw import draw
from jaxserve.sampling.logits_processors import LogitsProcessor
from jaxserve.sampling.logprobs import MAX_LOGPROBS, TokenLogprobs, no_logprobs, token_logprobs
from jaxserve.sampling.penalties import SamplerInputs, SlotTables, adjust
from jaxserve.sampling.vocab_split import WHOLE, VocabSplit
from pallas_kernels import Choice, argmax_xla, choose, truncation_xla
from pallas_kernels.argmax import ArgmaxKernel
from pallas_kernels.truncation import Truncation
from sharding.mesh import Device

VARIANTS = ("greedy", "sampled", "full")
NO_TOKEN = -1
"""The token, as ``argmax`` returns it, of a row whose logits have NaN or no finite value."""

Chosen = TypeVar("Chosen", bound=PyTree)


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """Sampler settings that are fixed when a step is compiled.

    Attributes:
        max_logprobs: Number of alternatives reported with each token, if any.
        logprobs_mode: One of ``LOGPROBS_MODES``: of the model's logits (raw), or of the logits that the token was
            sampled from, after masks, bias, processors, penalties, temperature and truncation (processed).
        processors: The engine's logits processors.
        truncation: Implementation of min-p, top-k and top-p of whole rows.
        argmax: Implementation of argmax.
        split: Where the logits are.
    """

    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: str = LOGPROBS_MODES[0]
    processors: tuple[LogitsProcessor, ...] = ()
    truncation: Truncation = truncation_xla
    argmax: ArgmaxKernel = argmax_xla
    split: VocabSplit = WHOLE

    @property
    def is_normalized(self) -> bool:
        """Whether logprobs are reported, and not logits."""
        return self.logprobs_mode.endswith("logprobs")

    @property
    def is_processed(self) -> bool:
        """Whether the processed logits are reported, and not the model's own."""
        return self.logprobs_mode.startswith("processed")


def choose_truncation(device: Device, name: str | None = None) -> Choice:
    """Choose the implementation of truncation for a device; see ``pallas_kernels.choose``."""
    kind = device.device_kind
    return choose("truncation", platform=device.platform, device_kind=kind, dtype="float32", name=name)


def select_truncation(device: Device, name: str | None = None) -> Truncation:
    """Return only the implementation that ``choose_truncation`` chooses."""
    return cast(Truncation, choose_truncation(device, name).implementation)


def sample(
    logits: Float[Array, "R V"],
    inputs: SamplerInputs,
    mask: Int[Array, "R words"],
    tables: SlotTables,
    variant: str | Int[Array, ""],
    settings: SamplerSettings,
) -> tuple[Int[Array, " R"], TokenLogprobs]:
    """Sample a token for each row.

    Args:
        logits: Logits, float32; of the device's part of the vocabulary, if ``settings.split`` says so.
        inputs: Sampling parameters of each row.
        mask: Allowed tokens as bits, used by ``full`` only.
        tables: Data of the rows' slots, used by ``full`` only.
        variant: ``greedy`` (argmax for every row), ``sampled``, or ``full`` (everything that a request can ask for); or
            its index in ``VARIANTS``, known only at run time.
        settings: Settings fixed at compile time.

    Returns:
        Tokens, ``NO_TOKEN`` for rows with NaN among their logits or with all tokens masked; and logprobs (zeros unless
        ``full``).
    """
    is_greedy, is_full = _takes(variant, "greedy"), _takes(variant, "full")
    split = settings.split
    adjusted = _choose(
        is_full, lambda: adjust(logits, inputs, mask, tables, settings.processors, split), lambda: logits
    )
    best = split.argmax(settings.argmax, adjusted)
    no_floor = jnp.full(len(logits), -jnp.inf)

    def sampled() -> tuple[Int[Array, " R"], Float[Array, " R"]]:
        return _sampled(adjusted, inputs, best, settings)

    tokens, floor = _choose(is_greedy, lambda: (best, no_floor), sampled)

    def logprobs() -> TokenLogprobs:
        tracked_ids = tables.tracked_ids.at[inputs.slots].get(mode="clip")
        scores = _processed(adjusted, inputs, floor) if settings.is_processed else logits
        return token_logprobs(scores, tokens, tracked_ids, settings.max_logprobs, settings.is_normalized, split)

    num_tracked = tables.tracked_ids.shape[1]
    return tokens, _choose(is_full, logprobs, lambda: no_logprobs(len(logits), settings.max_logprobs, num_tracked))


def sample_plainly(
    logits: Float[Array, "R V"], inputs: SamplerInputs, is_greedy: Bool[Array, ""], settings: SamplerSettings
) -> Int[Array, " R"]:
    """Sample a token for each row from its logits as they are, without masks, bias, processors and penalties.

    Args:
        logits: See ``sample``.
        inputs: See ``sample``.
        is_greedy: Whether every row takes the argmax.
        settings: See ``sample``.
    """
    best = settings.split.argmax(settings.argmax, logits)
    return lax.cond(is_greedy, lambda: best, lambda: _sampled(logits, inputs, best, settings)[0])


def _takes(variant: str | Int[Array, ""], name: str) -> bool | Array:
    return variant == name if isinstance(variant, str) else variant == VARIANTS.index(name)


def _choose(condition: bool | Array, yes: Callable[[], Chosen], no: Callable[[], Chosen]) -> Chosen:
    """Return one of two results, decided at trace time or at run time."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    return lax.cond(condition, yes, no)


def _sampled(
    logits: Float[Array, "R V"], inputs: SamplerInputs, best: Int[Array, " R"], settings: SamplerSettings
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Sample a token for rows with a temperature and take the argmax of the others; also return the lowest score that
    each row kept."""
    scores, split = _scaled(logits, inputs), settings.split
    largest = split.largest(scores.max(1))
    weights = jnp.exp(scores - largest[:, None])
    options = inputs.options
    limits = options.top_k, options.top_p, options.min_p
    if split.axis is None:
        floor = settings.truncation.floor(scores, *limits)
    else:
        floor = truncation_xla.floor_of_parts(scores, largest, *limits, split)
    drawn, weight = draw(jnp.where(scores >= floor[:, None], weights, 0.0), inputs.seeds, inputs.positions, split)
    drawn = jnp.where((best >= 0) & (weight > 0), drawn, NO_TOKEN)
    is_random = options.temperature > 0
    return jnp.where(is_random, drawn, best), jnp.where(is_random, floor, -jnp.inf)


def _scaled(logits: Float[Array, "R V"], inputs: SamplerInputs) -> Float[Array, "R V"]:
    temperature = inputs.options.temperature
    return logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]


def _processed(logits: Float[Array, "R V"], inputs: SamplerInputs, floor: Float[Array, " R"]) -> Float[Array, "R V"]:
    """Return the logits that a row's token was sampled from; rows without a temperature keep all allowed tokens."""
    scores = _scaled(logits, inputs)
    return jnp.where(scores >= floor[:, None], scores, -jnp.inf)
