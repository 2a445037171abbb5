"""Attention over paged latents (MLA, arXiv:2405.04434, absorbed form): the operation's interface, cases and reference.

A token's latent, with the rotated key that all heads share, is stored once: [value_dim + rotated]. The whole of it is
the key of every query head, and its first ``value_dim`` features are the value. Batches, pages and rows are those of
:mod:`pallas_kernels.paged_attention`, whose ``Case`` describes this operation with one key/value head of ``head_dim``
features.

Sizes that an implementation may not support are ``num_heads``, ``head_dim``, ``value_dim``, ``page_size`` and
``token_parts``; see :mod:`pallas_kernels.paged_attention`. More than one part needs ``LatentPartAttention``.
"""

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import paged_attention
from pallas_kernels.operation import Comparison, Cost, Tolerance, add_twins, compare_rows
from pallas_kernels.paged_attention import AttentionBatch, PoolSpec
from pallas_kernels.paged_attention_cases import ENGINE_LEAST_ROWS, ENGINE_ROWS, Case

IS_IN_PLACE = False
Pools = tuple[Array]
"""The only pool of a layer."""


@runtime_checkable
class LatentAttention(Protocol):
    """The functions of an implementation, which has the layout of pools to itself; see ``PagedAttention``."""

    @property
    def name(self) -> str:
        """Its name in the registry."""
        ...

    @property
    def writer(self) -> None:
        """None: the caller projects and applies RoPE, then calls ``write_kv``."""
        ...

    @property
    def stacks_pools(self) -> bool:
        """Whether pools of several layers may be stacked in one array."""
        ...

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device with such ``sizes``, or None."""
        ...

    def pool_specs(self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[PoolSpec]:
        """Return the shape of the pool: ``num_pages`` usable pages, a null page and one for padding tokens.

        Every device holds all latents, whatever ``num_kv_heads``; ``head_dim`` counts all features of a token.
        """
        ...

    def write_kv(
        self,
        pools: Pools,
        key: Float[Array, "T 1 rotated"],
        value: Float[Array, "T 1 latent"],
        batch: AttentionBatch,
        page_size: int,
    ) -> Pools:
        """Return the pool with this step's latents (``value``) and rotated keys written.

        Latents with values that are not finite leave zeros, and NaN in the token's rotated key.
        """
        ...

    def copy_pages(self, pools: Pools, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Pools:
        """Copy pages; see ``PagedAttention.copy_pages``."""
        ...

    def read_pages(self, pools: Pools, pages: Int[Array, "*shape"], page_size: int) -> Float[Array, "*shape p H"]:
        """Return all features of all tokens of pages, of which the first of the array is 0."""
        ...

    def read_tokens(
        self, pools: Pools, pages: Int[Array, "*shape"], offsets: Int[Array, "*shape"], page_size: int
    ) -> Float[Array, "*shape H"]:
        """Return all features of one token of each page; see ``read_pages``."""
        ...

    def attend(
        self,
        query: Float[Array, "T N H"],
        pools: Pools,
        batch: AttentionBatch,
        *,
        page_size: int,
        value_dim: int,
        scale: float,
        decode_only: bool,
        row_tile: int | None = None,
    ) -> Float[Array, "T N latent"]:
        """Return each query token's attention over its row's context up to itself.

        Padding tokens and ``row_tile`` are as in ``PagedAttention.attend``.
        """
        ...


_MIXED = ((33, 1), (5, 1), (64, 64), (150, 20), (7, 7))
_SMALL = Case(rows=_MIXED, num_heads=4, num_kv_heads=1, head_dim=24, value_dim=16)

CASES: dict[str, Case] = {
    "one_token": _SMALL._replace(rows=((1, 1),)),
    "edges": _SMALL._replace(rows=((1, 1), (15, 1), (16, 1), (17, 1), (63, 1), (64, 1), (65, 1), (101, 1))),
    "prefill": _SMALL._replace(rows=((37, 37),)),
    "mixed": _SMALL,
    "mixed_full": _SMALL._replace(rows=((64, 1), (32, 32), (48, 16)), spare_rows=0, spare_tokens=0),
    "chunk_inside_a_page": _SMALL._replace(rows=((41, 5), (75, 70), (300, 3), (2, 2)), page_size=64),
    "one_head": _SMALL._replace(num_heads=1),
    "odd_heads": _SMALL._replace(num_heads=5),
    "many_heads": _SMALL._replace(rows=((33, 1), (20, 20)), num_heads=48),
    "small_page": _SMALL._replace(page_size=8),
    "large_page": _SMALL._replace(rows=((300, 1), (200, 130)), page_size=128),
    "longer_decode": _SMALL._replace(rows=((2050, 1), (1, 1), (513, 1)), page_size=32),
    "odd_widths": _SMALL._replace(head_dim=46, value_dim=36),
    "wide": _SMALL._replace(rows=((130, 1), (20, 20)), num_heads=16, head_dim=576, value_dim=512, page_size=64),
    "bfloat16": _SMALL._replace(head_dim=96, value_dim=64, dtype="bfloat16"),
    "bfloat16_tiles": _SMALL._replace(
        rows=((130, 1), (5, 1), (70, 9)), num_heads=5, head_dim=192, value_dim=128, dtype="bfloat16"
    ),
    "bfloat16_wide": _SMALL._replace(
        rows=((130, 1), (20, 20)), num_heads=16, head_dim=576, value_dim=512, page_size=64, dtype="bfloat16"
    ),
    "one_by_one": _SMALL._replace(row_tile=8),
}

_DEEPSEEK = {"dtype": "bfloat16", "head_dim": 576, "value_dim": 512}
DEVICE_CASES: dict[str, Case] = add_twins(
    CASES, {"bf16_deepseek": _DEEPSEEK | {"num_heads": 128}, "bf16_deepseek_tp8": _DEEPSEEK | {"num_heads": 16}}
)


def _bench(num_rows: int, context: int, num_heads: int, query: int = 1) -> Case:
    """Return the attention of a DeepSeek layer, as the engine calls it."""
    return Case(
        rows=((context, query),) * num_rows,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=576,
        value_dim=512,
        page_size=64,
        dtype="bfloat16",
        spare_rows=max(ENGINE_LEAST_ROWS, num_rows) - num_rows if query == 1 else ENGINE_ROWS - num_rows,
        spare_tokens=0,
        table_pages=-(-max(8448, context) // 64),
    )


BENCHES: dict[str, Case] = {
    "v3_decode_1x8k": _bench(1, 8192, 128),
    "v3_decode_8x8k": _bench(8, 8192, 128),
    "v3_decode_64x1k": _bench(64, 1024, 128),
    "v3_decode_64x8k": _bench(64, 8192, 128),
    "v3_tp8_decode_64x8k": _bench(64, 8192, 16),
    "v2_lite_decode_64x8k": _bench(64, 8192, 16),
    "v3_tp8_prefill_512_after_2k": _bench(1, 2560, 16, query=512),
}


class Inputs(NamedTuple):
    """A step's queries, and the dense latents of each row in use."""

    query: Float[Array, "T N H"]
    latents: Float[Array, "used S 1 H"]
    batch: AttentionBatch


class Prepared(NamedTuple):
    """A step's queries and the pool that holds all contexts."""

    query: Float[Array, "T N H"]
    pools: Pools
    batch: AttentionBatch


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make normally distributed queries and latents of a case, with shuffled pages."""
    inputs = paged_attention.make_inputs(case, key)
    return Inputs(inputs.query, inputs.keys, inputs.batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def prepare(implementation: LatentAttention, case: Case, inputs: Inputs) -> Prepared:
    """Lay out the pool as the implementation does: NaN in unowned pages, stale numbers after a context's end."""
    (spec,) = implementation.pool_specs(paged_attention.num_pages(case), case.page_size, 1, case.head_dim)
    pool = paged_attention.unowned_pool(case, inputs.batch, spec.shape).astype(case.dtype)
    places, shape = paged_attention.context_places(case, inputs.batch, inputs.latents.shape[1])
    latents = inputs.latents.reshape(shape, 1, case.head_dim)
    value, rotated = jnp.split(latents, [case.value_width], axis=2)
    return Prepared(
        inputs.query, implementation.write_kv((pool,), rotated, value, places, case.page_size), inputs.batch
    )


def run(implementation: LatentAttention, case: Case, prepared: Prepared) -> Float[Array, "T N latent"]:
    """Compute the step's attention; latents are already written."""
    return implementation.attend(
        prepared.query,
        prepared.pools,
        prepared.batch,
        page_size=case.page_size,
        value_dim=case.value_width,
        scale=case.head_dim**-0.5,
        decode_only=case.is_decode_only,
        row_tile=case.row_tile,
    )


@functools.partial(jax.jit, static_argnums=0)
def expected(case: Case, inputs: Inputs) -> Float[Array, "T N latent"]:
    """Compute the reference in float32; zeros for tokens that no row owns."""
    query, latents, batch = inputs
    settings = {"scale": case.head_dim**-0.5, "window": None, "soft_cap": None}
    attended = paged_attention.reference(query.astype(jnp.float32), latents, latents, batch, **settings)
    return attended[..., : case.value_width]


def compare(
    case: Case, inputs: Inputs, found: Float[Array, "T N latent"], expected: Float[Array, "T N latent"]
) -> Comparison:
    """Compare each head of each token; tokens that no row owns are padding."""
    del inputs
    used = np.arange(case.num_tokens) < sum(length for _, length in case.rows)
    return compare_rows(("attention",), found, expected, used[:, None], tolerance(case))


def tolerance(case: Case) -> Tolerance:
    """Allow for rounding of the weights and of the result."""
    share = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}[case.dtype]
    return Tolerance(share, floor=1e-3 * case.value_width**0.5)


def cost(case: Case) -> Cost:
    """Count the latents that a row sees once, its queries and results, and two matmuls."""
    seen_tokens, pairs = 0, 0
    for context, length in case.rows:
        seen_tokens += context
        pairs += int((np.arange(context - length, context) + 1).sum())
    used, widths = sum(length for _, length in case.rows), case.head_dim + case.value_width
    numbers = seen_tokens * case.head_dim + used * case.num_heads * widths
    return Cost(numbers * jnp.dtype(case.dtype).itemsize, 2 * case.num_heads * widths * pairs)


def sizes(case: Case) -> dict[str, int]:
    """Return the sizes that an implementation may not support."""
    names = ("num_heads", "head_dim", "page_size")
    return {name: getattr(case, name) for name in names} | {"value_dim": case.value_width}


def dtype(case: Case) -> str:
    """Return the dtype of queries and latents."""
    return case.dtype
