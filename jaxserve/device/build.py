"""From settings to a runnable model: everything is planned from shapes first; weights are read last."""

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
    ask_for_gpu_memory,
    device_memory_bytes,
    plan_pages,
    usable_share,
)
from jaxserve.device.program import ModelProgram, computes_rows_natively
from jaxserve.errors import ConfigError
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import DtypePolicy, Parallel, Scope
from jaxserve.layers.rows import ROW_TILE
from jaxserve.models.abstract import check_tensor_size, outline
from jaxserve.models.loading import find_model_directory, load_weights, read_model_config
from jaxserve.sampling.logits_processors import LogitsProcessor, argument_names
from jaxserve.scheduling.page_allocator import KVWindow
from pallas_kernels.native_library import set_threads
from sharding import MeshShape, data_slices, ensure_cpu_devices, get_layout, make_mesh
from sharding.mesh import Device
from sharding.plan import bytes_per_device


def load_processors(given: Sequence[Any]) -> tuple[LogitsProcessor, ...]:
    """Logits processors, given as themselves, as classes without arguments, or by ``module:name``.

    Raises:
        ConfigError: Nothing by that name, or something that is no processor; the message says which.
    """
    found = []
    for item in given:
        processor = _imported(item) if isinstance(item, str) else item
        if isinstance(processor, type):
            processor = processor()
        if not isinstance(processor, LogitsProcessor) or not isinstance(processor.arguments, Mapping):
            raise ConfigError(
                f"logits_processors: expected functions of logits with a mapping `arguments` (LogitsProcessor), "
                f"got {item!r}"
            )
        found.append(processor)
    argument_names(found)
    return tuple(found)


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"logits_processors: {name!r} is no 'module:name' that can be imported: {error}") from error


logger = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2
"""Steps that run ahead of the host, with asynchronous scheduling."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """A model fitted to devices, before its weights are read.

    Attributes:
        directory: Where the checkpoint is.
        config: The model.
        programs: One for each data slice, alike but for their devices.
        buckets: Batch shapes to compile.
        needs: Memory each device needs.
        max_model_len: Longest context in tokens.
        max_num_seqs: Most sequences in a step of a slice.
        max_num_batched_tokens: Most query tokens in a step of a slice.
    """

    directory: Path
    config: ModelConfig
    programs: list[ModelProgram]
    buckets: Buckets
    needs: MemoryNeeds
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def find_model(config: EngineConfig) -> Path:
    """Return the model's directory, downloading the model first when needed."""
    return find_model_directory(config.model, config.revision, config.download_dir, config.hf_token)


def plan_engine(config: EngineConfig, max_draft_tokens: int = 0) -> EnginePlan:
    """Fits a model to the devices there are, with programs that verify up to ``max_draft_tokens`` drafts of a row.

    Raises:
        ConfigError: A setting does not go with the model or the devices.
        MemoryPlanError: The model or one request does not fit.
    """
    directory = find_model(config)
    model = read_model_config(directory, config.hf_overrides)
    ask_for_gpu_memory(config.gpu_memory_utilization)
    if config.num_threads is not None:
        set_threads(config.num_threads)
    ensure_cpu_devices(config.tensor_parallel_size * config.data_parallel_size)
    mesh = make_mesh(MeshShape(data=config.data_parallel_size, tensor=config.tensor_parallel_size))
    device = mesh.devices.flat[0]
    check_tensor_size(model, config.tensor_parallel_size)
    first, *others = data_slices(mesh)
    layout = get_layout(config.layout).on(first)
    page_size = config.block_size or 64
    scope = Scope(parallel=Parallel.on_mesh(layout, first))
    policy, kernel = choose_kernels(config, model, scope, first.devices.flat[0], page_size)
    is_invariant = computes_rows_natively(outline(model, scope).has_fused_norms, policy, kernel)
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
    )
    if config.tensor_parallel_size > 1 and program.parallel.size == 1:
        raise ConfigError(f"layout {config.layout!r} does not split over {config.tensor_parallel_size} devices")
    max_samples = 1 + max_draft_tokens
    needs = _memory_needs(program, max_model_len, max_num_batched_tokens, max_samples)
    needs, num_pages = _fit(config, needs, device, mesh.devices.size)
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
    )


def _make_buckets(
    config: EngineConfig, program: ModelProgram, needs: MemoryNeeds, max_num_batched_tokens: int, max_samples: int
) -> Buckets:
    """The batch shapes, for the pages that were planned."""
    multiple = program.row_tile or _fewest_rows(program.mesh.devices.flat[0], program.policy)
    skips = program.policy.linear == program.kernel.name == "native"
    sizes = program.num_slots, max_num_batched_tokens, needs.table_pages
    return Buckets.make(*sizes, multiple, config.compile_sizes, skips, max_samples, len(needs.windows))


def _fewest_rows(device: Device, policy: DtypePolicy) -> int:
    """Rows that every shape has a multiple of, so that no product has one row.

    XLA on CPUs makes a slow loop of such a product in a 16-bit type; on GPUs it converts whole stacks of weights for
    it, each time.
    """
    is_fast = policy.weights == "float32" or policy.linear == "native"
    return 1 if device.platform == "cpu" and is_fast else 2


def _log_determinism(config: EngineConfig, is_deterministic: bool, is_invariant: bool) -> None:
    if not is_deterministic:
        why = "asked for" if config.deterministic is not None else "XLA's sums depend on a step's shape"
        logger.info("Results may differ in their last bits with a request's batch (%s)", why)
        return
    how = "native kernels compute each row by itself" if is_invariant else f"rows are computed {ROW_TILE} at a time"
    logger.info("Results do not depend on a request's batch: %s", how)


def load_params(plan: EnginePlan, program: ModelProgram) -> tuple[jax.Array, ...]:
    """Reads a model's parameters onto the devices of a program, as its steps take them.

    Raises:
        CheckpointError: Files or tensors are missing, damaged, of other shapes, or not the model's.
    """
    params = load_weights(plan.directory, program.abstract_model)
    return program.packing.pack(params)


def _batch_limits(config: EngineConfig, device: Device) -> tuple[int, int]:
    """Sequences and tokens of a step, with defaults for the device."""
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
            f"max_num_batched_tokens={tokens} is smaller than max_num_seqs={seqs}; every sequence needs one"
        )
    return seqs, tokens


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest context asked for, checked against what the model can do."""
    longest = model.max_positions
    asked = config.max_model_len
    if asked is None or asked == -1:
        return longest
    if asked > longest:
        raise ConfigError(f"max_model_len={asked} is longer than the {longest} tokens the model has positions for")
    return asked


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
        temporaries=max_num_batched_tokens * token * itemsize + samples * model.vocab_size * 4 * 4,
        page_size=program.page_size,
        max_model_len=max_model_len,
        max_num_seqs=program.num_slots,
        slots=program.slot_state_bytes,
        windows=tuple(
            None if window is None else KVWindow(window, program.page_size, step_tokens)
            for window in program.kv_layout.windows
        ),
    )


def _fit(config: EngineConfig, needs: MemoryNeeds, device: Device, num_devices: int) -> tuple[MemoryNeeds, int]:
    """The needs with the longest context that fits, if that is asked for, and the number of pages."""
    total = device_memory_bytes(device)
    sharing = num_devices if device.platform == "cpu" else 1
    settings = {
        "total": total,
        "utilization": usable_share(device, config.gpu_memory_utilization),
        "platform": device.platform,
        "pool_bytes": config.kv_cache_memory_bytes,
        "num_pages": config.num_gpu_blocks_override,
        "devices_sharing": sharing,
    }
    if config.max_model_len == -1:
        one = dataclasses.replace(needs, max_model_len=1)
        pages = plan_pages(dataclasses.replace(one, max_num_seqs=needs.request_pages), **settings)
        longest = needs.longest_request(pages)
        if longest < needs.max_model_len:
            logger.info(
                "Auto-fit max_model_len: reduced from %d to %d to fit in available memory", needs.max_model_len, longest
            )
        needs = dataclasses.replace(needs, max_model_len=longest)
    return needs, plan_pages(needs, **settings)
