"""Decide whether an engine's results are batch-invariant, and how rows are computed then."""

import logging

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.layers.attention import AttentionKernel
from jaxserve.layers.parallel import DtypePolicy, Parallel
from jaxserve.layers.rows import ROW_TILE
from jaxserve.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)


def choose_row_tile(
    config: EngineConfig, module: CausalLM, policy: DtypePolicy, kernel: AttentionKernel, parallel: Parallel
) -> int | None:
    """Return ``ROW_TILE`` if results must not depend on the batch, else None; log which.

    Raises:
        ConfigError: Devices share the hidden states of tokens, but cannot share those of a tile equally.
    """
    is_invariant = computes_rows_natively(module.has_fused_norms, policy, kernel)
    is_invariant &= parallel.dispatch != "gather"  # expert_gather sums partial results in a device-dependent order
    is_deterministic = is_invariant if config.deterministic is None else config.deterministic
    if is_deterministic:
        _check_tiles(parallel)
    _log_determinism(config, is_deterministic, is_invariant)
    return ROW_TILE if is_deterministic else None


def _check_tiles(parallel: Parallel) -> None:
    """Raise ConfigError if devices that share the hidden states of tokens cannot share those of a tile equally."""
    size = parallel.parts(parallel.residual_axis)
    if ROW_TILE % size:
        sizes = ", ".join(str(each) for each in range(1, ROW_TILE + 1) if ROW_TILE % each == 0)
        raise ConfigError(
            f"deterministic=True computes tiles of {ROW_TILE} tokens, which the layout (residual='tokens') splits over "
            f"tensor_parallel_size={size}; use a tensor_parallel_size of {sizes}, or another layout"
        )


def _log_determinism(config: EngineConfig, is_deterministic: bool, is_invariant: bool) -> None:
    if not is_deterministic:
        why = "deterministic=False" if config.deterministic is not None else "XLA's sums depend on a step's shape"
        logger.info("Results are not batch-invariant: their last bits may depend on the batch (%s)", why)
        return
    how = "native kernels compute each row separately" if is_invariant else f"rows are computed in tiles of {ROW_TILE}"
    logger.info("Results are batch-invariant: %s", how)


def computes_rows_natively(has_fused_norms: bool, policy: DtypePolicy, kernel: AttentionKernel) -> bool:
    """Whether native kernels compute each row separately; without fused normalization, XLA computes part of it.

    Mixtures of experts count as fused: what XLA computes of them is in tiles of rows.
    """
    return policy.is_native and kernel.name == "native" and has_fused_norms
