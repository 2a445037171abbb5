"""Checks of ``EngineConfig``, one table per kind of value. Values come from users, so no type is assumed."""

import math
import re
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.api.errors import ConfigError, RequestError
from jaxserve.api.quantization import check_quantization
from jaxserve.api.sampling_params import GENERATION_CONFIG_KEYS, SamplingParams
from jaxserve.api.speculation import SHORTCUTS, check_speculation

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

STEP_KINDS = ("decode", "mixed")
BLOCK_SIZES = (8, 16, 32, 64, 128)
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")

_WHOLE_FIELDS = MappingProxyType(
    {
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "expert_parallel_size": 1,
        "num_gpu_blocks_override": 1,
        "kv_cache_memory_bytes": 1,
        "prefix_cache_state_bytes": 0,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "num_threads": 1,
        "compilation_cache_max_bytes": 0,
        "seed": 0,
        "long_prefill_token_threshold": 0,
        "expert_load_metrics": 0,
        "max_logprobs": -1,
        "max_logprobs_per_request": -1,
    }
)
MESH_FIELDS = MappingProxyType(
    {
        "data": "data_parallel_size",
        "stage": "pipeline_parallel_size",
        "tensor": "tensor_parallel_size",
        "expert": "expert_parallel_size",
    }
)
"""The setting that each axis of ``mesh`` stands for."""

_CHOICES: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "scheduling_policy": ("fcfs", "priority"),
        "logprobs_mode": LOGPROBS_MODES,
        "kernels": ("native", "xla"),
        "per_request_spec_decode_metrics": ("none", "summary", "detailed"),
        "runner": ("auto", "generate", "pooling"),
        "convert": ("auto", "none", "embed"),
        "tokenizer_mode": ("auto", "hf", "slow"),
        "load_format": ("auto", "safetensors", "pt", "dummy"),
    }
)
_PLAIN_TYPES = (bool, str, list, dict)


def check_settings(values: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings after checking them; alternative spellings are converted to the usual one.

    Args:
        values: Every setting.
        types: The type of each; a value may be None if its type is a union with None.

    Raises:
        ConfigError: A value of the wrong type or out of range.
    """
    checked = dict(values)
    if values["model"] == "":
        raise ConfigError("model: expected a directory or a hub id, got an empty string")
    if not isinstance(values["dtype"], str) or values["dtype"] not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {values['dtype']!r}")
    checked["dtype"] = DTYPES[values["dtype"]]
    kinds = {
        name: {typing.get_origin(one) or one for one in typing.get_args(kind) or [kind]} for name, kind in types.items()
    }
    given: dict[str, Any] = {
        name: value for name, value in values.items() if value is not None or type(None) not in kinds[name]
    }
    if "max_model_len" in given:
        checked["max_model_len"] = parse_length("max_model_len", given["max_model_len"])
    for name, least in _WHOLE_FIELDS.items():
        if name in given:
            check_whole(name, given[name], least)
    for name, choices in _CHOICES.items():
        if name in given and given[name] not in choices:
            raise ConfigError(f"{name}: expected one of {', '.join(choices)}, got {given[name]!r}")
    for name, value in given.items():
        for kind in kinds[name].intersection(_PLAIN_TYPES):
            check_type(name, value, kind)
    checked |= _sizes_of_mesh(values)
    _check_runner(values)
    _check_whole_prompts(checked)
    _check_numbers(values)
    _check_digest("model_digest", given.get("model_digest"))
    _check_generation_config("override_generation_config", given.get("override_generation_config", {}))
    _check_compile_sizes("compile_sizes", given.get("compile_sizes", {}))
    check_quantization(values["quantization_config"])
    checked["speculative_config"] = _check_speculation(values)
    checked |= dict.fromkeys(SHORTCUTS)  # ``speculative_config`` has them
    return checked


def _check_speculation(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the checked ``speculative_config``; None without speculative decoding."""
    config, level = check_speculation(values["speculative_config"], values), values["per_request_spec_decode_metrics"]
    if config is None and level != "none":
        raise ConfigError(
            f"per_request_spec_decode_metrics={level!r} needs speculative_config: without it there are no drafts"
        )
    return config


def _check_numbers(values: Mapping[str, Any]) -> None:
    if values["stage_layers"] == []:
        raise ConfigError("stage_layers: expected the number of layers of each stage, got an empty list")
    for i, count in enumerate(values["stage_layers"] or ()):
        check_whole(f"stage_layers[{i}]", count, 1)
    size = values["block_size"]
    if size is not None and (type(size) is not int or size not in BLOCK_SIZES):
        raise ConfigError(f"block_size: expected 8, 16, 32, 64 or 128 tokens, got {size!r}")
    share = values["gpu_memory_utilization"]
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization: expected a number in (0, 1], got {share!r}")


def _check_digest(name: str, value: str | None) -> None:
    if value is not None and not re.fullmatch("sha256:[0-9a-fA-F]{64}", value):
        raise ConfigError(f"{name}: expected sha256: and 64 hexadecimal digits, got {value!r}")


def _check_generation_config(name: str, values: Mapping[str, Any]) -> None:
    known = (*GENERATION_CONFIG_KEYS, "do_sample")
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{name}: expected {', '.join(known)}; got {key!r}")
        if key == "do_sample" and value is not None:
            check_type(f"{name}.{key}", value, bool)
        try:
            SamplingParams.from_generation_config({key: value})
        except RequestError as error:
            raise ConfigError(f"{name}.{key}: {error}") from error


def _check_compile_sizes(name: str, values: Mapping[str, Any]) -> None:
    for kind, sizes in values.items():
        if kind not in STEP_KINDS:
            raise ConfigError(f'{name}: expected {{"decode": [...], "mixed": [...]}}, got key {kind!r}')
        if not isinstance(sizes, list) or not sizes:
            raise ConfigError(f"{name}.{kind}: expected a list of at least one integer, got {sizes!r}")
        for i, size in enumerate(sizes):
            check_whole(f"{name}.{kind}[{i}]", size, 1)


def parse_length(name: str, value: Any) -> int:
    """Return a number of tokens: an integer, or a string such as ``1k``, ``25.6k``, ``1K`` (1024) or ``auto`` (-1)."""
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


def _sizes_of_mesh(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the settings that the mesh stands for, if one is given."""
    if values["mesh"] is None:
        return {}
    return parse_mesh(values["mesh"], {name: values[name] for name in MESH_FIELDS.values() if values[name] != 1})


def parse_mesh(mesh: str, given: Mapping[str, Any]) -> dict[str, int]:
    """Return the settings that ``axis=size,axis=size`` stands for; axes that are not named have one device.

    Args:
        mesh: The text.
        given: Those of the same settings that are given besides.

    Raises:
        ConfigError: ``mesh`` has another form, names an unknown axis or one twice, or ``given`` says otherwise.
    """
    check_type("mesh", mesh, str)
    sizes = dict[str, int]()
    for part in mesh.split(","):
        axis, _, size = (text.strip() for text in part.partition("="))
        if axis not in MESH_FIELDS or axis in sizes or not re.fullmatch(r"[1-9]\d{0,5}", size):
            raise ConfigError(
                f"mesh: expected a size >= 1 for any of {', '.join(MESH_FIELDS)}, such as 'data=2,tensor=2', "
                f"got {mesh!r}"
            )
        sizes[axis] = int(size)
    found = {name: sizes.get(axis, 1) for axis, name in MESH_FIELDS.items()}
    for name, value in given.items():
        if name in found and value != found[name]:
            raise ConfigError(f"mesh={mesh!r} means {name}={found[name]}, but {name}={value} is given too; use one")
    return found


def _check_runner(values: Mapping[str, Any]) -> None:
    runner, convert = values["runner"], values["convert"]
    if (runner, convert) in (("pooling", "none"), ("generate", "embed")):
        raise ConfigError(
            f"runner={runner!r} and convert={convert!r} contradict each other: runner='pooling' needs convert='embed' "
            "or 'auto', and convert='embed' needs runner='pooling' or 'auto'"
        )


def _check_whole_prompts(values: Mapping[str, Any]) -> None:
    """Check the limits of steps that compute whole prompts, as far as they are known without the model."""
    if values["enable_chunked_prefill"] is not False:
        return
    tokens, length = values["max_num_batched_tokens"], values["max_model_len"]
    if values["long_prefill_token_threshold"]:
        raise ConfigError(
            f"long_prefill_token_threshold={values['long_prefill_token_threshold']} splits prompts, but "
            "enable_chunked_prefill=False computes each in one step; set one of them only"
        )
    if tokens is not None and isinstance(length, int) and length > tokens:
        raise whole_prompts_error(tokens, length)


def whole_prompts_error(max_num_batched_tokens: int, max_model_len: int) -> ConfigError:
    """Return the error of steps that are too small for whole prompts."""
    return ConfigError(
        f"enable_chunked_prefill=False computes each prompt in one step, but max_num_batched_tokens="
        f"{max_num_batched_tokens} is less than max_model_len={max_model_len}; use max_num_batched_tokens >= "
        f"{max_model_len} or max_model_len <= {max_num_batched_tokens}"
    )


def check_type(name: str, value: Any, kind: type) -> None:
    """Reject a value that is not of a type."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name}: expected {kind.__name__}, got {value!r}")


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Check that a setting is an integer from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}: expected an integer {bounds}, got {value!r}")
