"""The state of the token before each row's first, which a draft head combines with that token.

A row that goes on where its slot's last one ended begins with the state that this one left. A row that begins after
cached pages does not: the state of the last token of every full page is therefore kept beside the page, like the keys
and values that the page has. So drafts are the same whether a prompt was cached or computed.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.sampling.verification import NOWHERE


class HeadStates(NamedTuple):
    """States that devices keep between steps.

    Attributes:
        slots: State of the last token that each slot has computed and kept.
        pages: State of the last token of each page.
    """

    slots: Float[Array, "slots D"]
    pages: Float[Array, "pages D"]

    def before(
        self, starts: Int[Array, " R"], slots: Int[Array, " R"], page_table: Int[Array, "R M"], page_size: int
    ) -> Float[Array, "R D"]:
        """Return the state of the token before the first of each row; zeros for the first token of a context.

        Args:
            starts: Position of each row's first token.
            slots: Its slot.
            page_table: Its pages.
            page_size: Tokens per page.
        """
        rows = jnp.arange(len(starts))
        pages = page_table[rows, jnp.maximum(starts - 1, 0) // page_size]
        of_page = self.pages.at[pages].get(mode="clip")
        of_slot = self.slots.at[slots].get(mode="clip")
        found = jnp.where((starts % page_size == 0)[:, None], of_page, of_slot)
        return jnp.where((starts == 0)[:, None], 0, found)

    def updated(
        self,
        states: Float[Array, "T D"],
        positions: Int[Array, " T"],
        pages: Int[Array, " T"],
        last: Int[Array, " R"],
        slots: Int[Array, " R"],
        page_size: int,
    ) -> "HeadStates":
        """Return the states after a step.

        Args:
            states: State of each query token.
            positions: Position of each.
            pages: Page of each; out of range for padding.
            last: Index of the last query token of each row that is kept.
            slots: Slot of each row; out of range for an empty row.
            page_size: Tokens per page.
        """
        filled = jnp.where((positions + 1) % page_size == 0, pages, NOWHERE)
        found: Any = states.astype(self.slots.dtype)
        return HeadStates(
            self.slots.at[slots].set(found.at[last].get(mode="clip"), mode="drop"),
            self.pages.at[filled].set(found, mode="drop"),
        )
