"""The state that devices keep between steps."""

from typing import NamedTuple

from jaxtyping import Array, Float

from jaxserve.device.head_states import HeadStates
from jaxserve.device.step_batch import LatestTokens
from jaxserve.layers.attention import Pools
from jaxserve.sampling.penalties import SlotTables


class StepState(NamedTuple):
    """State that devices keep between steps; each step donates and returns it.

    Attributes:
        pools: Pages of each pool; see ``KVLayout``.
        latest: Latest token and position of each slot.
        tables: Vocabulary-sized sampling state of each slot.
        sums: Sum of hidden states over each slot's prompt so far, for pooling requests.
        states: What a draft head keeps; None without one.

    Only the last pipeline stage has slots in ``tables`` and ``sums``.
    """

    pools: tuple[Pools, ...]
    latest: LatestTokens
    tables: SlotTables
    sums: Float[Array, "slots D"]
    states: HeadStates | None = None

    @property
    def pages(self) -> tuple[Pools, ...]:
        """All arrays of pages: the pools, then the states that a draft head keeps of each page."""
        return self.pools if self.states is None else (*self.pools, (self.states.pages,))

    def with_pages(self, pages: tuple[Pools, ...]) -> "StepState":
        """Return the state with other arrays of pages."""
        if self.states is None:
            return self._replace(pools=pages)
        *pools, (states,) = pages
        return self._replace(pools=tuple(pools), states=self.states._replace(pages=states))
