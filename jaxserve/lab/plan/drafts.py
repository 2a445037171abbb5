"""What speculative decoding adds to a plan: the memory of its drafter, and when drafts pay."""

import dataclasses
from collections.abc import Sequence

from jaxserve.api.config import EngineConfig
from jaxserve.device.build import PlannedStages
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.structs import structs_bytes
from jaxserve.lab.devices import Device
from jaxserve.lab.plan.costs import Steps
from jaxserve.lab.records import DraftCost, DrafterMemory, DraftingPlan


def plan_drafting(
    config: EngineConfig, stages: PlannedStages, steps: Steps, device: Device, context: int, batches: Sequence[int]
) -> DraftingPlan | None:
    """Return what the speculative decoding of an engine needs and when it pays; None without.

    Args:
        config: Settings of the engine.
        stages: The stages.
        steps: The steps.
        device: Kind of device.
        context: Tokens of context of each sequence.
        batches: Numbers of sequences to plan decode steps of.
    """
    if config.speculative_config is None:
        return None
    last, most = stages.models[-1], config.num_speculative_tokens
    waits = last.drafter is None and len(stages.models) == 1

    def cost(batch: int) -> DraftCost:
        affordable = stages.max_step_samples // steps.split(batch).rows - 1
        num_drafts = max(0, min(most, affordable))
        plain, step = steps.decode(batch, context), steps.decode(batch, context, num_drafts)
        drafting = 0.0
        if last.drafter is not None:
            num_added = 1 if last.drafter.mask_token is None else max(num_drafts, 1)
            num_added += config.num_lookahead - most
            drafting = steps.drafter_pass(batch, context, 1 + num_drafts + num_added, num_added)
            drafting += max(num_drafts - num_added, 0) * steps.drafter_pass(batch, context, 1)
            if device.platform == "cpu":
                drafting += device.launch_overhead_s * last.mesh.devices.size
        step = dataclasses.replace(step, stage_s=(*step.stage_s[:-1], step.stage_s[-1] + drafting))
        waited = step.host_s if waits and not step.turns else 0.0
        return DraftCost(
            batch=batch,
            num_drafts=num_drafts,
            plain_s=plain.step_s,
            step_s=max(step.step_s, step.latency_s + waited),
            drafting_s=drafting,
        )

    method = config.speculative_config["method"]
    memory = None if last.drafter is None else _drafter_memory(last, method)
    return DraftingPlan(method=method, num_speculative_tokens=most, drafter=memory, costs=tuple(map(cost, batches)))


def _drafter_memory(last: ShardedModel, method: str) -> DrafterMemory:
    """Return the memory of the drafter of a model's last stage."""
    assert last.drafter is not None
    drafter, states = last.drafter.sharded, last.abstract_states()
    one_more = drafter.placed(drafter.mesh, drafter.num_pages + 1)
    drafts = last.abstract_latest().drafts
    return DrafterMemory(
        name=drafter.config.architecture if drafter.head is None else f"{method} head",
        dtype=drafter.policy.weights,
        weights=drafter.weight_bytes,
        kv_bytes_per_token=(one_more.pool_bytes - drafter.pool_bytes) // drafter.page_size,
        page_state_bytes=0 if states is None else structs_bytes(states.pages) // drafter.num_pages,
        slot_bytes=structs_bytes((drafts, () if states is None else states.slots)),
    )
