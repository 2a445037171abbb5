"""Plan an engine from its settings and the model's shapes, then load weights."""

import dataclasses
import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.device.buckets import Buckets
from jaxserve.device.kernel_choice import choose_kernels, choose_step_truncation
from jaxserve.device.memory import (
    MemoryNeeds,
    device_memory_bytes,
    plan_pages,
    set_gpu_memory_fraction,
    usable_fraction,
)
from jaxserve.device.program import ModelProgram, computes_rows_natively
from jaxserve.device.token_parts import exchanged_per_token, page_size_of
from jaxserve.errors import ConfigError
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel, Scope
from jaxserve.layers.rows import ROW_TILE
from jaxserve.models.abstract import check_tensor_size, outline
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.loading import find_model_directory, load_weights, read_model_config
from jaxserve.models.sparse_decoder import SparseConfig
from jaxserve.sampling.logits_processors import LogitsProcessor, argument_names
from jaxserve.scheduling.page_allocator import KVWindow
from pallas_kernels.native_library import set_threads
from sharding import (
    LAYOUTS,
    LayoutError,
    MeshShape,
    ShardingLayout,
    data_slices,
    ensure_cpu_devices,
    get_layout,
    make_mesh,
)
from sharding.mesh import Device
from sharding.plan import bytes_per_device


def load_processors(given: Sequence[Any]) -> tuple[LogitsProcessor, ...]:
    """Resolve logits processors given as objects, as classes without arguments, or as ``module:name``.

    Raises:
        ConfigError: A name cannot be imported, or an object is not a ``LogitsProcessor``.
    """
    found = []
    for item in given:
        processor = _import(item) if isinstance(item, str) else item
        if isinstance(processor, type):
            processor = processor()
        if not isinstance(processor, LogitsProcessor) or not isinstance(processor.arguments, Mapping):
            raise ConfigError(
                f"logits_processors: expected a LogitsProcessor (callable, with a mapping `arguments`), got {item!r}"
            )
        found.append(processor)
    argument_names(found)
    return tuple(found)


def _import(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"logits_processors: cannot import {name!r} (expected 'module:name'): {error}") from error


logger = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2
"""Steps in flight with async scheduling."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """An engine planned for its devices, without weights.

    Attributes:
        directory: Directory of the checkpoint.
        config: Configuration of the model.
        programs: One program per data slice; they differ only in their devices.
        buckets: Batch shapes to compile.
        needs: Memory needs per device.
        max_model_len: Maximum context length in tokens.
        max_num_seqs: Most sequences per step and lane (``Runner``).
        max_num_batched_tokens: Most query tokens per step and lane.
        expert_layers: Indices of the layers with experts.
        num_experts: Number of experts of each; 0 for a dense model.
    """

    directory: Path
    config: ModelConfig
    programs: list[ModelProgram]
    buckets: Buckets
    needs: MemoryNeeds
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    expert_layers: tuple[int, ...] = ()
    num_experts: int = 0

    @property
    def num_lanes(self) -> int:
        """Number of lanes of all data slices."""
        return len(self.programs) * self.programs[0].num_lanes

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices along each mesh axis; ``expert`` is omitted if it has one."""
        mesh = self.programs[0].mesh.shape
        sizes = {"data": len(self.programs), "tensor": mesh["tensor"], "expert": mesh["expert"]}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis != "expert"}


def find_model(config: EngineConfig) -> Path:
    """Return the model's directory, downloading the model first when needed."""
    return find_model_directory(config.model, config.revision, config.download_dir, config.hf_token)


def plan_engine(config: EngineConfig, max_draft_tokens: int = 0) -> EnginePlan:
    """Plan an engine whose steps verify up to ``max_draft_tokens`` drafts per row.

    Raises:
        ConfigError: A setting is not valid for the model or the devices.
        MemoryPlanError: The model or one request of ``max_model_len`` does not fit into memory.
    """
    directory = find_model(config)
    model = read_model_config(directory, config.hf_overrides)
    set_gpu_memory_fraction(config.gpu_memory_utilization)
    if config.num_threads is not None:
        set_threads(config.num_threads)
    sizes = {"tensor": config.tensor_parallel_size, "expert": config.expert_parallel_size}
    mesh_shape = MeshShape(data=config.data_parallel_size, **sizes)
    layout = _choose_layout(config, model)
    ensure_cpu_devices(mesh_shape.num_devices)
    mesh = make_mesh(mesh_shape)
    device = mesh.devices.flat[0]
    check_tensor_size(
        model, Parallel.from_layout(layout, sizes["tensor"], sizes.get(layout.mesh_axis("experts") or ""))
    )
    first, *others = data_slices(mesh)
    layout = layout.on(first)
    scope = Scope(parallel=Parallel.on_mesh(layout, first))
    page_size = page_size_of(config, scope.parallel, layout.name)
    policy, kernel = choose_kernels(config, model, scope, first.devices.flat[0], page_size)
    module = outline(model, dataclasses.replace(scope, policy=policy))
    _check_expert_load(config, module)
    is_invariant = computes_rows_natively(module.has_fused_norms, policy, kernel)
    is_invariant &= scope.parallel.dispatch != "gather"  # whose devices add a row's parts in an order of their own
    is_deterministic = is_invariant if config.deterministic is None else config.deterministic
    _log_determinism(config, is_deterministic, is_invariant)
    max_num_seqs, max_num_batched_tokens = _batch_limits(config, device)
    max_model_len = _max_model_len(config, model)
    program = ModelProgram(
        config=model,
        mesh=first,
        layout=layout,
        policy=policy,
        kernel=kernel,
        page_size=page_size,
        num_pages=1,
        num_slots=max_num_seqs,
        max_model_len=max_model_len,
        row_tile=ROW_TILE if is_deterministic else None,
        max_logprobs=model.vocab_size if config.max_logprobs == -1 else config.max_logprobs,
        logprobs_mode=config.logprobs_mode,
        processors=load_processors(config.logits_processors or []),
        truncation=choose_step_truncation(device, config.kernels or config.attention_backend),
        counts_expert_tokens=config.expert_load_metrics > 0,
    )
    if config.tensor_parallel_size > 1 and program.parallel.size == 1:
        raise ConfigError(
            f"layout {layout.name!r} does not shard the model; it requires tensor_parallel_size=1, got "
            f"{config.tensor_parallel_size}"
        )
    max_samples = 1 + max_draft_tokens
    needs = _memory_needs(program, max_model_len, max_num_batched_tokens, max_samples)
    needs, num_pages = _fit_to_memory(config, needs, device, mesh.devices.size)
    programs = [dataclasses.replace(program, mesh=slice_, num_pages=num_pages) for slice_ in (first, *others)]
    return EnginePlan(
        directory=directory,
        config=model,
        programs=programs,
        buckets=_make_buckets(config, program, needs, max_num_batched_tokens, max_samples),
        needs=needs,
        max_model_len=needs.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        expert_layers=module.expert_layers,
        num_experts=module.num_experts,
    )


def _check_expert_load(config: EngineConfig, module: CausalLM) -> None:
    """Raise ConfigError unless the model has as many layers with experts as ``expert_load_metrics`` has groups."""
    groups, layers, name = config.expert_load_metrics, len(module.expert_layers), module.config.architecture
    if groups and not layers:
        raise ConfigError(f"expert_load_metrics needs a model with experts; {name} has none")
    if groups > layers:
        raise ConfigError(
            f"expert_load_metrics={groups} exceeds the {layers} layers with experts of {name}; use 0 to {layers}"
        )


def _make_buckets(
    config: EngineConfig, program: ModelProgram, needs: MemoryNeeds, max_num_batched_tokens: int, max_samples: int
) -> Buckets:
    """Return the batch shapes for the planned memory."""
    multiple = program.row_tile or _row_multiple(program.mesh.devices.flat[0], program.policy)
    skips = program.policy.linear == program.kernel.name == "native"
    sizes = program.num_slots, max_num_batched_tokens, needs.table_pages
    return Buckets.make(*sizes, multiple, config.compile_sizes, skips, max_samples, len(needs.windows))


def _row_multiple(device: Device, policy: DtypePolicy) -> int:
    """Return 2 where a matmul with a single row is slow, else 1; shapes have a multiple of it.

    XLA compiles a 16-bit matmul with a single row to a slow loop on CPUs; on GPUs it converts whole stacks of weights
    for each one.
    """
    is_fast = policy.weights == "float32" or policy.linear == "native"
    return 1 if device.platform == "cpu" and is_fast else 2


def _log_determinism(config: EngineConfig, is_deterministic: bool, is_invariant: bool) -> None:
    if not is_deterministic:
        why = "deterministic=False" if config.deterministic is not None else "XLA's sums depend on a step's shape"
        logger.info("Results are not batch-invariant: their last bits may depend on the batch (%s)", why)
        return
    how = "native kernels compute each row separately" if is_invariant else f"rows are computed in tiles of {ROW_TILE}"
    logger.info("Results are batch-invariant: %s", how)


def load_params(plan: EnginePlan, program: ModelProgram) -> tuple[jax.Array, ...]:
    """Load a model's parameters onto the devices of a program, packed for its steps.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or of the wrong shape.
    """
    params = load_weights(plan.directory, program.abstract_model)
    return program.packing.pack(params)


def _choose_layout(config: EngineConfig, model: ModelConfig) -> ShardingLayout:
    """Return the layout that the settings name, or the one that expert parallelism means.

    Raises:
        ConfigError: Expert parallelism is requested with a layout that does not split experts over its axis, or for a
            model without experts.
        LayoutError: The layout is unknown, or contradicts itself.
    """
    layout = config.layout
    if not isinstance(layout, str | ShardingLayout):
        raise ConfigError(f"layout: expected a name, path.py:NAME or a ShardingLayout, got {layout!r}")
    layout = get_layout(layout) if isinstance(layout, str) else layout
    _check_axes(layout, has_experts=isinstance(model, SparseConfig))
    size = config.expert_parallel_size
    if size == 1 and not config.enable_expert_parallel:
        return layout
    setting = "enable_expert_parallel" if size == 1 else f"expert_parallel_size={size}"
    if size > 1 and config.enable_expert_parallel:
        raise ConfigError(
            f"{setting} splits experts over devices of their own, enable_expert_parallel over those of "
            "tensor_parallel_size; use only one of them"
        )
    axis, default = ("tensor", "expert_parallel") if size == 1 else ("expert", "expert_gather")
    if size > 1 and config.deterministic:
        default = "expert_all_to_all"  # adds the parts of a row in the same order on every device
    is_default = layout == get_layout("tensor_parallel")
    if not is_default and layout.mesh_axis("experts") != axis:
        names = " or ".join(f"layout={name!r}" for name in LAYOUTS if get_layout(name).mesh_axis("experts") == axis)
        raise ConfigError(f"{setting} needs {names}, got layout={layout.name!r}")
    if not isinstance(model, SparseConfig):
        raise ConfigError(f"{setting} needs a model with experts; {model.architecture} has none")
    return get_layout(default) if is_default else layout


def _check_axes(layout: ShardingLayout, has_experts: bool) -> None:
    """Raise LayoutError if a layout splits something that the modules cannot split, or over an axis that they do not
    use."""
    rules = layout.rules
    whole = [logical for logical in ("embed", "head_dim") if logical in rules]
    if whole:
        raise LayoutError(f"layout {layout.name!r} splits {' and '.join(whole)}, which every device needs whole")
    slices = [f"{logical} over {axis}" for logical, axis in rules.items() if axis in ("data", "stage")]
    if slices:
        raise LayoutError(
            f"layout {layout.name!r} splits {', '.join(slices)}; a layout can use only the axes tensor and expert"
        )
    axes = {logical: rules.get(logical) for logical in ("q_heads", "kv_heads", "tokens", "ffn")}
    kv_axis = axes["tokens"] if axes["kv_heads"] is None else axes["kv_heads"]
    if axes["q_heads"] != kv_axis or axes["q_heads"] not in (None, axes["ffn"]):
        found = ", ".join(f"{logical} over {axis}" for logical, axis in axes.items())
        raise LayoutError(
            f"layout {layout.name!r} has {found}; q_heads, and either kv_heads or tokens, must be over the axis of "
            "ffn, or none of them be split"
        )
    for logical in ("vocab", "expert_ffn"):
        if rules.get(logical) not in (None, axes["ffn"]):
            raise LayoutError(
                f"layout {layout.name!r} splits {logical} over {rules[logical]}; it can be split only over the axis of "
                f"ffn, {axes['ffn']}"
            )
    if has_experts and axes["ffn"] not in (None, rules.get("expert_ffn"), rules.get("experts")):
        raise LayoutError(
            f"layout {layout.name!r} splits ffn over {axes['ffn']}; for a model with experts it must split "
            f"expert_ffn or experts over {axes['ffn']} too"
        )


def _batch_limits(config: EngineConfig, device: Device) -> tuple[int, int]:
    """Return ``max_num_seqs`` and ``max_num_batched_tokens``, with defaults for the device."""
    if device.platform == "cpu":
        seqs, tokens = 64, 1024
    else:
        seqs, tokens = (1024, 16384) if device_memory_bytes(device) >= 70 << 30 else (256, 8192)
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


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the configured context length, after checking it against the model's."""
    longest = model.max_positions
    configured = config.max_model_len
    if configured is None or configured == -1:
        return longest
    if configured > longest:
        raise ConfigError(f"max_model_len={configured} exceeds the model's maximum of {longest} positions")
    return configured


def _memory_needs(
    program: ModelProgram, max_model_len: int, max_num_batched_tokens: int, max_samples: int
) -> MemoryNeeds:
    model, abstract = program.config, program.abstract_model
    weights = sum(bytes_per_device(p.shape, p.dtype.itemsize, p.sharding) for p in abstract.params.values())
    page = dataclasses.replace(program, num_pages=program.num_pages + 1).pool_bytes - program.pool_bytes
    token = 3 * abstract.layer_width
    samples = min(program.num_slots * max_samples, max_num_batched_tokens)
    itemsize = jnp.dtype(program.policy.activations).itemsize
    step_tokens = max_num_batched_tokens + STEPS_IN_FLIGHT * max_samples
    return MemoryNeeds(
        weights=weights,
        page=page,
        temporaries=max_num_batched_tokens * (token * itemsize + exchanged_per_token(program))
        + samples * model.vocab_size * 4 * 4,
        page_size=program.page_size,
        max_model_len=max_model_len,
        max_num_seqs=program.num_slots,
        slots=program.slot_state_bytes,
        windows=tuple(
            None if window is None else KVWindow(window, program.page_size, step_tokens)
            for window in program.kv_layout.windows
        ),
    )


def _fit_to_memory(
    config: EngineConfig, needs: MemoryNeeds, device: Device, num_devices: int
) -> tuple[MemoryNeeds, int]:
    """Return the memory needs and the number of pages; with max_model_len=-1, reduce the context length to fit."""
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
    if config.max_model_len == -1:
        single_token = dataclasses.replace(needs, max_model_len=1)
        pages = plan_pages(dataclasses.replace(single_token, max_num_seqs=needs.request_pages), **settings)
        longest = needs.longest_request(pages)
        if longest < needs.max_model_len:
            logger.info(
                "Auto-fit max_model_len: reduced from %d to %d to fit in available memory", needs.max_model_len, longest
            )
        needs = dataclasses.replace(needs, max_model_len=longest)
    return needs, plan_pages(needs, **settings)
