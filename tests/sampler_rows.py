"""Rows for tests of the sampler: numbers with neutral defaults, open masks, empty tables."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.api.sampling_options import SAMPLING_OPTIONS, OptionValues
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.sampling.penalties import SamplerInputs, SlotTables
from jaxserve.sampling.sampler import VARIANTS, SamplerSettings, sample

_OPTIONS = {**{name: option.neutral for name, option in SAMPLING_OPTIONS.items()}, "temperature": 1.0}
_OTHERS = {"seeds": 0, "positions": 0, "slots": 0}

_call = jax.jit(sample, static_argnames=("variant", "settings"))
_call_any = jax.jit(sample, static_argnames="settings")


def inputs_for(num_rows: int, *, arguments: Any = None, **numbers: Any) -> SamplerInputs:
    """Sampler numbers, scalars repeated for every row, neutral where not given; temperature is 1, ``slots`` are 0."""
    unknown = numbers.keys() - _OPTIONS.keys() - _OTHERS.keys()
    assert not unknown, unknown

    def column(name: str, value: float) -> jax.Array:
        dtype = np.float32 if isinstance(value, float) else np.int32
        return jnp.asarray(np.broadcast_to(np.asarray(numbers.get(name, value), dtype), num_rows))

    arguments = np.zeros((num_rows, 0), np.float32) if arguments is None else np.float32(arguments)
    options = OptionValues(**{name: column(name, value) for name, value in _OPTIONS.items()})
    others = {name: column(name, value) for name, value in _OTHERS.items()}
    return SamplerInputs(options, **others, arguments=jnp.asarray(arguments))


def take(inputs: SamplerInputs, rows: np.ndarray) -> SamplerInputs:
    """Chosen rows."""
    return jax.tree.map(lambda array: array[rows], inputs)


def open_mask(num_rows: int, vocab_size: int) -> np.ndarray:
    """All bits set."""
    return np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)


def mask_of(allowed: np.ndarray) -> np.ndarray:
    """Bits of a boolean mask [R, V]."""
    rows, vocab_size = allowed.shape
    padded = np.zeros((rows, -(-vocab_size // 32) * 32), bool)
    padded[:, :vocab_size] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def empty_tables(num_slots: int, vocab_size: int, num_tracked: int = 2) -> SlotTables:
    """Nothing counted, no bias, token 0 tracked."""
    return SlotTables(
        jnp.zeros((num_slots, vocab_size), jnp.int32),
        jnp.zeros((num_slots, vocab_size)),
        jnp.zeros((num_slots, num_tracked), jnp.int32),
    )


def call_sample(
    logits: Any,
    inputs: SamplerInputs,
    mask: Any = None,
    *,
    variant: str = "full",
    tables: SlotTables | None = None,
    settings: SamplerSettings = SamplerSettings(),  # noqa: B008 - frozen
    at_run_time: bool = False,
) -> tuple[np.ndarray, TokenLogprobs]:
    """``sample``, compiled, as host arrays; ``at_run_time`` leaves the choice of the variant to the program."""
    rows, vocab_size = logits.shape
    mask = open_mask(rows, vocab_size) if mask is None else mask
    tables = empty_tables(1, vocab_size) if tables is None else tables
    if at_run_time:
        index = jnp.int32(VARIANTS.index(variant))
        found = _call_any(logits, inputs, mask, tables, index, settings=settings)
    else:
        found = _call(logits, inputs, mask, tables, variant=variant, settings=settings)
    return jax.tree.map(np.asarray, found)
