"""Plan a model on a mesh in a layout, from its config.json, without weights and without the devices."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxserve.api.config import EngineConfig
from jaxserve.api.config_checks import check_whole
from jaxserve.api.errors import MemoryPlanError
from jaxserve.device.build import PlannedStages, find_model, mesh_shape_of, plan_stages
from jaxserve.device.layout_choice import choose_layout
from jaxserve.device.memory import fit_to_memory
from jaxserve.lab.devices import Device
from jaxserve.lab.hardware import get_device, get_link
from jaxserve.lab.links import Link
from jaxserve.lab.plan.costs import Steps, step_costs
from jaxserve.lab.plan.drafts import plan_drafting
from jaxserve.lab.plan.memory import compiled_memories, stage_memories
from jaxserve.lab.plan.placement import Placement
from jaxserve.lab.plan.planned import Plan
from jaxserve.lab.records import DRAFT_BATCH_SIZES
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Scope
from jaxserve.models.abstract import outline
from jaxserve.models.drafters.speculators import with_verifier
from jaxserve.models.loading import read_model_config
from jaxserve.models.registry import without_head
from sharding import data_slices, make_mesh, stage_slices


def plan(
    model: str,
    mesh: str | Mapping[str, int] = "tensor=1",
    layout: Any = "tensor_parallel",
    device: str | Device = "h100",
    hosts: int | None = None,
    max_model_len: int | str | None = None,
    num_seqs: int | None = None,
    *,
    link: str | Link | None = None,
    host_link: str | Link | None = None,
    context: int | None = None,
    draft_batches: Sequence[int] = DRAFT_BATCH_SIZES,
    compiles: bool = False,
    **settings: Any,
) -> Plan:
    """Plan a model on a mesh in a layout, from its config.json, without weights and without the devices.

    Args:
        model: Directory with a ``config.json``, ``.gguf`` file, hub id, or ``demo``.
        mesh: Devices along each mesh axis: ``data=2,tensor=4`` or ``{"data": 2, "tensor": 4}``.
        layout: As in ``EngineConfig``.
        device: Name in ``DEVICES``, a ``Device``, or the file of a calibration.
        hosts: Hosts that the devices are divided over, consecutive ones on one host; None: at most 8 GPUs on each.
        max_model_len: Longest context in tokens; None is the model's own, -1 the longest that fits.
        num_seqs: Most sequences per step; None is the engine's default for the device.
        link: Link between devices of a host, by name in ``LINKS`` or a ``Link``; None is the device's own.
        host_link: Link between hosts; None is the device's own.
        context: Tokens of context of each sequence in a decode step; None: 1,024, or ``max_model_len`` if less.
        draft_batches: Batch sizes whose decode steps are planned with the drafts of ``speculative_config``.
        compiles: Whether to compile the largest step for the GPU, which need not be there, and take temporaries from
            the executable. It takes minutes for a large model, and needs JAX's CUDA wheels.
        settings: Further settings of an engine, as in ``EngineConfig``.

    Raises:
        ConfigError: The model, the mesh, the layout, the device or another setting is unknown, or they do not fit
            together; the message lists what does. A model that is too large for the memory is planned all the same
            (``Plan.problem``).
    """
    written = mesh if isinstance(mesh, str) else ",".join(f"{axis}={size}" for axis, size in mesh.items())
    optional = {"max_model_len": max_model_len, "max_num_seqs": num_seqs}
    settings |= {name: value for name, value in optional.items() if value is not None}
    config = with_verifier(EngineConfig.from_arguments(str(model), mesh=written, layout=layout, **settings))
    kind = get_device(device)
    links = {"link": link, "host_link": host_link}
    kind = dataclasses.replace(kind, **{name: get_link(given) for name, given in links.items() if given is not None})
    return plan_config(config, kind, hosts, context, compiles, draft_batches)


def plan_config(
    config: EngineConfig,
    device: Device,
    hosts: int | None = None,
    context: int | None = None,
    compiles: bool = False,
    draft_batches: Sequence[int] = DRAFT_BATCH_SIZES,
) -> Plan:
    """Plan an engine for devices of a kind; see :func:`plan`."""
    if context is not None:
        check_whole("context", context, 1)
    for batch in draft_batches:
        check_whole("draft_batches", batch, 1)
    model = read_model(config)
    shape = mesh_shape_of(config, model)
    placement = Placement(shape, device, device.fewest_hosts(shape.num_devices) if hosts is None else hosts)
    layout = choose_layout(config, model)
    whole = make_mesh(shape, device.planned(shape.num_devices, placement.devices_per_host))
    stages = plan_stages(config, model, layout, stage_slices(data_slices(whole)[0])[0])
    problem = None
    try:
        needs, _ = fit_to_memory(config, stages.needs, stages.device, placement.devices_per_host)
    except MemoryPlanError as error:
        problem, needs = str(error), stages.needs[0]
    memories = stage_memories(stages, device, config.gpu_memory_utilization, placement.devices_per_host)
    if compiles:
        memories = compiled_memories(memories, stages, device)
    used = min(1024 if context is None else context, needs.max_model_len)
    steps = Steps(stages, placement)
    decode, prefill = step_costs(steps, stages, used)
    first = stages.models[0]
    return Plan(
        model=config.model,
        architecture=model.architecture,
        num_layers=model.num_layers,
        dtype=first.policy.weights,
        mesh=placement.sizes,
        layout=layout.name,
        device=device,
        hosts=placement.hosts,
        links=placement.links,
        max_model_len=needs.max_model_len,
        max_num_seqs=first.num_slots,
        max_num_batched_tokens=stages.max_num_batched_tokens,
        page_size=first.page_size,
        pages_per_request=needs.request_pages,
        num_tables=len(needs.windows),
        num_lanes=first.num_lanes,
        model_kv_bytes_per_token=_model_kv_bytes(model, stages),
        stages=tuple(memories),
        decode=decode,
        prefill=prefill,
        drafting=plan_drafting(config, stages, steps, device, used, draft_batches),
        problem=problem,
        models=tuple(stages.models),
    )


def read_model(config: EngineConfig) -> ModelConfig:
    """Return the model's configuration, for embeddings alone if the engine is for those."""
    model = read_model_config(find_model(config), config.hf_overrides, config.quantization)
    return without_head(model) if config.is_pooling else model


def _model_kv_bytes(model: ModelConfig, stages: PlannedStages) -> int:
    """Return the bytes of keys and values of one token in all layers of an unsplit model."""
    sharded = stages.models[0]
    itemsize = jnp.dtype(sharded.policy.kv).itemsize
    parallel = dataclasses.replace(sharded.parallel, size=1, expert_size=1)
    specs = [spec for spec in outline(model, Scope(parallel=parallel)).kv_specs if spec is not None]
    elements = (
        spec.num_kv_heads * spec.head_dim * (2 if spec.value_dim is None else 1) for spec in specs if spec.reads is None
    )
    return itemsize * sum(elements)
