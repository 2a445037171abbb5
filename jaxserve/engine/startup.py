"""From settings to a ready engine, and what the start cost in time and memory."""

import concurrent.futures
import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

from checkpoints import resolve_model
from jaxserve.config import EngineConfig
from jaxserve.engine.admission import ModelLimits
from jaxserve.engine.build import EnginePlan, load_params, plan_engine
from jaxserve.engine.compilation_cache import use_compilation_cache
from jaxserve.engine.engine import Engine
from jaxserve.engine.memory import MemoryLedger, device_memory_bytes, resident_bytes
from jaxserve.engine.metrics import CompileCounter
from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.replica import Replica
from jaxserve.engine.runner import CompiledSteps, StepRunner
from jaxserve.engine.scheduler import Scheduler, SchedulerLimits
from jaxserve.engine.tokenizer import Tokenizer, load_tokenizer
from jaxserve.engine.tokenizer_files import read_json
from jaxserve.errors import ConfigError, RequestError
from jaxserve.models.loading import check_weights
from jaxserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclasses.dataclass(frozen=True)
class StartedEngine:
    """A ready engine.

    Attributes:
        engine: The engine.
        plan: What was fitted to the devices.
        default_params: What a request that brings no parameters gets.
        ledger: Where a device's memory went.
        load_s: Seconds spent reading weights.
        compile_s: Seconds spent tracing and compiling, partly beside the reading.
        total_s: Seconds from the settings to ready.
    """

    engine: Engine
    plan: EnginePlan
    default_params: SamplingParams
    ledger: MemoryLedger
    load_s: float
    compile_s: float
    total_s: float


def start_engine(config: EngineConfig) -> StartedEngine:
    """Plans, compiles, loads, and says where the memory went; after it nothing compiles.

    Raises:
        ConfigError: The settings, the model or the memory there is do not go together.
        CheckpointError: The checkpoint cannot be read.
    """
    start = time.monotonic()
    if config.trust_remote_code:
        logger.warning(
            "trust_remote_code=True: no remote code ever runs here; the model's own Python files are not read"
        )
    plan = plan_engine(config)
    default_params = default_sampling_params(config, plan.directory)
    tokenizer = find_tokenizer(config, plan.directory)
    check_weights(plan.directory, plan.config, plan.programs[0].parallel.size)
    use_compilation_cache(config.compilation_cache_dir)
    _log_choices(plan)
    resident_before = resident_bytes()
    runners, steps, load_s, compile_s = _make_runners(plan)
    program = plan.programs[0]
    limits = SchedulerLimits(plan.max_num_seqs, plan.max_num_batched_tokens)
    depth = 1 if config.async_scheduling is False else 2
    engine = Engine(
        [
            Replica(Scheduler(limits, PageAllocator(program.num_pages, program.page_size)), runner, depth)
            for runner in runners
        ],
        limits=ModelLimits(
            max_model_len=plan.max_model_len,
            vocab_size=plan.config.vocab_size,
            eos_token_ids=eos_token_ids(plan, tokenizer),
        ),
        tokenizer=tokenizer,
        seed=config.seed,
        counter=CompileCounter(),
    )
    ledger = _make_ledger(config, plan, steps, resident_before)
    total_s = time.monotonic() - start
    logger.info("Model loading took %.2f GiB memory and %.2f seconds", plan.needs.weights / (1 << 30), load_s)
    logger.info("init engine took %.2f s (compilation: %.2f s)", total_s, compile_s)
    return StartedEngine(engine, plan, default_params, ledger, load_s, compile_s, total_s)


def find_tokenizer(config: EngineConfig, directory: Path) -> Tokenizer | None:
    """The model's tokenizer, or the one asked for; None where the model's directory has none."""
    if config.tokenizer is not None:
        return load_tokenizer(
            resolve_model(config.tokenizer, config.tokenizer_revision, config.download_dir, config.hf_token)
        )
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    return load_tokenizer(directory)


def eos_token_ids(plan: EnginePlan, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Tokens that end a text, by config.json, generation_config.json and the tokenizer."""
    found: list[Any] = list(plan.config.eos_token_ids)
    declared = read_generation_config(plan.directory).get("eos_token_id")
    found += declared if isinstance(declared, list) else [declared]
    if tokenizer is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def default_sampling_params(config: EngineConfig, directory: Path) -> SamplingParams:
    """Sampling parameters of the model's generation_config.json, or of the one asked for.

    Raises:
        ConfigError: The file asked for does not exist, or its values are no sampling parameters.
    """
    if config.generation_config == "vllm":
        return SamplingParams()
    if config.generation_config != "auto":
        directory = Path(config.generation_config)
        if not (directory / "generation_config.json").exists():
            raise ConfigError(
                "generation_config: expected 'auto', 'vllm' or a directory with a generation_config.json, got "
                f"{config.generation_config!r}"
            )
    try:
        return SamplingParams.from_generation_config(read_generation_config(directory))
    except RequestError as error:
        raise ConfigError(f"{directory / 'generation_config.json'}: {error}") from error


def read_generation_config(directory: Path) -> dict:
    """The model's generation_config.json; empty where there is none."""
    path = directory / "generation_config.json"
    found = read_json(path)
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found or {}


def _make_runners(plan: EnginePlan) -> tuple[list[StepRunner], list[CompiledSteps], float, float]:
    """Compiles beside reading weights; returns the runners, their programs, and the seconds both took."""
    all_steps = [CompiledSteps(program, plan.buckets) for program in plan.programs]

    def compile_all() -> float:
        start = time.monotonic()
        for steps in all_steps:
            steps.compile()
        return time.monotonic() - start

    with concurrent.futures.ThreadPoolExecutor(1) as background:
        compiling = background.submit(compile_all)
        start = time.monotonic()
        params = [load_params(plan, program) for program in plan.programs]
        load_s = time.monotonic() - start
        compile_s = compiling.result()
    runners = [StepRunner(steps, values) for steps, values in zip(all_steps, params, strict=True)]
    return runners, all_steps, load_s, compile_s


def _log_choices(plan: EnginePlan) -> None:
    program = plan.programs[0]
    device = program.mesh.devices.flat[0]
    logger.info(
        "%s on %d %s device(s): %s; mesh data=%d tensor=%d, layout %s; attention: %s; pages of %d tokens; %d programs",
        plan.config.architecture,
        len(plan.programs) * program.mesh.devices.size,
        device.device_kind,
        program.policy,
        len(plan.programs),
        program.mesh.devices.size,
        program.layout.name,
        getattr(program.kernel, "__name__", "?").rsplit(".", 1)[-1],
        program.page_size,
        len(plan.buckets.shapes()),
    )


def _make_ledger(
    config: EngineConfig, plan: EnginePlan, all_steps: list[CompiledSteps], resident_before: int
) -> MemoryLedger:
    program = plan.programs[0]
    device = program.mesh.devices.flat[0]
    copies = len(plan.programs) * program.mesh.devices.size if device.platform == "cpu" else 1
    weights = plan.needs.weights * copies
    pages = program.pool_bytes * copies
    temporaries = max(steps.temporary_bytes for steps in all_steps)
    if device.platform == "cpu":
        programs = max(0, resident_bytes() - resident_before - weights - pages)
        lines = [("Python and libraries", resident_before), ("weights", weights), ("KV pages", pages)]
        lines += [("compiled programs", programs), ("temporaries of a step, at most", temporaries)]
        total = sum(size for _, size in lines)
    else:
        total = int(device_memory_bytes(device) * config.gpu_memory_utilization)
        lines = [("weights", weights), ("KV pages", pages), ("temporaries of a step, at most", temporaries)]
        lines.append(("reserve", total - sum(size for _, size in lines)))
    return MemoryLedger(
        lines=tuple(lines),
        total=total,
        num_pages=program.num_pages * len(plan.programs),
        page_size=program.page_size,
        max_model_len=plan.max_model_len,
        device="CPU" if device.platform == "cpu" else device.platform.upper(),
    )
