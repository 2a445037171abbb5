"""One decoder layer: attention and MLP, each on a residual branch."""

from functools import partial

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, AttentionInputs, AttentionSettings, Pools
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import DtypePolicy, Parallel
from jaxserve.layers.rows import map_rows
from pallas_kernels.qkv_write import Heads


class DecoderLayer(nnx.Module):
    """Norms stand before each branch (Llama) or at its end (OLMo-2)."""

    def __init__(self, config: ModelConfig, index: int, *, parallel: Parallel, policy: DtypePolicy):
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, policy=policy)
        self.attention = Attention(config, index, parallel=parallel, policy=policy)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, policy=policy)
        self.mlp = GatedMLP(config, parallel=parallel, policy=policy)
        self.norm_after = config.norm_after
        self.residual_multiplier = config.residual_multiplier

    def __call__(
        self, x: Float[Array, "T D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> tuple[Float[Array, "T D"], Pools]:
        """The residual stream behind this layer, and the layer's pools with the step's keys and values written."""
        num_tokens, tile = inputs.num_tokens, settings.row_tile
        query, pools = self._written(x, pools, inputs, settings)
        attended = self.attention.attend(query, pools, inputs.batch, settings)
        after = partial(self._after_attention, num_rows=num_tokens if tile is None else None)
        return map_rows(after, (x, attended), num_tokens, tile), pools

    def _written(
        self, x: Float[Array, "T D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> tuple[Float[Array, "T N H"], Pools]:
        """Queries, and the layer's pools with the step's keys and values.

        In one kernel where there is one; but rows that are computed in tiles are normed and turned in them.
        """
        num_tokens, tile = inputs.num_tokens, settings.row_tile
        if settings.kernel.writer is not None and tile is None:
            return self.attention.write_projected(self._projected(x, num_tokens), pools, inputs, settings)
        heads = map_rows(self._heads, (x, inputs.cos, inputs.sin), num_tokens, tile)
        return heads.query, settings.kernel.write_kv(pools, heads.key, heads.value, inputs.batch, settings.page_size)

    def _projected(self, x: Float[Array, "T D"], num_rows: Int[Array, ""] | None = None) -> Float[Array, "T width"]:
        return self.attention.project(x, norm=None if self.norm_after else self.attention_norm, num_rows=num_rows)

    def _heads(self, x: Float[Array, "T D"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]) -> Heads:
        return self.attention.heads(self._projected(x), cos, sin)

    def _after_attention(
        self, x: Float[Array, "T D"], attended: Float[Array, "T N H"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "T D"]:
        if not self.norm_after:
            scale = self.residual_multiplier
            x = self.attention.output(attended, residual=x, scale=scale, num_rows=num_rows)
            return self.mlp(x, norm=self.mlp_norm, residual=x, scale=scale, num_rows=num_rows)
        x = self._add(x, self.attention_norm(self.attention.output(attended, num_rows=num_rows)))
        return self._add(x, self.mlp_norm(self.mlp(x, num_rows=num_rows)))

    def _add(self, x: Float[Array, "T D"], branch: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return x + (branch if self.residual_multiplier == 1.0 else branch * self.residual_multiplier)
