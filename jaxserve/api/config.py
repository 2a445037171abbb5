"""Settings of an engine: vLLM's names and defaults, checked before anything is loaded."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.api.config_checks import check_settings, parse_length, parse_mesh
from jaxserve.api.speculation import DEVICE_METHODS, takes_in_blocks
from jaxserve.api.vllm_arguments import SERVER_ONLY, log_ignored
from jaxserve.api.vllm_engine_arguments import NO_EFFECT, REFUSED

SERVING_DEFAULTS = MappingProxyType({"disable_log_stats": False, "max_logprobs_per_request": 1 << 20})
"""Settings whose defaults for serving engines differ from those of ``LLM``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. ``None`` means: chosen for the model and the device, and logged at start-up.

    Attributes:
        model: Directory, ``.gguf`` file, hub id, or ``demo`` for the model included in the package.
        runner: ``generate`` or ``pooling``: embeddings alone, without the weights of the output head, and requests for
            completions are refused. ``auto`` does both, or ``pooling`` for a checkpoint without a head.
        convert: ``embed`` means ``runner="pooling"``, the only one of vLLM's conversions here; ``auto`` and ``none``
            change nothing.
        tokenizer: Directory, ``.gguf`` file or hub id of the tokenizer; None uses the model's.
        tokenizer_mode: ``auto`` reads tokenizer.json, or tokenizer.model with the sentencepiece library; ``hf`` always
            uses transformers, ``slow`` sentencepiece if there is a tokenizer.model, else transformers. All add the BOS
            and EOS that ``add_bos_token`` and ``add_eos_token`` of tokenizer_config.json ask for, which transformers 5
            does not beside a tokenizer.json.
        trust_remote_code: Accepted for compatibility; remote code is never run.
        hf_token: Access token for the hub.
        revision: Revision of the model on the hub.
        model_digest: What the model's files must be: ``sha256:`` and 64 hexadecimal digits. If they have another
            digest, as ``checkpoints.digest`` computes it, the start ends with it.
        tokenizer_revision: Revision of the tokenizer on the hub.
        download_dir: Directory for downloads.
        load_format: ``safetensors`` or ``pt`` (pytorch_model.bin) reads only such files, ``auto`` also Orbax: the first
            that has the model's tensors. ``dummy`` fills the weights with small random numbers and needs no files.
        quantization: Method that the checkpoint's weights must be quantized with, such as ``awq``, ``gptq`` or ``fp8``;
            None: what the checkpoint says. Of a float checkpoint: how its weights are quantized while they are loaded,
            ``int8_w8a8`` (or ``int8``), ``int8_per_channel_weight_only``, ``int4_group``, ``fp8_per_tensor`` (or
            ``fp8``), ``fp8_per_channel`` or ``fp8_per_block``.
        quantization_config: How quantized weights are computed with, such as ``{"activations": "int8"}``. ``weights``:
            "stored" keeps them in memory as they are in the file, "decoded" as floats of ``dtype``; "auto" (the
            default) keeps them where native CPU kernels multiply by them. ``activations``: "int8" rounds the rows that
            they multiply to 8 bits, in groups of the weight's; null (the default) only where the file's format does.
            Of a float checkpoint, ``linear``, ``moe`` and ``head`` quantize the matrices of layers, those of experts
            and the output head while they are loaded: by a method that ``quantization`` takes, or not (null). Without
            a key, layers and experts follow ``quantization`` and the head stays. ``targets`` has methods of modules
            by name, such as ``{"re:.*down_proj": "int8"}``, and ``ignore`` lists modules that stay floats.
        hf_overrides: Values that replace those of ``config.json``.
        generation_config: Source of default sampling parameters: ``auto`` reads the model's generation_config.json,
            ``vllm`` uses none, anything else is a directory with that file. ``max_new_tokens`` in such a directory also
            limits every request of a server; the model's own is only a default.
        override_generation_config: Default sampling parameters that replace the file's, such as
            ``{"temperature": 0.5}``; null removes a value. ``max_new_tokens`` also limits every request of a server.
        chat_template: A Jinja template, or a file with one, that replaces the model's own.
        dtype: Element type of the weights; ``auto`` uses the checkpoint's.
        tensor_parallel_size: Number of devices that each layer is split over.
        data_parallel_size: Number of replicas of the model, each with its own KV pages and scheduler.
        pipeline_parallel_size: Number of stages: consecutive layers that run on devices of their own, with hidden
            states handed from each to the next. A step in one stage overlaps with other steps in the others.
        stage_layers: Number of layers of each stage, such as ``[10, 11, 11]``; None divides them so that the largest
            stage is as small as possible in bytes of weights and in multiplications.
        enable_expert_parallel: Split the experts over the devices of ``tensor_parallel_size``, not the features of each
            expert.
        expert_parallel_size: Number of devices that share the experts of a model, in addition to those of
            ``tensor_parallel_size``, which split the features of each expert. By default they also share the requests:
            each has its own KV pages and up to ``max_num_seqs`` sequences per step, and all run each step together.
        mesh: Devices along each axis of the mesh, such as ``data=2,stage=2,tensor=2``, instead of
            ``data_parallel_size``, ``pipeline_parallel_size``, ``tensor_parallel_size`` and ``expert_parallel_size``;
            axes that are not named have one device.
        layout: Name of the sharding layout, ``path.py:NAME`` for one that a local Python file defines (the file is
            run), or a ``sharding.ShardingLayout``. ``tensor_parallel`` means ``expert_parallel`` with
            ``enable_expert_parallel``. With ``expert_parallel_size`` it means ``expert_gather``, or
            ``expert_all_to_all`` if ``deterministic`` is True; ``expert_all_reduce`` gives all devices all requests.
        seed: Seed of requests without one.
        gpu_memory_utilization: Fraction of a device's memory to use, in (0, 1].
        kv_cache_memory_bytes: Bytes of KV pages per device; None uses the remaining memory (on CPUs at most 1 GiB).
        num_gpu_blocks_override: Number of KV pages, regardless of memory.
        block_size: Tokens per page, on all devices that share them; None is 64, or the least larger number of which
            each of these devices can have a multiple of 8.
        max_model_len: Longest context in tokens; None is the model's own, -1 or ``auto`` the longest that fits.
        max_num_seqs: Largest number of sequences per step.
        max_num_batched_tokens: Largest number of query tokens per step.
        compile_sizes: Batch shapes to compile instead of the default ones: ``{"decode": [2, 64], "mixed": [8192]}``
            lists rows of decode steps and query tokens of mixed steps (prefill and decode). The largest mixed size must
            be ``max_num_batched_tokens``; decode steps with more rows than listed run as mixed steps; a missing key
            keeps the default. Fewer shapes start faster and pad more.
        enable_chunked_prefill: False computes each prompt in one step, which needs ``max_num_batched_tokens`` of at
            least ``max_model_len`` (its default then); None and True split prompts over steps.
        long_prefill_token_threshold: Largest number of tokens of one prompt per step, so that others make progress; 0:
            no limit.
        scheduling_policy: ``fcfs`` runs requests in order of arrival, ``priority`` the lowest ``priority`` first.
        enable_prefix_caching: Keep the pages of finished requests for later requests with the same prefix.
        prefix_cache_state_bytes: Bytes per device for states of recurrent layers that the prefix cache keeps, besides
            those of running sequences: without a state, cached pages of such a model are of no use. None is a quarter
            of the memory left for pages (on CPUs at most 1 GiB); 0 keeps none, and every prompt is computed whole.
        deterministic: Make the bits of a greedy or seeded request's results independent of the batch. None: on if
            native kernels run the whole model, where it is free; elsewhere True makes steps up to three times as slow.
        speculative_config: Speculative decoding, such as ``{"method": "ngram", "num_speculative_tokens": 4}``: each
            step verifies at most that many draft tokens per sequence (1 to 64). ``ngram`` proposes the tokens that
            followed the latest ``prompt_lookup_max`` tokens (or fewer, down to ``prompt_lookup_min``; both 5 by
            default) where these first occurred in the prompt or the output. ``suffix`` also searches the outputs of
            finished requests with the same cache salt, unless prefix caching is off: the latest
            ``suffix_decoding_max_cached_requests`` (10,000; 0: none), of at most 2 million tokens (64 MiB) in all. A
            longer match proposes more: at most ``suffix_decoding_max_spec_factor`` (1.0) times its length, and both
            together at most ``suffix_decoding_max_tree_depth`` tokens (24; also the default of
            ``num_speculative_tokens``); a draft ends where the share of past texts that go on so falls below
            ``suffix_decoding_min_token_prob`` (0.1). ``draft_model`` samples from a smaller ``model`` with the same
            vocabulary (a directory or hub id, and its ``revision``), of the same ``dtype`` by default, on the same
            devices; ``draft_sample_method`` says whether as each request asks for (``probabilistic``, the default) or
            its most likely tokens (``greedy``); with ``parallel_drafting: true`` it guesses all in one pass, for which
            it must have been trained (PARD). ``eagle`` and ``eagle3`` draft with an EAGLE or EAGLE-3 head
            (``model``), ``mtp`` with the model's own layer for multi-token prediction, all with
            ``draft_sample_method``; ``parallel_drafting`` is also for EAGLE-3 heads that were trained for it (P-EAGLE).
            ``dflash`` drafts with a DFlash head (``model``), a whole block in one pass. Of these five, requests with
            structured outputs take what their grammar forces alone. With ``deterministic``, completions are bit for bit
            those without drafts; otherwise drafts affect them no more than other requests in a batch do. With every
            method, tokens that a grammar or a thinking budget forces are drafts too; with ``grammar``, only these are.
            Each step verifies fewer drafts, or none, where that is faster by measured times and acceptance;
            ``enable_adaptive_verification: false`` always verifies all.
        spec_method: Short for the key ``method`` of ``speculative_config``.
        spec_model: Short for its key ``model``.
        spec_tokens: Short for its key ``num_speculative_tokens``.
        async_scheduling: Launch a step before the tokens of the previous step are known.
        max_logprobs: Largest number of logprobs per position that a request may ask for; -1 for the whole vocabulary.
        max_logprobs_per_request: Largest number of logprobs of a prompt and its completions together: one more than
            ``logprobs`` for each token of each of ``n`` completions, and one more than ``prompt_logprobs`` for each of
            the prompt. A request without ``max_tokens`` gets fewer tokens, others are refused. -1: no limit. A server
            and ``AsyncLLM`` have 1048576: a million take 40 MB and half a minute of JSON.
        logprobs_mode: Values of logprobs: ``raw_logprobs`` before masks, penalties and temperature,
            ``processed_logprobs`` after them, ``raw_logits`` and ``processed_logits`` the logits themselves.
        logits_processors: Functions that change logits in the step (``LogitsProcessor``), or their ``module:name``.
        reasoning_parser: Format of the model's reasoning, for ``parse_message`` and ``thinking_token_budget``.
            Structured outputs start after the reasoning. ``auto``: that of the model's class if the chat template has
            its tags, otherwise none. Or one of apertus, cohere_command3, cohere_command4, deepseek_r1, deepseek_v3,
            ernie45, gemma4, glm45, glm47, granite, hunyuan_a13b, hy_v3, kimi_k2, minimax_m2, mistral, olmo3,
            openai_gptoss, poolside_v1, qwen3, seed_oss and think.
        tool_call_parser: Format of the model's tool calls, for ``parse_message``. ``auto``: that of the model's class,
            listed by ``jaxserve models``; of several, the one whose markers the chat template has. Or one of apertus,
            cohere_command3, cohere_command4, deepseek_v3, deepseek_v31, deepseek_v32, ernie45, gemma4, glm45, glm47,
            granite, granite4, hermes, hunyuan_a13b, hy_v3, kimi_k2, llama3_json, llama4_json, llama4_pythonic,
            minimax_m2, mistral, olmo3, openai, phi4_mini_json, poolside_v1, pythonic, qwen3, qwen3_coder, qwen3_xml and
            seed_oss.
        attention_backend: Attention kernels: triton, mosaic, jax-triton, native, xla, pallas-interpret or
            mosaic-interpret; None uses the first that the device supports.
        kernels: ``native`` (CPU) or ``xla`` forces these kernels for all operations that have both, and fails if they
            cannot run; None uses the best for each. ``attention_backend`` takes precedence for attention.
        num_threads: Threads of the native CPU kernels, for the whole process; None uses the CPUs available to the
            process, or fewer if its cgroup has a quota.
        expert_load_metrics: Count the tokens routed to each expert, for the metric ``jaxserve:expert_tokens`` and
            ``LLM.expert_load``. The number is that of groups of consecutive layers that the metric distinguishes, so 1
            gives a time series per expert. 0: no counting.
        per_request_spec_decode_metrics: Report the drafts of each completion, once it is finished, as
            ``CompletionOutput.spec_decode_metrics`` and in the server's responses (``metrics.speculative_decoding``):
            ``summary`` counts them by the number of accepted tokens, ``detailed`` also lists them; ``none``: no report.
        disable_log_stats: Disable the periodic log line and per-request metrics.
        compilation_cache_dir: Directory that keeps compiled programs for the next start; empty disables it.
        compilation_cache_max_bytes: Largest size of that directory for each kind of device; the programs go first that
            were not used for longest. 0: no limit.
        warm_up: Run every program once before the engine is ready, so that no request waits for work that XLA delays
            until a program first runs, such as compiling matmul kernels. Adds 0.01 to 0.15 s to the start with native
            kernels, and less than 1 s with XLA's on two cores.
    """

    model: str
    runner: str = "auto"
    convert: str = "auto"
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    trust_remote_code: bool = False
    hf_token: str | None = dataclasses.field(default=None, repr=False)
    revision: str | None = None
    model_digest: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    quantization: str | None = None
    quantization_config: dict[str, Any] | None = None
    hf_overrides: dict[str, Any] | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    chat_template: str | None = None
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    stage_layers: list[int] | None = None
    enable_expert_parallel: bool = False
    expert_parallel_size: int = 1
    mesh: str | None = None
    layout: Any = "tensor_parallel"
    seed: int = 0
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    compile_sizes: dict[str, list[int]] | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    prefix_cache_state_bytes: int | None = None
    deterministic: bool | None = None
    speculative_config: dict[str, Any] | None = None
    spec_method: str | None = None
    spec_model: str | None = None
    spec_tokens: int | None = None
    async_scheduling: bool | None = None
    max_logprobs: int = 20
    max_logprobs_per_request: int = -1
    logprobs_mode: str = "raw_logprobs"
    logits_processors: list[Any] | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    attention_backend: str | None = None
    kernels: str | None = None
    num_threads: int | None = None
    expert_load_metrics: int = 0
    per_request_spec_decode_metrics: str = "none"
    disable_log_stats: bool = True
    compilation_cache_dir: str | None = None
    compilation_cache_max_bytes: int = 8 << 30
    warm_up: bool = True

    @classmethod
    def from_arguments(cls, model: str, **arguments: Any) -> "EngineConfig":
        """Return the settings, from the arguments of ``LLM``.

        The log says which of vLLM's arguments have no effect.

        Raises:
            ConfigError: An unknown argument (the nearest known one is suggested), one that is not implemented, or a
                value out of range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        kept = {name: value for name, value in arguments.items() if name in known}
        ignored = {name: value for name, value in arguments.items() if name not in known}
        log_ignored(ignored, {**NO_EFFECT, **SERVER_ONLY}, REFUSED, known)
        if kept.get("max_model_len") is not None:
            kept["max_model_len"] = parse_length("max_model_len", kept["max_model_len"])
        if kept.get("mesh") is not None:
            parse_mesh(kept["mesh"], kept)
        return cls(model=model, **kept)

    @property
    def num_speculative_tokens(self) -> int:
        """Most draft tokens per sequence and step; 0 without speculative decoding."""
        return 0 if self.speculative_config is None else self.speculative_config["num_speculative_tokens"]

    @property
    def num_device_drafts(self) -> int:
        """Drafts that a model on the device makes per sequence and step; 0 without one."""
        is_on_device = self.speculative_config is not None and self.speculative_config["method"] in DEVICE_METHODS
        return self.num_speculative_tokens if is_on_device else 0

    @property
    def num_lookahead(self) -> int:
        """Tokens after a row that a model on the device takes in; 0 without one."""
        drafts = self.num_device_drafts
        return drafts + (
            drafts > 0 and self.speculative_config is not None and takes_in_blocks(self.speculative_config)
        )

    @property
    def adapts_drafts(self) -> bool:
        """Whether steps verify fewer draft tokens where that is faster."""
        config = self.speculative_config
        return config is not None and config.get("enable_adaptive_verification", True)

    @property
    def is_pooling(self) -> bool:
        """Whether the engine is for embeddings alone."""
        return self.runner == "pooling" or self.convert == "embed"

    def __post_init__(self):
        types = {field.name: field.type for field in dataclasses.fields(self)}
        for name, value in check_settings({name: getattr(self, name) for name in types}, types).items():
            object.__setattr__(self, name, value)


def known_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``LLM`` that are settings, without those of vLLM that have no effect."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    return {name: value for name, value in arguments.items() if name in names}
