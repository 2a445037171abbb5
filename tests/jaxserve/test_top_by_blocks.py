"""The largest scores found block by block: exactly what a sort gives, ties included."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxserve.sampling.logprobs import top_by_blocks

KINDS = {
    "random": lambda x: x,
    "many ties": np.round,
    "all equal": np.zeros_like,
    "few allowed": lambda x: np.where(np.arange(x.shape[1]) < 10, x, -np.inf),
    "last allowed": lambda x: np.where(np.arange(x.shape[1]) == x.shape[1] - 1, x, -np.inf),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [7, 300, 6000, 20000])
def test_as_a_sort_gives_it(kind: str, size: int) -> None:
    scores = KINDS[kind](np.random.default_rng(size).standard_normal((3, size)).astype(np.float32))
    for count in (1, 5, min(20, size)):
        for found, expected in zip(top_by_blocks(jnp.asarray(scores), count), lax.top_k(scores, count), strict=True):
            np.testing.assert_array_equal(found, expected)
