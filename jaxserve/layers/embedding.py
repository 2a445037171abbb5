"""Token embedding and output head, their vocabulary split over a mesh axis."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import project
from jaxserve.layers.parallel import DtypePolicy, Parallel
from sharding.collectives import all_gather, all_reduce, axis_index


class VocabEmbedding(nnx.Module):
    """A table [V, D] that embeds tokens, scores them, or both (tied); its rows are padded to split evenly."""

    def __init__(self, vocab_size: int, hidden_size: int, *, parallel: Parallel, policy: DtypePolicy):
        rows = -(-vocab_size // parallel.size) * parallel.size
        self.weight = nnx.Param(jnp.zeros((rows, hidden_size), policy.weights), axes=("vocab", "embed"))
        self.vocab_size = vocab_size
        self.mesh_axis = parallel.vocab
        self.dtype, self.kernel = policy.activations_dtype, policy.linear

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Embeddings of token ids; each device looks up the rows it has."""
        table = self.weight[...]
        if self.mesh_axis is None:
            return table[tokens].astype(self.dtype)
        local = tokens - axis_index(self.mesh_axis) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = jnp.where(mine[:, None], table[jnp.where(mine, local, 0)], 0)
        return all_reduce(rows.astype(jnp.float32), self.mesh_axis).astype(self.dtype)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Scores of the whole vocabulary in float32, on every device."""
        scores = project(hidden, self.weight[...], self.kernel)
        return all_gather(scores, self.mesh_axis, 1)[:, : self.vocab_size]
