"""The memory that each stage of an engine needs, and the number of pages that fit."""

import dataclasses
import logging
from collections.abc import Sequence

import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.device.memory import MemoryNeeds, device_memory_bytes, plan_pages, usable_fraction
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.scheduling.page_allocator import KVWindow
from sharding.mesh import Device

logger = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2
"""Steps in flight with async scheduling in which one sequence can sample; each further stage adds one for others."""


def memory_needs(sharded: ShardedModel, max_num_batched_tokens: int, max_samples: int, num_stages: int) -> MemoryNeeds:
    """Return the memory that one stage needs on each of its devices."""
    assert sharded.max_model_len is not None
    model, abstract = sharded.config, sharded.abstract_model
    page = dataclasses.replace(sharded, num_pages=sharded.num_pages + 1).pool_bytes - sharded.pool_bytes
    token = 3 * abstract.layer_width
    samples = min(-(-sharded.num_slots // num_stages) * max_samples, max_num_batched_tokens)
    itemsize = jnp.dtype(sharded.policy.activations).itemsize
    step_tokens = max_num_batched_tokens + STEPS_IN_FLIGHT * max_samples
    scores = model.vocab_size  # of each sample; processors see whole rows
    if sharded.parallel.keeps_logits and not sharded.processors:
        scores = sharded.vocab_width // sharded.parallel.parts(sharded.parallel.vocab)
    logits = samples * scores * 4 * 4 if sharded.is_last else 0
    return MemoryNeeds(
        weights=sharded.weight_bytes,
        page=page,
        temporaries=max_num_batched_tokens * (token * itemsize + _exchanged_per_token(sharded)) + logits,
        page_size=sharded.page_size,
        max_model_len=sharded.max_model_len,
        max_num_seqs=sharded.num_slots,
        slots=sharded.slot_state_bytes,
        windows=tuple(
            None if window is None else KVWindow(window, sharded.page_size, step_tokens)
            for window in sharded.kv_layout.windows
        ),
    )


def _exchanged_per_token(sharded: ShardedModel) -> int:
    """Return the bytes per token of a layer's queries of all heads, and of their partial attention as computed, as sent
    and as received, in float32; 0 if no devices share tokens."""
    if sharded.parallel.num_token_parts == 1:
        return 0
    specs = sharded.abstract_model.kv_specs
    return 4 * max(each.num_heads * (each.head_dim + 3 * ((each.value_dim or each.head_dim) + 2)) for each in specs)


def fit_to_memory(
    config: EngineConfig, stages: Sequence[MemoryNeeds], device: Device, num_devices: int
) -> tuple[MemoryNeeds, int]:
    """Return the needs of the stage that leaves room for the fewest pages, and their number, which all stages have.

    With max_model_len=-1, the context length is reduced to what fits.
    """
    total = device_memory_bytes(device)
    sharing = num_devices if device.platform == "cpu" else 1
    settings = {
        "total": total,
        "utilization": usable_fraction(device, config.gpu_memory_utilization),
        "platform": device.platform,
        "pool_bytes": config.kv_cache_memory_bytes,
        "num_pages": config.num_gpu_blocks_override,
        "devices_sharing": sharing,
    }
    longest = stages[0].max_model_len
    if config.max_model_len == -1:
        for needs in stages:
            single_token = dataclasses.replace(needs, max_model_len=1)
            pages = plan_pages(dataclasses.replace(single_token, max_num_seqs=needs.request_pages), **settings)
            longest = min(longest, needs.longest_request(pages))
        if longest < stages[0].max_model_len:
            logger.info(
                "Auto-fit max_model_len: reduced from %d to %d to fit in available memory",
                stages[0].max_model_len,
                longest,
            )
    fitted = [dataclasses.replace(needs, max_model_len=longest) for needs in stages]
    planned = [(plan_pages(needs, **settings), needs) for needs in fitted]
    num_pages, needs = min(planned, key=lambda found: (found[0], -found[1].weights))
    return needs, num_pages
