"""Drafting in one pass (PARD, arXiv:2504.18583; P-EAGLE): mask tokens after the sampled one stand for those to come.

The draft model or head has learned to guess, at each mask token, the token after those that the mask tokens up to it
stand for. So it is read once for all drafts of a row. What mask tokens leave in its pages is overwritten by the next
step, which takes in the tokens that are there then.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.device.draft_rows import DraftRows
from jaxserve.sampling.penalties import SamplerInputs

Sample = Callable[[Int[Array, ""], Float[Array, "N D"], SamplerInputs, Int[Array, ""]], Int[Array, " N"]]
"""Returns the tokens after the first hidden states, whose number is given, in a round of a loop."""


def sample_at_masks(
    hidden: Float[Array, "T D"],
    first: Int[Array, " R"],
    rows: DraftRows,
    num_drafts: Int[Array, ""],
    empty: Int[Array, "drafts R"],
    most_samples: int,
    sample: Sample,
) -> Int[Array, "drafts R"]:
    """Return the drafts of each row, whose hidden states follow each other.

    Args:
        hidden: Hidden states of the tokens that the drafter has taken in.
        first: Index of the first of each row after which, or instead of which, a draft is sampled; others follow it.
        rows: The rows.
        num_drafts: Number of drafts of each row.
        empty: What other drafts are.
        most_samples: Most tokens to sample at once, as the logits take room: at least one of each row.
        sample: Samples tokens.
    """
    most_drafts, num_rows = empty.shape
    size = num_rows * max(1, min(most_drafts, most_samples // num_rows))
    num_all, per_row = rows.num_used * num_drafts, jnp.maximum(num_drafts, 1)

    def part(i: Int[Array, ""], filled: Int[Array, "drafts R"]) -> Int[Array, "drafts R"]:
        index = i * size + jnp.arange(size, dtype=jnp.int32)
        row, count = index // per_row, index % per_row
        inputs: SamplerInputs = jax.tree.map(lambda values: values.at[row].get(mode="clip"), rows.inputs)
        inputs = inputs._replace(positions=rows.position.at[row].get(mode="clip") + count + 1)
        places = first.at[row].get(mode="clip") + count
        found = sample(i, hidden.at[places].get(mode="clip"), inputs, jnp.clip(num_all - i * size, 0, size))
        return filled.at[jnp.where(index < num_all, count, most_drafts), row].set(found, mode="drop")

    return lax.fori_loop(0, -(-num_all // size), part, empty)
