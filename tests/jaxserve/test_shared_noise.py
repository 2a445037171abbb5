"""Drafts are drawn with the noise of the tokens that they guess, so that two distributions often draw the same."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.sampler import SamplerSettings, sample_plainly
from tests.sampler_rows import inputs_for

NUM_ROWS, VOCAB = 20_000, 40


def drawn(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A token for each position."""
    inputs = inputs_for(NUM_ROWS, temperature=1.0, seeds=7, positions=positions)
    rows = jnp.asarray(np.broadcast_to(np.float32(logits), (NUM_ROWS, VOCAB)))
    return np.asarray(sample_plainly(rows, inputs, jnp.bool_(False), SamplerSettings()))


def probabilities(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize(("name", "share"), [("right", 0.0), ("close", 0.1), ("other", 0.7), ("unrelated", 1.0)])
def test_two_distributions_agree_at_least_as_often_as_the_bound(name: str, share: float) -> None:
    """The bound is (1 - TV) / (1 + TV), arXiv:2408.07978; noise of other positions agrees less."""
    generator = np.random.default_rng(0)
    target, other = generator.normal(0, 1.5, (2, VOCAB))
    draft = (1 - share) * target + share * other
    positions = np.arange(NUM_ROWS, dtype=np.int32)
    tokens, drafts = drawn(target, positions), drawn(draft, positions)
    distance = np.abs(probabilities(target) - probabilities(draft)).sum() / 2
    bound = (1 - distance) / (1 + distance)
    agreement = (tokens == drafts).mean()
    assert agreement >= bound - 4 * np.sqrt(bound * (1 - bound) / NUM_ROWS)
    unshared = (tokens == drawn(draft, positions + NUM_ROWS)).mean()
    assert unshared < agreement
    if name == "right":
        assert agreement == 1.0
    for found, logits in ((tokens, target), (drafts, draft)):
        expected = NUM_ROWS * probabilities(logits)
        chi_square = ((np.bincount(found, minlength=VOCAB) - expected) ** 2 / expected).sum()
        assert chi_square < 80  # 39 degrees of freedom: exceeded once in 10,000 seeds
