"""Paged-attention operations behind one registry. Imports nothing else of this project."""

from pallas_kernels.paged_attention import AttentionBatch, PagedAttention, PoolSpec
from pallas_kernels.registry import OPERATIONS, UnsupportedKernelError, select

__all__ = ["OPERATIONS", "AttentionBatch", "PagedAttention", "PoolSpec", "UnsupportedKernelError", "select"]
