"""Settings of an engine: vLLM's names and defaults, checked before anything is loaded."""

import dataclasses
import difflib
import math
import re
from types import MappingProxyType
from typing import Any

from jaxserve.errors import ConfigError

DTYPES = MappingProxyType(
    {
        "auto": "auto",
        "float32": "float32",
        "float": "float32",
        "bfloat16": "bfloat16",
        "float16": "float16",
        "half": "float16",
    }
)

# Arguments of vLLM's that nothing here does yet: each takes the value that asks for nothing.
_NEUTRAL: MappingProxyType[str, tuple[Any, ...]] = MappingProxyType(
    {
        "runner": ("auto", "generate"),
        "convert": ("auto", "none"),
        "tokenizer_mode": ("auto",),
        "skip_tokenizer_init": (False,),
        "quantization": (None,),
        "cpu_offload_gb": (0,),
        "swap_space": (0,),
        "enforce_eager": (False,),
        "disable_custom_all_reduce": (False,),
        "pooler_config": (None,),
        "structured_outputs_config": (None,),
        "profiler_config": (None,),
        "attention_config": (None,),
        "compilation_config": (None,),
        "quantization_config": (None,),
        "logits_processors": (None, []),
        "spec_method": (None,),
        "spec_model": (None,),
        "spec_tokens": (None,),
        "speculative_config": (None,),
        "pipeline_parallel_size": (1,),
        "enable_expert_parallel": (False,),
        "distributed_executor_backend": (None, "uni"),
        "enable_prefix_caching": (False,),
        "enable_chunked_prefill": (None, True),
        "long_prefill_token_threshold": (0,),
        "scheduling_policy": ("fcfs",),
        "kv_cache_dtype": ("auto",),
        "calculate_kv_scales": (False,),
        "enable_lora": (False,),
        "enable_sleep_mode": (False,),
        "kv_transfer_config": (None,),
        "load_format": ("auto",),
        "max_logprobs": (20,),
        "logprobs_mode": ("raw_logprobs",),
        "watermark": (0.0,),
    }
)


_WHOLE_FIELDS = MappingProxyType(
    {
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "num_gpu_blocks_override": 1,
        "kv_cache_memory_bytes": 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "seed": 0,
    }
)
_TEXT_FIELDS = (
    "tokenizer hf_token revision tokenizer_revision download_dir generation_config chat_template layout "
    "attention_backend compilation_cache_dir"
).split()
_TYPED_FIELDS: MappingProxyType[str, type] = MappingProxyType(
    {
        "trust_remote_code": bool,
        "disable_log_stats": bool,
        "async_scheduling": bool,
        "hf_overrides": dict,
        **dict.fromkeys(_TEXT_FIELDS, str),
    }
)


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
            does not, anything else is a directory that has one.
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
        async_scheduling: Launch a step before the tokens of the step before are known.
        attention_backend: Name of the paged-attention implementation.
        disable_log_stats: Leave out the periodic log line and per-request metrics.
        compilation_cache_dir: Where compiled programs are kept for the next start; empty for nowhere.
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
    async_scheduling: bool | None = None
    attention_backend: str | None = None
    disable_log_stats: bool = True
    compilation_cache_dir: str | None = None

    @classmethod
    def from_arguments(cls, model: str, **arguments: Any) -> "EngineConfig":
        """The settings, from the arguments of ``LLM``.

        Raises:
            ConfigError: An unknown argument (the nearest known one is suggested), one that nothing here does yet, or a
                value out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        kept = {}
        for name, value in arguments.items():
            if name in known:
                kept[name] = value
            elif name in _NEUTRAL:
                _check_neutral(name, value)
            else:
                near = difflib.get_close_matches(name, [*known, *_NEUTRAL], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"LLM has no argument {name!r}{hint}")
        if kept.get("max_model_len") is not None:
            kept["max_model_len"] = parse_length("max_model_len", kept["max_model_len"])
        return cls(model=model, **kept)

    def __post_init__(self):
        _check_type("model", self.model, str)
        if not self.model:
            raise ConfigError("model: expected a directory or a hub id, got an empty string")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        object.__setattr__(self, "dtype", DTYPES[self.dtype])
        if self.max_model_len is not None:
            object.__setattr__(self, "max_model_len", parse_length("max_model_len", self.max_model_len))
        optional = {field.name for field in dataclasses.fields(self) if field.default is None}
        for name, least in _WHOLE_FIELDS.items():
            if not (name in optional and getattr(self, name) is None):
                _check_whole(name, getattr(self, name), least)
        for name, kind in _TYPED_FIELDS.items():
            if not (name in optional and getattr(self, name) is None):
                _check_type(name, getattr(self, name), kind)
        size = self.block_size
        if size is not None and (type(size) is not int or size not in (8, 16, 32, 64, 128)):
            raise ConfigError(f"block_size: expected 8, 16, 32, 64 or 128 tokens, got {size!r}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization: expected a number in (0, 1], got {share!r}")


def parse_length(name: str, value: Any) -> int:
    """A number of tokens: a whole number, or text such as ``1k``, ``25.6k``, ``1K`` (1024) or ``auto`` (-1)."""
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == "auto":
            return -1
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text)
        if match and len(text) < 20:
            scale = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]]
            length = float(match[1]) * scale
            if length == math.floor(length) and length >= 1:
                return int(length)
    elif isinstance(value, int) and not isinstance(value, bool) and (value >= 1 or value == -1):
        return value
    raise ConfigError(f"{name}: expected a number of tokens >= 1, such as 4096, '4k' or -1 for auto, got {value!r}")


def _check_neutral(name: str, value: Any) -> None:
    if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name]):
        raise ConfigError(f"{name}={value!r} is not supported yet; only {name}={_NEUTRAL[name][0]!r} is")


def _check_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name}: expected {kind.__name__}, got {value!r}")


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: expected a whole number >= {least}, got {value!r}")
