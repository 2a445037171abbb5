"""Token embedding and output head, their vocabulary split over a mesh axis."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import fused_norm, linear_kernel, packed_param
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import DtypePolicy, Parallel
from pallas_kernels.linear import Fused
from sharding.collectives import all_gather, all_reduce, axis_index


class VocabEmbedding(nnx.Module):
    """A table [V, D] that embeds tokens, scores them, or both (tied); its rows are padded to split evenly."""

    def __init__(self, vocab_size: int, hidden_size: int, *, parallel: Parallel, policy: DtypePolicy):
        parts = parallel.parts(parallel.vocab)
        rows = -(-vocab_size // parallel.size) * parallel.size
        self.weight = packed_param((rows, hidden_size), ("vocab", "embed"), (parts, 1), policy)
        self.vocab_size, self.hidden_size, self.num_rows = vocab_size, hidden_size, rows // parts
        self.mesh_axis = parallel.vocab
        self.dtype, self.kernel = policy.activations_dtype, policy.linear

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Embeddings of token ids; each device looks up the rows it has."""
        kernel, table = linear_kernel(self.kernel), self.weight[...]
        if self.mesh_axis is None:
            return kernel.rows(table, tokens, self.hidden_size).astype(self.dtype)
        local = tokens - axis_index(self.mesh_axis) * self.num_rows
        mine = (local >= 0) & (local < self.num_rows)
        rows = jnp.where(mine[:, None], kernel.rows(table, jnp.where(mine, local, 0), self.hidden_size), 0)
        return all_reduce(rows.astype(jnp.float32), self.mesh_axis).astype(self.dtype)

    def logits(
        self, hidden: Float[Array, "R D"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "R V"]:
        """Scores of the whole vocabulary in float32, on every device, of normed hidden states.

        Nothing is said of rows from ``num_rows`` on, where that is given.
        """
        fused = Fused(norm=fused_norm(norm))
        kernel = linear_kernel(self.kernel)
        scores = kernel.matmul(hidden, self.weight[...], self.num_rows, fused=fused, num_rows=num_rows)
        return all_gather(scores, self.mesh_axis, 1)[:, : self.vocab_size]
