"""Start an engine from its settings, and report the time and memory it takes."""

import dataclasses
import logging
import time
from collections.abc import Iterable
from typing import Any

from jaxserve.api.config import EngineConfig
from jaxserve.api.draft_metrics import DraftReport
from jaxserve.api.errors import RequestError
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.device.build import EnginePlan, plan_engine
from jaxserve.device.drafter_choice import check_drafter
from jaxserve.device.memory import STEPS_IN_FLIGHT, MemoryLedger, device_memory_bytes, resident_bytes, usable_fraction
from jaxserve.device.program_cache import check_entries, use_compilation_cache
from jaxserve.device.runner_interface import Runner
from jaxserve.device.stage import num_programs
from jaxserve.device.start import make_runners, warm_up_runners
from jaxserve.engine.admission import Admission
from jaxserve.engine.engine import Engine
from jaxserve.engine.expert_load import ExpertLoad
from jaxserve.engine.metrics import CompileCounter
from jaxserve.engine.model_defaults import (
    check_vocabulary,
    chosen_parsers,
    default_sampling_params,
    eos_token_ids,
    find_tokenizer,
    reasoning_markers,
    writable_markers,
)
from jaxserve.engine.model_limits import ModelLimits
from jaxserve.engine.replica import Replica
from jaxserve.group.group_runner import lead
from jaxserve.group.leader import Leader
from jaxserve.layers.rope import has_length_regimes
from jaxserve.models.loading import check_weights
from jaxserve.parsers import AUTO, ParserNames
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import SchedulerLimits
from jaxserve.scheduling.proposers.registry import make_proposer
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.structured_output.grammars import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PROCESS_LINE = "Python and libraries"
"""Line of the memory ledger for what the process used before."""


@dataclasses.dataclass(frozen=True)
class StartedEngine:
    """A ready engine.

    Attributes:
        engine: The engine.
        plan: The plan that it was started from.
        parsers: The parsers of reasoning and tool calls.
        default_params: Sampling parameters of requests without any.
        ledger: Memory use of a device.
        load_s: Seconds spent loading weights.
        compile_s: Seconds spent tracing and compiling, in parallel with loading.
        total_s: Seconds until the engine was ready.
        leader: The other processes, if the engine runs in several.
    """

    engine: Engine
    plan: EnginePlan
    parsers: ParserNames
    default_params: SamplingParams
    ledger: MemoryLedger
    load_s: float
    compile_s: float
    total_s: float
    leader: Leader | None = None

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers."""
        return self.plan.models[0].num_states > 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: The model has none.
        """
        if self.engine.tokenizer is None:
            raise RequestError("the model has no tokenizer")
        return self.engine.tokenizer

    @property
    def public_tokenizer(self) -> Any:
        """The transformers tokenizer, or jaxserve's own if transformers would misread the files."""
        return self.tokenizer if self.tokenizer.hf is None else self.tokenizer.hf


def start_engine(config: EngineConfig, leader: Leader | None = None) -> StartedEngine:
    """Plan, compile and load an engine. Once it returns, no step compiles.

    Args:
        config: Settings of the engine.
        leader: The followers that have joined, if the engine runs in several processes; None: in this one.

    Raises:
        ConfigError: A setting is not valid for the model, the devices or the available memory.
        CheckpointError: The checkpoint cannot be read.
    """
    start = time.monotonic()
    if config.trust_remote_code:
        logger.warning("trust_remote_code=True has no effect: jaxserve never runs Python files that come with a model")
    plan = plan_engine(config) if leader is None else leader.agree(config)
    default_params = default_sampling_params(config, plan.directory)
    tokenizer = find_tokenizer(config, plan.directory)
    check_vocabulary(tokenizer, plan.config.vocab_size)
    parsers = chosen_parsers(config, plan.config.architecture, tokenizer)
    check_weights(plan.directory, plan.models[0].whole_model(), plan.load_format)
    drafter = plan.models[-1].drafter
    if drafter is not None:
        check_drafter(drafter, plan.models[0].whole_model(), plan.load_format)
    device = plan.models[0].mesh.devices.flat[0]
    programs = use_compilation_cache(config.compilation_cache_dir, device, config.compilation_cache_max_bytes)
    log_choices(plan)
    if AUTO in (config.tool_call_parser, config.reasoning_parser):
        logger.info("tool_call_parser: %s, reasoning_parser: %s", parsers.tools, parsers.reasoning)
    resident_before = resident_bytes()
    links = None if leader is None else leader.link(plan)
    made, temporary_bytes, load_s, compile_s = make_runners(plan, links)
    runners = made if leader is None else lead(leader, made, plan)
    warm_up_s = warm_up_runners(runners) if config.warm_up else 0.0
    if programs is not None:
        check_entries(programs)
    engine = assemble_engine(config, plan, tokenizer, parsers.reasoning, runners)
    ledger = make_ledger(config, plan, temporary_bytes, resident_before)
    total_s = time.monotonic() - start
    logger.info("Model loading took %.2f GiB memory and %.2f seconds", plan.needs.weights / (1 << 30), load_s)
    logger.info("init engine took %.2f s (compilation: %.2f s, warm-up: %.2f s)", total_s, compile_s, warm_up_s)
    return StartedEngine(engine, plan, parsers, default_params, ledger, load_s, compile_s, total_s, leader)


def assemble_engine(
    config: EngineConfig,
    plan: EnginePlan,
    tokenizer: Tokenizer | None,
    reasoning: str | None,
    runners: Iterable[Runner],
) -> Engine:
    """Return an engine with one replica per runner, each with a scheduler per lane; ``reasoning`` is the name of the
    reasoning parser."""
    groups = config.expert_load_metrics
    return Engine(
        make_replicas(config, plan, runners),
        make_admission(config, plan, tokenizer, reasoning),
        seed=config.seed,
        counter=CompileCounter(ignores_other_threads=True),
        expert_load=ExpertLoad(plan.expert_layers, plan.num_experts, groups) if groups else None,
    )


def make_replicas(config: EngineConfig, plan: EnginePlan, runners: Iterable[Runner]) -> list[Replica]:
    """Return one replica per runner, each with a scheduler per lane."""
    sharded = plan.models[0]
    sizes = (plan.max_num_seqs, plan.max_num_batched_tokens, config.long_prefill_token_threshold)
    drafts, admits_whole = config.num_speculative_tokens, config.enable_chunked_prefill is False
    most_samples, shares_parts = plan.buckets.max_step_samples, plan.models[-1].abstract_states() is None
    more = plan.needs.windows, plan.num_stages, admits_whole, most_samples, config.adapts_drafts
    states = sharded.num_states, 0 < plan.needs.state <= plan.needs.page
    limits = SchedulerLimits(*sizes, drafts, *more, config.num_lookahead, shares_parts, *states)
    is_ahead = config.async_scheduling is not False and not (drafts and sharded.num_states)  # see draft_states
    depth = (STEPS_IN_FLIGHT if is_ahead else 1) + plan.num_stages - 1
    replicas, speculation = list[Replica](), config.speculative_config
    pages, keeps = (sharded.num_pages, sharded.page_size), config.enable_prefix_caching
    for runner in runners:
        allocators = [PageAllocator(*pages, keeps_free_pages=keeps) for _ in range(sharded.num_lanes)]
        replicas.append(
            Replica([Scheduler(limits, each, make_proposer(speculation)) for each in allocators], runner, depth)
        )
    return replicas


def make_admission(
    config: EngineConfig, plan: EnginePlan, tokenizer: Tokenizer | None, reasoning: str | None
) -> Admission:
    """Return the admission for a planned engine, whose model reasons in the format named ``reasoning``."""
    model = plan.config
    eos_ids = eos_token_ids(config, plan, tokenizer)
    key = f"{plan.directory.resolve()} {config.revision} {plan.models[0].policy}"
    limits = ModelLimits(
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=eos_ids,
        max_logprobs=config.max_logprobs,
        max_logprobs_per_request=config.max_logprobs_per_request,
        has_priorities=config.scheduling_policy == "priority",
        shares_prefixes=config.enable_prefix_caching,
        arguments=plan.models[0].arguments,
        reasoning=writable_markers(reasoning_markers(reasoning, tokenizer), model.vocab_size),
        rope=model.rope if has_length_regimes(model.rope) else None,
        model_key=key.encode(),
        draft_report=DraftReport.at_level(config.per_request_spec_decode_metrics, config.num_speculative_tokens),
        generates=model.has_head,
    )
    grammars = None if tokenizer is None else GrammarCompiler(tokenizer, model.vocab_size, eos_ids)
    return Admission(limits, tokenizer, grammars)


def log_choices(plan: EnginePlan) -> None:
    """Log the devices, layout and kernels of a plan."""
    sharded = plan.models[0]
    device = sharded.mesh.devices.flat[0]
    logger.info(
        "%s on %d %s device(s): %s; mesh %s, layout %s; attention: %s; pages of %d tokens; %d programs",
        plan.config.architecture,
        plan.num_devices,
        device.device_kind,
        sharded.policy,
        " ".join(f"{axis}={size}" for axis, size in plan.mesh_sizes.items()),
        sharded.layout.name,
        sharded.kernel.name,
        sharded.page_size,
        num_programs(plan.buckets, device.platform, sharded.is_always_full, plan.num_stages, plan.models[-1]),
    )
    if plan.num_stages > 1:
        layers = (f"{sharded.stage.first} to {sharded.stage.stop - 1}" for sharded in plan.replicas[0] if sharded.stage)
        logger.info("Layers of each stage: %s", ", ".join(layers))


def make_ledger(config: EngineConfig, plan: EnginePlan, temporary_bytes: int, resident_before: int) -> MemoryLedger:
    """Return the memory use of all virtual CPU devices together, or of the GPU whose stage has the most weights."""
    sharded = max(plan.replicas[0], key=lambda sharded: sharded.weight_bytes)
    device = sharded.mesh.devices.flat[0]
    counted = plan.models if device.platform == "cpu" else [sharded]
    copies = sharded.mesh.devices.size if device.platform == "cpu" else 1
    weights = copies * sum(sharded.weight_bytes for sharded in counted)
    states = copies * sum(sharded.num_states * sharded.state_bytes for sharded in counted)
    pages = copies * sum(sharded.pool_bytes for sharded in counted) - states
    slots = copies * sum(sharded.slot_state_bytes for sharded in counted)
    temporaries = "peak temporaries of a step", temporary_bytes
    recurrent = [("recurrent states", states)] if states else []
    if device.platform == "cpu":
        programs = max(0, resident_bytes() - resident_before - weights - pages - states - slots)
        lines = [(PROCESS_LINE, resident_before), ("weights", weights), ("KV pages", pages)]
        lines += recurrent
        lines.append(("per-request state", slots))
        lines += [("compiled programs", programs), temporaries]
        total = sum(size for _, size in lines)
    else:
        total = int(device_memory_bytes(device) * usable_fraction(device, config.gpu_memory_utilization))
        lines = [("weights", weights), ("KV pages", pages), *recurrent, ("per-request state", slots), temporaries]
        lines.append(("reserve", total - sum(size for _, size in lines)))
    return MemoryLedger(
        lines=tuple(lines),
        total=total,
        num_pages=sharded.num_pages * plan.num_lanes,
        page_size=sharded.page_size,
        max_model_len=plan.max_model_len,
        request_pages=plan.needs.request_pages,
        num_tables=len(plan.needs.windows),
        device="CPU" if device.platform == "cpu" else device.platform.upper(),
    )
