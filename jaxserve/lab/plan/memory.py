"""The memory of each device of a plan: weights, pages, and what the largest step needs besides."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxserve.device.build import PlannedStages
from jaxserve.device.memory import MemoryNeeds, page_budget
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape
from jaxserve.lab.compiled import compile_step
from jaxserve.lab.devices import Device
from jaxserve.lab.records import StageMemory


def stage_memories(
    stages: PlannedStages, device: Device, utilization: float, devices_per_host: int
) -> list[StageMemory]:
    """Return the memory of a device of each stage.

    Args:
        stages: The stages.
        device: Kind of device.
        utilization: Share of a device's memory that an engine may use.
        devices_per_host: Devices that share a host.
    """
    sharing = devices_per_host if device.shares_host else 1
    found = []
    for index, (sharded, needs) in enumerate(zip(stages.models, stages.needs, strict=True)):
        budget = page_budget(needs, device.memory_bytes, utilization, device.platform, sharing)
        tokens = stages.max_num_batched_tokens
        found.append(
            StageMemory(
                stage=index,
                layers=sharded.layers,
                weights=needs.weights,
                kv_bytes_per_token=kv_bytes_per_token(needs),
                page_bytes=needs.page,
                activations=activation_bytes(sharded, tokens),
                temporaries=temporary_bytes(sharded, tokens, stages.max_step_samples),
                temporaries_source="modelled",
                step_reserve=needs.temporaries,
                slots=needs.slots,
                state_bytes=needs.state,
                num_states=needs.num_states,
                reserve=budget.reserve,
                usable=budget.usable,
                num_pages=max(0, budget.left) // needs.page if needs.page else 0,
            )
        )
    return found


def compiled_memories(memories: Sequence[StageMemory], stages: PlannedStages, device: Device) -> list[StageMemory]:
    """Return the same with the temporaries and the collectives of the largest step as compiled for the device.

    Raises:
        ConfigError: See ``compile_step``.
    """
    tokens, found = stages.max_num_batched_tokens, []
    for memory, sharded, needs in zip(memories, stages.models, stages.needs, strict=True):
        shape = BatchShape(
            num_tokens=tokens,
            num_rows=min(sharded.num_slots, tokens),
            table_pages=needs.table_pages,
            decode_only=False,
            max_samples=stages.max_samples,
            max_step_samples=stages.max_step_samples,
            num_arguments=len(sharded.arguments),
            num_tables=len(needs.windows),
            state_distance=sharded.state_distance,
        )
        step = compile_step(sharded, shape, device)
        compiled: dict[str, Any] = {"temporaries_source": "compiled", "compiled_collectives": step.collectives}
        found.append(dataclasses.replace(memory, temporaries=step.temporary_bytes, **compiled))
    return found


def kv_bytes_per_token(needs: MemoryNeeds) -> int:
    """Return the bytes of keys and values of one token on a device, in all page tables."""
    return needs.page * len(needs.windows) // needs.page_size


def activation_bytes(sharded: ShardedModel, num_tokens: int) -> int:
    """Return the bytes of the hidden states between two layers on a device."""
    own = -(-num_tokens // sharded.parallel.parts(sharded.parallel.residual_axis))
    return own * sharded.config.hidden_size * jnp.dtype(sharded.policy.activations).itemsize


def temporary_bytes(sharded: ShardedModel, num_tokens: int, num_rows: int, variant: str = "any") -> int:
    """Return the temporary bytes of a step on a device, from a model of what XLA keeps at once.

    The layers and the head run one after the other, and share memory. A layer keeps its matmuls' outputs and its input;
    the head keeps the last layer's output, which is also pooled, and the logits in float32, four times if top-k and
    top-p need them sorted and masked. If devices gather logits, each also has its own part.

    Args:
        sharded: The stage.
        num_tokens: Query tokens.
        num_rows: Rows of logits: those that are sampled, with one more for each draft.
        variant: Sampler variant; ``greedy`` keeps the logits once.
    """
    itemsize = jnp.dtype(sharded.policy.activations).itemsize
    layers = num_tokens * sharded.abstract_model.layer_width * itemsize + 2 * activation_bytes(sharded, num_tokens)
    if not sharded.is_last:
        return layers
    parallel = sharded.parallel
    parts = parallel.parts(parallel.vocab)
    width = sharded.vocab_width // (parts if parallel.keeps_logits else 1)
    copies = 1.0 if variant == "greedy" else 4.0
    own = width / parts if variant == "greedy" and parts > 1 and not parallel.keeps_logits else 0
    hidden = num_tokens * sharded.config.hidden_size * itemsize
    return max(layers, hidden + int(num_rows * 4 * (width * copies + own)))
