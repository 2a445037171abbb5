"""Keep the token masks of steps on the device while they stay the same."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from jaxserve.device.slots import MaskedSample
from sharding import put

LaneMasks = Sequence[Sequence[MaskedSample]]
"""The masked samples of each lane."""


class HeldMasks:
    """The masks of the latest step that had any; on the device once two such steps in a row have had the same.

    Copying them costs more than comparing them. Those of ``bad_words``, ``allowed_token_ids`` and ``min_tokens`` stay
    the same from step to step; those of most grammars change with each token, and are copied with the step's inputs.

    Args:
        sharding: Sharding of the masks.
    """

    def __init__(self, sharding: Sharding):
        self._sharding = sharding
        self._num_samples = 0
        self._masked: LaneMasks = ()
        self._array: jax.Array | np.ndarray | None = None

    def get(self, num_samples: int, masked: LaneMasks, make: Callable[[], np.ndarray]) -> jax.Array | np.ndarray:
        """Return the masks of a step.

        Args:
            num_samples: Samples of each lane in the step's shape.
            masked: The samples that are masked.
            make: Makes the masks.
        """
        array = self._array
        if array is None or num_samples != self._num_samples or not _are_equal(masked, self._masked):
            self._num_samples, self._masked, array = num_samples, masked, make()
        elif isinstance(array, np.ndarray):
            array = put(array, self._sharding)
        self._array = array
        return array

    def forget(self) -> None:
        """Free them."""
        self._array = None


def _are_equal(one: LaneMasks, other: LaneMasks) -> bool:
    if [len(samples) for samples in one] != [len(samples) for samples in other]:
        return False
    pairs = ((a, b) for mine, yours in zip(one, other, strict=True) for a, b in zip(mine, yours, strict=True))
    return all(a.sample == b.sample and (a.words is b.words or np.array_equal(a.words, b.words)) for a, b in pairs)
