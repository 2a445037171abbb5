"""GPU and CPU kernels with plain references, selected from one registry. Imports nothing else of this project."""

from pallas_kernels.latent_attention import LatentAttention
from pallas_kernels.paged_attention import AttentionBatch, PagedAttention, PoolSpec
from pallas_kernels.registry import OPERATIONS, Choice, UnsupportedKernelError, choose, select

__all__ = [
    "OPERATIONS",
    "AttentionBatch",
    "Choice",
    "LatentAttention",
    "PagedAttention",
    "PoolSpec",
    "UnsupportedKernelError",
    "choose",
    "select",
]
