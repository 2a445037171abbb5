"""GPU and CPU kernels with plain references, selected from one registry. Imports nothing else of this project."""

from pallas_kernels.latent_attention import LatentAttention, LatentPartAttention
from pallas_kernels.paged_attention import AttentionBatch, PagedAttention, PartAttention, PoolSpec
from pallas_kernels.registry import OPERATIONS, Choice, UnsupportedKernelError, choose, select

__all__ = [
    "OPERATIONS",
    "AttentionBatch",
    "Choice",
    "LatentAttention",
    "LatentPartAttention",
    "PagedAttention",
    "PartAttention",
    "PoolSpec",
    "UnsupportedKernelError",
    "choose",
    "select",
]
