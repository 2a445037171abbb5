"""Token embedding and output head, with the vocabulary split over a mesh axis, and learned positions."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints import whole
from jaxserve.layers.linear import ColumnParallelLinear, fused_norm
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, padded_rows, padded_vector, vector, weight
from jaxserve.layers.residual import block_output
from jaxserve.layers.storage import matmul, rows
from pallas_kernels.linear import Fused
from sharding.collectives import all_gather, axis_index, own_part


class VocabEmbedding(nnx.Module):
    """A table [V, D] that embeds tokens, computes logits, or both (tied); padded with rows so that it splits evenly.

    Args:
        vocab_size: V.
        hidden_size: D.
        scope: Scope of the module.
        has_bias: Whether logits have a bias.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, scope: Scope, has_bias: bool = False):
        parallel = scope.parallel
        padded, parts = parallel.padded_vocab(vocab_size), (parallel.parts(parallel.vocab), 1)
        recipe = padded_rows(scope, "weight", vocab_size, padded, hidden_size)
        self.weight = weight(recipe, ("vocab", "embed"), parts, scope)
        self.bias = vector(padded_vector(scope, "bias", vocab_size, padded), "vocab", scope) if has_bias else None
        self.vocab_size, self.num_rows = vocab_size, recipe.shape[0] // parts[0]
        self.mesh_axis, self.dtype = parallel.vocab, scope.policy.activations_dtype
        self.residual_axis = parallel.residual_axis
        self.keeps_logits, self.has_padding = parallel.keeps_logits, padded > vocab_size

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "rows D"]:
        """Look up the embeddings of all tokens, or of this device's; each device contributes the rows it holds."""
        if self.mesh_axis is None:
            return rows(self.weight, own_part(tokens, self.residual_axis, 0)).astype(self.dtype)
        local = tokens - axis_index(self.mesh_axis) * self.num_rows
        mine = (local >= 0) & (local < self.num_rows)
        found = jnp.where(mine[:, None], rows(self.weight, jnp.where(mine, local, 0)), 0)
        return block_output(found.astype(self.dtype), (self.mesh_axis,), self.residual_axis)

    def logits(
        self, hidden: Float[Array, "R D"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "R V"]:
        """Compute float32 logits from hidden states that ``norm`` normalizes.

        They are those of the whole vocabulary, on every device, unless the layout splits logits: then each device
        computes those of its own rows, padding included. With ``num_rows``, the values of later rows are undefined.
        """
        fused = Fused(norm=fused_norm(norm), bias=None if self.bias is None else self.bias[...])
        scores = matmul(self.weight, hidden, fused=fused, num_rows=num_rows)
        return scores if self.keeps_logits else all_gather(scores, self.mesh_axis, 1)[:, : self.vocab_size]

    def mask_padding(self, scores: Float[Array, "R V"]) -> Float[Array, "R V"]:
        """Set the logits of padding to -inf; it has some only in a layout that splits logits."""
        if not (self.keeps_logits and self.has_padding):
            return scores
        tokens = axis_index(self.mesh_axis) * self.num_rows + jnp.arange(self.num_rows)
        return jnp.where(tokens < self.vocab_size, scores, -jnp.inf)


class PositionEmbedding(nnx.Module):
    """A learned vector for each position, which is added to the token's embedding (GPT-2); whole on every device.

    Args:
        num_positions: Number of positions.
        hidden_size: D.
        scope: Scope of the module.
        offset: Row of position 0 in the table; those before are unused (OPT: 2).
    """

    def __init__(self, num_positions: int, hidden_size: int, *, scope: Scope, offset: int = 0):
        recipe = whole(scope.at("weight").module, (num_positions + offset, hidden_size))
        self.weight = weight(recipe, (None, "embed"), (1, 1), scope)
        self.num_positions, self.offset, self.dtype = num_positions, offset, scope.policy.activations_dtype
        self.residual_axis = scope.parallel.residual_axis

    def __call__(self, positions: Int[Array, " T"]) -> Float[Array, "rows D"]:
        """Look up the vectors of all positions, or of this device's; later positions than the last, of padding, get the
        last one's."""
        positions = own_part(positions, self.residual_axis, 0)
        return rows(self.weight, jnp.minimum(positions, self.num_positions - 1) + self.offset).astype(self.dtype)


class PerLayerEmbedding(nnx.Module):
    """A vector of each token for each layer (Gemma 4): the sum of one that is looked up and a projection of the token's
    embedding.

    Args:
        vocab_size: Rows of the table.
        hidden_size: D.
        num_layers: L.
        width: P, features for each layer.
        eps: Epsilon of the norm of what is projected.
        scope: Scope of the table, the projection and the norm.
    """

    def __init__(self, vocab_size: int, hidden_size: int, num_layers: int, width: int, *, eps: float, scope: Scope):
        total = num_layers * width
        self.table = VocabEmbedding(vocab_size, total, scope=scope.at("embed_tokens_per_layer"))
        self.projection = ColumnParallelLinear(
            hidden_size,
            [Rows("per_layer_model_projection", total)],
            outer_axis=None,
            mesh_axis=None,
            bias=False,
            scope=scope.unsplit(),
        )
        self.norm = RMSNorm(width, eps=eps, scope=scope.at("per_layer_projection_norm"))
        self.num_layers, self.width, self.hidden_size = num_layers, width, hidden_size

    def __call__(self, tokens: Int[Array, " T"], x: Float[Array, "rows D"]) -> Float[Array, "rows L P"]:
        """Compute the vectors of all tokens, or of this device's, whose scaled embeddings are ``x``."""
        shape = (len(x), self.num_layers, self.width)
        projected = self.norm((self.projection(x) * self.hidden_size**-0.5).reshape(shape))
        return (projected + self.table(tokens).reshape(shape) * self.width**0.5) * 2**-0.5
