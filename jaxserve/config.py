"""Settings of an engine: vLLM's names and defaults, checked before anything is loaded."""

import dataclasses
import difflib
from types import MappingProxyType
from typing import Any

from jaxserve.config_checks import NEUTRAL, check_neutral, check_settings, parse_length
from jaxserve.errors import ConfigError

SERVING_DEFAULTS = MappingProxyType({"disable_log_stats": False})
"""Where engines that serve have other defaults than those of ``LLM``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine is built. ``None`` means: chosen for the model and the device, and logged at start-up.

    Attributes:
        model: Directory, hub id, or ``demo`` for the model that comes with the package.
        tokenizer: Directory or hub id of the tokenizer; None takes the model's.
        trust_remote_code: Accepted for compatibility; no remote code ever runs here.
        hf_token: Token for the hub.
        revision: Revision of the model on the hub.
        tokenizer_revision: Revision of the tokenizer on the hub.
        download_dir: Where downloads are kept.
        hf_overrides: Values that replace those of ``config.json``.
        generation_config: ``auto`` reads the model's generation_config.json for default sampling parameters, ``vllm``
            does not, anything else is a directory that has one. Its ``max_new_tokens`` is then the most that any
            request of a server gets; the model's own is only a default.
        override_generation_config: Default sampling parameters that win over the file's, under its names, such as
            ``{"temperature": 0.5}``; null takes a value out of it. Its ``max_new_tokens`` limits servers, too.
        chat_template: A Jinja template, or a file that holds one, in place of the model's own.
        dtype: ``auto`` takes the checkpoint's type.
        tensor_parallel_size: Devices each layer is split over.
        data_parallel_size: Copies of the model, each with pages and a scheduler of its own.
        layout: Name of the sharding layout.
        seed: Seed for requests that bring none.
        gpu_memory_utilization: Share of a device's memory to use, in (0, 1].
        kv_cache_memory_bytes: Memory of the KV pages on each device; None takes what is left (on CPUs at most 1 GiB).
        num_gpu_blocks_override: Number of KV pages, whatever the memory says.
        block_size: Tokens a page.
        max_model_len: Longest context in tokens; None is the model's own, -1 or ``auto`` the longest that fits.
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most query tokens in a step.
        compile_sizes: Batch shapes to compile, in place of the default ladder: ``{"decode": [2, 64], "mixed": [8192]}``
            lists rows of decode steps and query tokens of mixed steps (prefill and decode). The largest mixed size must
            be ``max_num_batched_tokens``; decode steps with more rows than listed run as mixed steps; a key left out
            keeps its ladder. Fewer shapes start faster and pad more.
        long_prefill_token_threshold: Most tokens of one prompt in a step, so that others get on; 0: any number.
        scheduling_policy: ``fcfs`` runs requests in the order they come, ``priority`` the lowest ``priority`` first.
        enable_prefix_caching: Keep the pages of texts that have ended, for later requests that begin the same.
        deterministic: A greedy or seeded request gives the same bits alone or in any batch. None: where native kernels
            run all of a model, since it costs nothing there; elsewhere True makes steps up to three times as long.
        async_scheduling: Launch a step before the tokens of the step before are known.
        max_logprobs: Most alternatives a request may ask logprobs of at each position; -1 for the whole vocabulary.
        logprobs_mode: What logprobs report: ``raw_logprobs`` before masks, penalties and temperature,
            ``processed_logprobs`` behind them, ``raw_logits`` and ``processed_logits`` the scores themselves.
        logits_processors: Functions that change scores in the step (``LogitsProcessor``), or their ``module:name``.
        reasoning_parser: How the model marks its reasoning, for ``parse_message`` and ``thinking_token_budget``;
            structured outputs then begin behind it.
        tool_call_parser: How the model writes tool calls, for ``parse_message``.
        attention_backend: Name of the kernels that run attention: triton, mosaic, jax-triton, native, xla,
            pallas-interpret or mosaic-interpret; None takes the first that can run on the device.
        kernels: Take ``native`` kernels (of the CPU) or ``xla`` for all operations that have both, and fail where these
            cannot run; None takes the best for each. ``attention_backend`` wins for attention.
        num_threads: Threads of the native CPU kernels, for the whole process; None takes the CPUs that the process may
            run on, or fewer where its cgroup has a quota.
        disable_log_stats: Leave out the periodic log line and per-request metrics.
        compilation_cache_dir: Where compiled programs are kept for the next start; empty for nowhere.
        warm_up: Run every program once before the engine is ready: what XLA makes only when a program first runs, such
            as kernels of its library of dots, then costs no request any time. The start takes as much longer: 0.01 to
            0.15 s with native kernels, under a second with XLA's on two cores.
    """

    model: str
    tokenizer: str | None = None
    trust_remote_code: bool = False
    hf_token: str | None = dataclasses.field(default=None, repr=False)
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    hf_overrides: dict[str, Any] | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    chat_template: str | None = None
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    layout: str = "tensor_parallel"
    seed: int = 0
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    compile_sizes: dict[str, list[int]] | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    deterministic: bool | None = None
    async_scheduling: bool | None = None
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    logits_processors: list[Any] | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    attention_backend: str | None = None
    kernels: str | None = None
    num_threads: int | None = None
    disable_log_stats: bool = True
    compilation_cache_dir: str | None = None
    warm_up: bool = True

    @classmethod
    def from_arguments(cls, model: str, **arguments: Any) -> "EngineConfig":
        """Return the settings, from the arguments of ``LLM``.

        Raises:
            ConfigError: An unknown argument (the nearest known one is suggested), one that nothing here does yet, or a
                value out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        kept = {}
        for name, value in arguments.items():
            if name in known:
                kept[name] = value
            elif name in NEUTRAL:
                check_neutral(name, value)
            else:
                near = difflib.get_close_matches(name, [*known, *NEUTRAL], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"LLM has no argument {name!r}{hint}")
        if kept.get("max_model_len") is not None:
            kept["max_model_len"] = parse_length("max_model_len", kept["max_model_len"])
        return cls(model=model, **kept)

    def __post_init__(self):
        fields = dataclasses.fields(self)
        optional = frozenset(field.name for field in fields if field.default is None)
        for name, value in check_settings(
            {field.name: getattr(self, field.name) for field in fields}, optional
        ).items():
            object.__setattr__(self, name, value)
