"""vLLM's arguments that are no settings here: those without effect on an answer, and those that are refused.

An argument that cannot change an answer is accepted, and the log says that it has no effect. One that could is refused
unless its value means what the engine does anyway.
"""

import difflib
import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from jaxserve.api.errors import ConfigError

logger = logging.getLogger(__name__)


class Argument(NamedTuple):
    """One argument of vLLM.

    Attributes:
        why: Why it has no effect, or what to do instead if it is refused.
        default: The value that says nothing; it is accepted silently.
        accepted: Values without effect; None for all.
    """

    why: str
    default: Any = None
    accepted: tuple[Any, ...] | None = None


ONE_HOST = "`jaxserve serve` runs one engine over several hosts, other commands use this one"
REPLICAS = "one process runs all replicas"

SERVER_ONLY: Final[Mapping[str, Argument]] = MappingProxyType(
    {
        "served_model_name": Argument("it is the server's"),
        "otlp_traces_endpoint": Argument("it is the server's"),
        "max_num_queued_reqs": Argument("it is the server's"),
        "max_num_queued_tokens": Argument("it is the server's"),
        "shutdown_timeout": Argument("it is the server's"),
    }
)
"""Arguments of vLLM's engine that are settings of the server here: without effect on ``LLM``."""

SERVE_NO_EFFECT: Final[Mapping[str, Argument]] = MappingProxyType(
    {
        "api_server_count": Argument("one process serves all requests"),
        "grpc": Argument("gRPC is always served, on `grpc_port`", False),
        "disable_fastapi_docs": Argument("there are no such pages", False),
        "enable_offline_docs": Argument("there are no such pages", False),
        "disable_log_requests": Argument("requests are logged only with `enable_log_requests`", False),
        "enable_log_deltas": Argument("deltas are not logged", True),
        "log_error_stack": Argument("an error's traceback is always logged", False),
        "log_config_file": Argument("the log has one format"),
        "h11_max_incomplete_event_size": Argument("the server does not use h11"),
        "h11_max_header_count": Argument("the server does not use h11"),
        "enable_flash_late_interaction": Argument("scores are not served", True),
        "cohere_is_reasoning_model": Argument("Cohere's API is not served", True),
        "cohere_format": Argument("Cohere's API is not served"),
        "data_parallel_supervisor_port": Argument(REPLICAS),
        "dp_supervisor_probe_interval_s": Argument(REPLICAS),
        "dp_supervisor_probe_timeout_s": Argument(REPLICAS),
        "dp_supervisor_probe_failure_threshold": Argument(REPLICAS),
    }
)
"""Arguments of ``vllm serve`` alone that cannot change an answer."""

SERVE_REFUSED: Final[Mapping[str, Argument]] = MappingProxyType(
    {
        "lora_modules": Argument("adapters are not implemented: merge them into the model", ()),
        "middleware": Argument("put a proxy before the server", ()),
        "ssl_ciphers": Argument("Python's defaults are used"),
        "tool_parser_plugin": Argument("add the format to `jaxserve/parsers/tool_formats.py`"),
        "tool_server": Argument("clients run the tools"),
        "tokens_only": Argument("use `POST /v1/completions` with token ids", False),
        "exclude_tools_when_tool_choice_none": Argument("send no tools", False),
        "enable_per_request_metrics": Argument("use the metrics of the server", False),
        "fingerprint_mode": Argument("`system_fingerprint` has version and settings", "full", ("hash",)),
        "fingerprint_value": Argument("`system_fingerprint` has version and settings"),
    }
)
"""Arguments of ``vllm serve`` alone that could change an answer or ask for what is not built."""

SAME: Final = tuple(
    "model runner convert tokenizer tokenizer_mode trust_remote_code download_dir load_format dtype seed max_model_len "
    "quantization quantization_config pipeline_parallel_size tensor_parallel_size data_parallel_size "
    "enable_expert_parallel block_size "
    "enable_prefix_caching gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens max_num_seqs "
    "long_prefill_token_threshold max_logprobs logprobs_mode disable_log_stats revision tokenizer_revision hf_token "
    "hf_overrides num_gpu_blocks_override enable_chunked_prefill reasoning_parser tool_call_parser scheduling_policy "
    "generation_config override_generation_config attention_backend logits_processors async_scheduling "
    "chat_template speculative_config spec_method spec_model spec_tokens per_request_spec_decode_metrics".split()
)
"""vLLM's arguments that are settings of the engine."""

SAME_SERVE: Final = tuple(
    "host port uds api_key served_model_name chat_template_content_format trust_request_chat_template "
    "default_chat_template_kwargs response_role enable_auto_tool_choice return_tokens_as_token_ids "
    "enable_prompt_tokens_details enable_force_include_usage enable_server_load_tracking "
    "enable_tokenizer_info_endpoint enable_log_requests enable_log_outputs max_log_len enable_request_id_headers "
    "disable_access_log_for_endpoints uvicorn_log_level root_path ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs "
    "enable_ssl_refresh allowed_origins allowed_methods allowed_headers allow_credentials max_num_queued_reqs "
    "max_num_queued_tokens shutdown_timeout otlp_traces_endpoint".split()
)
"""vLLM's arguments that are settings of the server."""

SAME_GROUP: Final = ("nnodes", "node_rank", "master_addr", "master_port", "headless")
"""vLLM's arguments that are settings of the processes of `jaxserve serve`."""

RENAMED: Final[Mapping[str, str]] = MappingProxyType({"disable_uvicorn_access_log": "disable_access_log"})
"""vLLM's arguments that are settings of the server under another name."""

OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "tensor_parallel_size": ("-tp",),
        "pipeline_parallel_size": ("-pp",),
        "data_parallel_size": ("-dp",),
        "enable_expert_parallel": ("-ep",),
        "kv_cache_memory_bytes": ("--kv-cache-memory",),
        "disable_access_log": ("--disable-uvicorn-access-log",),
        "quantization": ("-q",),
        "compilation_config": ("-cc",),
        "optimization_level": ("-O",),
        "speculative_config": ("-sc",),
        "prefill_context_parallel_size": ("-pcp",),
        "decode_context_parallel_size": ("-dcp",),
        "nnodes": ("-n",),
        "node_rank": ("-r",),
        "api_server_count": ("-asc",),
        "data_parallel_size_local": ("-dpl",),
        "data_parallel_start_rank": ("-dpr",),
        "data_parallel_rank": ("-dpn",),
        "data_parallel_address": ("-dpa",),
        "data_parallel_rpc_port": ("-dpp",),
        "data_parallel_backend": ("-dpb",),
        "data_parallel_hybrid_lb": ("-dph",),
        "data_parallel_external_lb": ("-dpe",),
        "data_parallel_multi_port_external_lb": ("-dpm",),
    }
)
"""Other names of flags on vLLM's command line."""


def log_ignored(
    given: Mapping[str, Any], no_effect: Mapping[str, Argument], refused: Mapping[str, Argument], known: Iterable[str]
) -> None:
    """Check arguments that are no settings, and log those that have no effect, in one line.

    Args:
        given: The arguments.
        no_effect: Those that have none.
        refused: Those that are refused.
        known: Names of settings, for the suggestion of an unknown name.

    Raises:
        ConfigError: An argument is unknown or refused.
    """
    said = list[str]()
    for name, value in given.items():
        if name in refused:
            _check_refused(name, value, refused[name])
        elif name in no_effect:
            said += _said(name, value, no_effect[name])
        else:
            near = difflib.get_close_matches(name, [*known, *refused, *no_effect], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"LLM has no argument {name!r}{hint}")
    if said:
        logger.warning("no effect here: %s", "; ".join(said))


def _check_refused(name: str, value: Any, argument: Argument) -> None:
    """Raise ConfigError unless a refused argument has a value that means what the engine does anyway."""
    if _says_something(value, argument) and not any(_is_same(value, other) for other in argument.accepted or ()):
        default = None if argument.default in ((), {}) else argument.default
        raise ConfigError(
            f"{name}={value!r} is not supported yet; use {name}={default!r}: {argument.why.replace('`', '')}"
        )


def _said(name: str, value: Any, argument: Argument) -> list[str]:
    """Return the text of an argument without effect for the log; nothing if its value says nothing.

    Raises:
        ConfigError: Another value of this argument would have an effect.
    """
    if not _says_something(value, argument):
        return []
    if argument.accepted is not None and not any(_is_same(value, other) for other in argument.accepted):
        values = ", ".join(repr(other) for other in (argument.default, *argument.accepted))
        raise ConfigError(f"{name}={value!r} is not supported yet; use one of {values}: {argument.why}")
    return [f"{name}={value!r} ({argument.why.replace('`', '')})"]


def _says_something(value: Any, argument: Argument) -> bool:
    """Return whether a value is neither null, empty nor the default."""
    return not (value is None or value in ("", {}, []) or _is_same(value, argument.default))


def _is_same(value: Any, other: Any) -> bool:
    """Return whether values are equal and both or neither are flags; a list is like a tuple."""
    value = tuple(value) if isinstance(value, list) else value
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
