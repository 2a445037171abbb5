"""Plan an engine from its settings and the model's shapes, then load weights."""

import dataclasses
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from checkpoints.digest import check_model_digest
from jaxserve.api.config import EngineConfig
from jaxserve.api.config_checks import whole_prompts_error
from jaxserve.api.errors import ConfigError
from jaxserve.device.buckets import Buckets, draft_rows
from jaxserve.device.determinism import choose_row_tile
from jaxserve.device.drafter_choice import plan_drafter
from jaxserve.device.kernel_choice import choose_kernels, choose_step_truncation
from jaxserve.device.layout_choice import choose_layout, choose_stages, count_stages, page_size_of
from jaxserve.device.logits_processors import load_processors
from jaxserve.device.memory import (
    MemoryNeeds,
    device_memory_bytes,
    fit_to_memory,
    memory_needs,
    most_samples,
    set_gpu_memory_fraction,
)
from jaxserve.device.recurrent_plan import states_of_sequences, with_checkpoints
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.weight_choice import find_forms
from jaxserve.layers.kv_layout import KVSpec, attended
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel, Scope
from jaxserve.layers.weight_forms import DECODED, WeightForms
from jaxserve.models.abstract import check_tensor_size, outline
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.loading import find_model_directory, load_weights, read_model_config
from jaxserve.models.output_head import choose_head
from pallas_kernels.native_library import set_threads
from sharding import (
    MeshShape,
    ShardingLayout,
    data_slices,
    ensure_cpu_devices,
    make_mesh,
    own_device,
    stage_slices,
)
from sharding.mesh import Device
from sharding.processes import ALONE, Processes

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """An engine planned for its devices, without weights.

    Attributes:
        directory: Directory of the checkpoint.
        config: Configuration of the model.
        models: One per data slice and stage: those of a slice's stages one after the other. Slices differ
            only in their devices.
        buckets: Batch shapes to compile.
        needs: Memory needs per device.
        max_model_len: Maximum context length in tokens.
        max_num_seqs: Most sequences per step and lane (``Runner``).
        max_num_batched_tokens: Most query tokens per step and lane.
        expert_layers: Indices of the layers with experts.
        num_experts: Number of experts of each; 0 for a dense model.
        num_stages: Number of pipeline stages.
        load_format: Format of the checkpoint's files, as in ``EngineConfig``.
    """

    directory: Path
    config: ModelConfig
    models: list[ShardedModel]
    buckets: Buckets
    needs: MemoryNeeds
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    expert_layers: tuple[int, ...] = ()
    num_experts: int = 0
    num_stages: int = 1
    load_format: str = "auto"

    @property
    def replicas(self) -> list[list[ShardedModel]]:
        """The stages of each data slice."""
        return [self.models[start : start + self.num_stages] for start in range(0, len(self.models), self.num_stages)]

    @property
    def num_lanes(self) -> int:
        """Number of lanes of all data slices."""
        return len(self.replicas) * self.models[0].num_lanes

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return sum(sharded.mesh.devices.size for sharded in self.models)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices along each mesh axis; ``stage`` and ``expert`` are omitted if they have one."""
        mesh = self.models[0].mesh.shape
        sizes = {"data": len(self.replicas), "stage": self.num_stages}
        sizes |= {"tensor": mesh["tensor"], "expert": mesh["expert"]}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis in ("data", "tensor")}


def find_model(config: EngineConfig) -> Path:
    """Return the model's directory, downloading the model first when needed."""
    path = find_model_directory(config.model, config.revision, config.download_dir, config.hf_token, config.load_format)
    if config.model_digest is not None:
        check_model_digest(path, config.model_digest)
    return path


def plan_engine(config: EngineConfig, model: ModelConfig | None = None, processes: Processes = ALONE) -> EnginePlan:
    """Plan an engine.

    Args:
        config: Settings of the engine.
        model: Configuration of the model if it is known; None reads it from the checkpoint.
        processes: The processes that have its devices, each as many.

    Raises:
        ConfigError: A setting is not valid for the model or the devices.
        MemoryPlanError: The model or one request of ``max_model_len`` does not fit into memory.
    """
    directory = find_model(config)
    if model is None:
        read = read_model_config(directory, config.hf_overrides, config.quantization)
        model = choose_head(read, directory, "pooling" if config.is_pooling else config.runner, config.load_format)
    set_gpu_memory_fraction(config.gpu_memory_utilization)
    if config.num_threads is not None:
        set_threads(config.num_threads)
    mesh_shape, layout = mesh_shape_of(config, model), choose_layout(config, model)
    ensure_cpu_devices(processes.devices_of_each(mesh_shape))
    mesh = make_mesh(mesh_shape)
    processes.check(mesh)
    meshes = [stage for slice_ in data_slices(mesh) for stage in stage_slices(slice_)]
    num_devices = processes.num_on_host * processes.devices_of_each(mesh_shape)
    stages = plan_stages(config, model, layout, meshes[0], find_forms(config, model, directory), num_devices)
    models, module, num_stages = stages.models, stages.module, mesh_shape.stage
    needs, num_pages = fit_to_memory(config, stages.needs, stages.device, num_devices)
    return EnginePlan(
        directory=directory,
        config=model,
        models=[
            dataclasses.replace(stage.placed(mesh, num_pages), num_states=needs.num_states)
            for mesh, stage in zip(meshes, models * config.data_parallel_size, strict=True)
        ],
        buckets=_make_buckets(config, stages, needs, num_stages),
        needs=needs,
        max_model_len=needs.max_model_len,
        max_num_seqs=models[0].num_slots,
        max_num_batched_tokens=stages.max_num_batched_tokens,
        expert_layers=module.expert_layers,
        num_experts=module.num_experts,
        num_stages=num_stages,
        load_format=config.load_format,
    )


def mesh_shape_of(config: EngineConfig, model: ModelConfig) -> MeshShape:
    """Return the devices along each mesh axis that the settings mean for a model."""
    return MeshShape(
        data=config.data_parallel_size,
        stage=count_stages(config, model),
        tensor=config.tensor_parallel_size,
        expert=config.expert_parallel_size,
    )


class PlannedStages(NamedTuple):
    """The stages of a model on the devices of one data slice, and the memory that each needs.

    Attributes:
        models: One per stage, all on the mesh of the first.
        needs: Memory needs per device of each stage.
        module: The whole module without values.
        max_num_batched_tokens: Most query tokens per step and lane.
        max_samples: Most samples per row: one plus the number of drafts.
        max_step_samples: Most samples per step and lane.
    """

    models: list[ShardedModel]
    needs: list[MemoryNeeds]
    module: CausalLM
    max_num_batched_tokens: int
    max_samples: int
    max_step_samples: int

    @property
    def device(self) -> Device:
        """A device of the first stage, of this process if any is."""
        return own_device(self.models[0].mesh)


def plan_stages(
    config: EngineConfig,
    model: ModelConfig,
    layout: ShardingLayout,
    first: Mesh,
    forms: WeightForms = DECODED,
    devices_of_host: int | None = None,
) -> PlannedStages:
    """Plan the stages of a model; needs no devices, only their platform, kind and memory.

    Args:
        config: Settings of the engine.
        model: Configuration of the model.
        layout: Sharding layout.
        first: Mesh of the first stage.
        forms: The quantized weights of its checkpoint.
        devices_of_host: Devices of the mesh, stages and slices included, on this host; None: all of them.

    Raises:
        ConfigError: A setting is not valid for the model or the devices.
    """
    _check_drafts(config, model)
    device, num_stages = own_device(first), count_stages(config, model)
    _check_sizes(config, model, layout)
    layout = layout.on(first)
    scope = Scope(parallel=Parallel.on_mesh(layout, first))
    max_model_len = _max_model_len(config, model)
    specs = attended(outline(model, scope).kv_specs)
    page_size = page_size_of(config, scope.parallel, layout.name, _attention_chunk(specs, max_model_len))
    policy, kernel = choose_kernels(config, model, specs, scope.parallel, first.devices.flat[0], page_size, forms)
    module = outline(model, dataclasses.replace(scope, policy=policy))
    _check_expert_load(config, module)
    row_tile = choose_row_tile(config, module, policy, kernel, scope.parallel)
    max_num_seqs, max_num_batched_tokens = _batch_limits(config, device, max_model_len)
    sharded = ShardedModel(
        config=model,
        mesh=first,
        layout=layout,
        policy=policy,
        kernel=kernel,
        page_size=page_size,
        num_pages=1,
        num_slots=max_num_seqs,
        max_model_len=max_model_len,
        num_states=states_of_sequences(config, module, max_num_seqs, max_num_batched_tokens),
        row_tile=row_tile,
        max_logprobs=model.vocab_size if config.max_logprobs == -1 else config.max_logprobs,
        logprobs_mode=config.logprobs_mode,
        processors=load_processors(config.logits_processors or []),
        truncation=choose_step_truncation(device, config.kernels or config.attention_backend, scope.parallel),
        counts_expert_tokens=config.expert_load_metrics > 0,
        num_drafts=config.num_device_drafts,
    )
    models = _stage_models(config, sharded, num_stages)
    samples = 1 + config.num_speculative_tokens
    step_samples = most_samples(sharded, max_num_batched_tokens, samples, num_stages)
    needs = [memory_needs(stage, max_num_batched_tokens, samples, step_samples) for stage in models]
    needs = with_checkpoints(config, needs, device, devices_of_host or mesh_shape_of(config, model).num_devices)
    return PlannedStages(models, needs, module, max_num_batched_tokens, samples, step_samples)


def _check_drafts(config: EngineConfig, model: ModelConfig) -> None:
    if config.num_speculative_tokens and not model.has_head:
        raise ConfigError(
            f"speculative_config needs a model that generates; {model.architecture} runs without its output head here: "
            "remove speculative_config"
        )


def _check_sizes(config: EngineConfig, model: ModelConfig, layout: ShardingLayout) -> None:
    sizes = {"tensor": config.tensor_parallel_size, "expert": config.expert_parallel_size}
    experts = sizes.get(layout.mesh_axis("experts") or "")
    check_tensor_size(model, Parallel.from_layout(layout, sizes["tensor"], experts))


def _stage_models(config: EngineConfig, sharded: ShardedModel, num_stages: int) -> list[ShardedModel]:
    """Return the model of each stage, the last of which has the drafter.

    Raises:
        ConfigError: The layout does not shard the model.
    """
    if config.tensor_parallel_size > 1 and sharded.parallel.size == 1:
        raise ConfigError(
            f"layout {sharded.layout.name!r} does not shard the model; it requires tensor_parallel_size=1, got "
            f"{config.tensor_parallel_size}"
        )
    models = [dataclasses.replace(sharded, stage=stage) for stage in choose_stages(config, sharded, num_stages)]
    drafter = plan_drafter(config, sharded)
    if drafter is not None:
        head = drafter.sharded.head
        models = [dataclasses.replace(stage, aux_layers=head and head.aux_layers) for stage in models]
        models[-1] = dataclasses.replace(models[-1], drafter=drafter)
    return models


def _check_expert_load(config: EngineConfig, module: CausalLM) -> None:
    """Raise ConfigError unless the model has as many layers with experts as ``expert_load_metrics`` has groups."""
    groups, layers, name = config.expert_load_metrics, len(module.expert_layers), module.config.architecture
    if groups and not layers:
        raise ConfigError(f"expert_load_metrics needs a model with experts; {name} has none")
    if groups > layers:
        raise ConfigError(
            f"expert_load_metrics={groups} exceeds the {layers} layers with experts of {name}; use 0 to {layers}"
        )


def _make_buckets(config: EngineConfig, stages: PlannedStages, needs: MemoryNeeds, num_stages: int) -> Buckets:
    """Return the batch shapes for the planned memory; the sequences are divided over as many steps as there are
    stages."""
    sharded = stages.models[0]
    multiple = sharded.row_tile or _row_multiple(sharded.mesh.devices.flat[0], sharded.policy)
    skips = sharded.policy.is_native and sharded.kernel.name == "native"
    rows = -(-sharded.num_slots // num_stages)
    given = {**(config.compile_sizes or {})}
    if "decode" in given and max(given["decode"]) <= sharded.num_slots:
        given["decode"] = [min(size, rows) for size in given["decode"]]
    if sharded.num_drafts:
        given.setdefault("decode", [*draft_rows(rows, skips)])
    sizes = rows, stages.max_num_batched_tokens, needs.table_pages
    samples = stages.max_samples, stages.max_step_samples if stages.max_samples > 1 else None
    shared = sharded.parallel.parts(sharded.parallel.residual_axis)
    return Buckets.make(*sizes, multiple, given, skips, *samples, len(needs.windows), shared)


def _row_multiple(device: Device, policy: DtypePolicy) -> int:
    """Return 2 where a matmul with a single row is slow, else 1; shapes have a multiple of it.

    XLA compiles a 16-bit matmul with a single row to a slow loop on CPUs; on GPUs it converts whole stacks of weights
    for each one.
    """
    is_fast = policy.weights == "float32" or policy.linear == "native"
    return 1 if device.platform == "cpu" and is_fast else 2


def load_params(plan: EnginePlan, sharded: ShardedModel) -> tuple[jax.Array, ...]:
    """Load a model's parameters onto the devices of a stage, packed for its steps.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or of the wrong shape.
    """
    whole = None if sharded.stage is None else lambda: sharded.whole_model().listings
    params = load_weights(plan.directory, sharded.abstract_model, whole, plan.load_format)
    packed = sharded.packing.pack(params)
    if sharded.drafter is None:
        return packed
    drafter = sharded.drafter.sharded
    if drafter.head is None:
        params = load_weights(sharded.drafter.directory, drafter.abstract_model, None, plan.load_format)
    else:
        params = drafter.head.load(drafter.abstract_model, lambda: sharded.whole_model().listings)
    return (*packed, *drafter.packing.pack(params))


def _batch_limits(config: EngineConfig, device: Device, max_model_len: int) -> tuple[int, int]:
    """Return ``max_num_seqs`` and ``max_num_batched_tokens``, with defaults for the device."""
    if device.platform == "cpu":
        seqs, tokens = 64, 1024
    else:
        seqs, tokens = (1024, 16384) if device_memory_bytes(device) >= 70 << 30 else (256, 8192)
    if config.enable_chunked_prefill is False:
        tokens = max(tokens, max_model_len)
    if config.max_num_batched_tokens is not None:
        tokens = config.max_num_batched_tokens
        seqs = min(seqs, tokens) if config.max_num_seqs is None else config.max_num_seqs
    elif config.max_num_seqs is not None:
        seqs = config.max_num_seqs
        tokens = max(tokens, seqs)
    if seqs > tokens:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}; a step needs a token per sequence"
        )
    return seqs, tokens


def _attention_chunk(specs: Sequence[KVSpec], max_model_len: int) -> int:
    """Return the most tokens of which the attention chunks of all layers are multiples; 0 if none is shorter than the
    longest context."""
    chunks = (spec.chunk for spec in specs)
    return math.gcd(*(chunk for chunk in chunks if chunk is not None and chunk < max_model_len))


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the configured context length, after checking it against the model's."""
    longest = model.max_positions
    configured = config.max_model_len
    tokens = config.max_num_batched_tokens
    if configured == -1 and config.enable_chunked_prefill is False and tokens is not None:
        return min(longest, tokens)
    if configured is None and config.enable_chunked_prefill is False and tokens is not None and tokens < longest:
        raise whole_prompts_error(tokens, longest)
    if configured is None or configured == -1:
        return longest
    if configured > longest:
        raise ConfigError(f"max_model_len={configured} exceeds the model's maximum of {longest} positions")
    return configured
