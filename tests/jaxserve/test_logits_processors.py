"""The engine's own changes to logits: their arguments, their place in the order, and how often they are traced."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.sampling.logits_processors import LogitsProcessor, argument_names
from jaxserve.sampling.sampler import SamplerSettings
from tests.sampler_rows import call_sample, empty_tables, inputs_for, mask_of


class Boost:
    """Adds ``boost`` to the token of id ``token`` from position ``start`` on."""

    def __init__(self) -> None:
        self.arguments: Mapping[str, float] = {"boost": 0.0, "boosted_token": 0.0}
        self.num_traces = 0

    def __call__(self, logits: jax.Array, arguments: dict[str, jax.Array], positions: jax.Array) -> jax.Array:
        self.num_traces += 1
        is_token = jnp.arange(logits.shape[1]) == arguments["boosted_token"][:, None]
        return logits + jnp.where(is_token & (positions[:, None] >= 10), arguments["boost"][:, None], 0.0)


class Negate:
    """Turns every row round; reads no argument."""

    arguments: Mapping[str, float] = {}

    def __call__(self, logits: jax.Array, arguments: dict[str, jax.Array], positions: jax.Array) -> jax.Array:
        del arguments, positions
        return -logits


class Scale:
    """Multiplies by ``factor``."""

    arguments: Mapping[str, float] = {"factor": 1.0}

    def __call__(self, logits: jax.Array, arguments: dict[str, jax.Array], positions: jax.Array) -> jax.Array:
        del positions
        return logits * arguments["factor"][:, None]


def test_what_counts_as_a_processor() -> None:
    assert isinstance(Boost(), LogitsProcessor) and isinstance(Negate(), LogitsProcessor)
    assert not isinstance(lambda logits: logits, LogitsProcessor)


def test_names_are_in_order_and_unique() -> None:
    assert argument_names([]) == {} == argument_names([Negate()])
    assert [*argument_names([Scale(), Negate(), Boost()]).items()] == [
        ("factor", 1.0),
        ("boost", 0.0),
        ("boosted_token", 0.0),
    ]
    with pytest.raises(ConfigError, match="two processors have an argument named 'factor'; rename one"):
        argument_names([Scale(), Boost(), Scale()])


def test_each_row_has_its_own_arguments() -> None:
    """Columns go to their processors by name; a row of neutral ones is as without processors; traced once a program."""
    boost = Boost()
    settings = SamplerSettings(processors=(Scale(), boost))
    logits = np.random.default_rng(0).normal(0, 1, (5, 40)).astype(np.float32)
    arguments = [[1, 0, 0], [1, 100, 7], [1, 100, 7], [-1, 0, 0], [-1, 100, 9]]
    positions = [50, 50, 9, 50, 10]
    inputs = inputs_for(5, temperature=0.0, arguments=arguments, positions=positions)
    for _ in range(2):
        call_sample(logits, inputs, settings=settings)
    tokens, logprobs = call_sample(logits, inputs, settings=settings)
    assert tokens.tolist() == [logits[0].argmax(), 7, logits[2].argmax(), logits[3].argmin(), 9]
    assert boost.num_traces == 1
    plain = call_sample(logits, inputs_for(5, temperature=0.0))[1]
    np.testing.assert_allclose(logprobs.top, plain.top, atol=1e-6, err_msg="raw logprobs are the model's own")


def test_the_order() -> None:
    """Behind masks and bias, before penalties: a negated bias, and a repetition penalty on the negated score."""
    logits = np.zeros((1, 4), np.float32)
    logits[0] = [1.0, -2.0, 3.0, 0.5]
    tables = empty_tables(1, 4)._replace(
        token_counts=jnp.array([[0, 2, 0, 0]], jnp.int32), bias=jnp.array([[0.0, -3.0, 0.0, 0.0]])
    )
    inputs = inputs_for(1, temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.25)
    settings = SamplerSettings(logprobs_mode="processed_logits", processors=(Negate(),))
    mask = mask_of(np.array([[True, True, True, False]]))
    tokens, found = call_sample(logits, inputs, mask, tables=tables, settings=settings)
    assert tokens.tolist() == [3], "a processor may allow what a mask forbids: it comes later"
    allowed = np.array([[-1.0, (2.0 + 3.0) / 2.0 - 0.5, -3.0, np.inf]])
    np.testing.assert_allclose(found.top[:, :4], -np.sort(-allowed, axis=1), atol=1e-6)
