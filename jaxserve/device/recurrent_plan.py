"""Plan the states of recurrent layers: how many the prefix cache keeps, and which settings they cannot have."""

import dataclasses
import logging
from collections.abc import Sequence

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.device.memory import CPU_POOL_BYTES, MemoryNeeds, device_memory_bytes, gib, page_budget, usable_fraction
from jaxserve.models.causal_lm import CausalLM
from sharding.mesh import Device

logger = logging.getLogger(__name__)

_MOST_CHECKPOINTS = 512  # by default, or eight for each sequence


def states_of_sequences(config: EngineConfig, module: CausalLM, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Return the state pages of running sequences: one of each, or two if rows have drafts.

    Raises:
        ConfigError: A step has no room for what sequences compute again after rejected drafts.
    """
    if not any(module.state_specs):
        return 0
    most = 1 + config.num_speculative_tokens
    if max_num_batched_tokens < max_num_seqs * most and config.num_speculative_tokens:
        raise ConfigError(
            f"speculative_config with recurrent layers needs a max_num_batched_tokens of at least "
            f"{max_num_seqs * most}, max_num_seqs={max_num_seqs} times 1 + num_speculative_tokens; got "
            f"{max_num_batched_tokens}: raise it, or lower one of the others"
        )
    return max_num_seqs * (2 if config.num_speculative_tokens else 1)


def with_checkpoints(
    config: EngineConfig, stages: Sequence[MemoryNeeds], device: Device, num_devices: int
) -> list[MemoryNeeds]:
    """Return the needs of the stages with the state pages of the prefix cache, of which all stages have as many.

    By default they take a quarter of what is left for pages, on CPUs at most as much as the pages do by default.

    Raises:
        ConfigError: ``prefix_cache_state_bytes`` is less than one state.
    """
    stated, sharing = config.prefix_cache_state_bytes, num_devices if device.platform == "cpu" else 1
    recurrent = [needs for needs in stages if needs.state]
    if not recurrent:
        return [*stages]
    count = 0
    if config.enable_prefix_caching and stated != 0:
        most = max(_MOST_CHECKPOINTS, 8 * stages[0].max_num_seqs)
        count = min(_count(config, needs, device, sharing) for needs in recurrent)
        is_small = all(needs.state <= needs.page for needs in recurrent)  # as many as pages are of use
        count = count if stated is not None or is_small else min(count, most)
    one = sum(needs.state for needs in recurrent)
    if count:
        logger.info("Prefix cache: up to %d states of recurrent layers, %s each", count, gib(one))
    else:
        logger.info("Prefix cache: no states of recurrent layers are kept; every prompt is computed whole")
    return [dataclasses.replace(needs, num_checkpoints=count) for needs in stages]


def _count(config: EngineConfig, needs: MemoryNeeds, device: Device, sharing: int) -> int:
    """Return how many states the prefix cache of a stage may have on each device."""
    stated = config.prefix_cache_state_bytes
    if stated is not None:
        if stated < needs.state:
            raise ConfigError(
                f"prefix_cache_state_bytes={stated} is less than one state, which has {needs.state:,} bytes on each "
                "device; use at least that, or 0 to compute every prompt whole"
            )
        return stated // needs.state
    usable = usable_fraction(device, config.gpu_memory_utilization)
    size = page_budget(needs, device_memory_bytes(device), usable, device.platform, sharing).left // 4
    size = min(size, CPU_POOL_BYTES // sharing) if device.platform == "cpu" else size
    return max(0, size) // needs.state
