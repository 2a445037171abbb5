"""What the processes of a group must have in common: versions, files, settings, and all that shapes a program."""

import dataclasses
import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import jax

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.device.build import EnginePlan, find_model, plan_engine
from jaxserve.group.differences import NONE, common_settings
from jaxserve.layers.cpu import cpu_key
from pallas_kernels.native_library import unavailable
from sharding.processes import Processes

_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
_HEAD_BYTES = 1 << 20
_MOST_FILES = 10_000


def early_facts(config: EngineConfig) -> dict[str, Any]:
    """Return what is known before devices are: versions, settings and the model's files."""
    facts: dict[str, Any] = {name: importlib.metadata.version(name) for name in ("jaxserve", "jax", "jaxlib", "flax")}
    facts |= {f"setting {name}": repr(jax.config.values.get(name)) for name in _JAX_SETTINGS}
    facts["variable XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or NONE
    return facts | common_settings(config) | model_files(find_model(config))


def model_files(model: Path) -> dict[str, str]:
    """Return the size of each file of a model, with a hash of its beginning, which has its headers.

    Args:
        model: Its directory, or its only file.
    """
    return {f"model file {name}": said for name, said in _files(model)}


def _files(model: Path) -> list[tuple[str, str]]:
    """Return the name of each file of a model, with its size and a hash of its beginning, which has its headers."""
    root = model if model.is_dir() else model.parent
    paths = sorted(path for path in (model.rglob("*") if model.is_dir() else [model]) if path.is_file())
    if len(paths) > _MOST_FILES:
        raise ConfigError(f"{model} has {len(paths)} files; a group compares at most {_MOST_FILES}")
    return [(str(path.relative_to(root)), _described(path)) for path in paths if not _is_hidden(path.relative_to(root))]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _described(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return f"{path.stat().st_size} bytes, sha256 of the first MiB {hashlib.sha256(head).hexdigest()[:16]}"


def plan_facts(plan: EnginePlan) -> dict[str, Any]:
    """Return what a plan says of its programs, and the numbers of which the group takes the least."""
    first = plan.models[0]
    device = first.mesh.devices.flat[0]
    shapes = repr(dataclasses.replace(plan.buckets, table_pages=0))
    own = {
        "platform": device.platform,
        "device": device.device_kind,
        "mesh": " ".join(f"{axis}={size}" for axis, size in plan.mesh_sizes.items()),
        "devices of each process": [
            int(device.process_index) for each in plan.models for device in each.mesh.devices.flat
        ],
        "layout": repr(first.layout),
        "dtypes": str(first.policy),
        "attention kernel": first.kernel.name,
        "truncation kernel": getattr(first.truncation, "__name__", "the best"),
        "page size": first.page_size,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "rows computed together": repr(first.row_tile),
        "recurrent states": first.num_states,
        "logits processors": [type(processor).__qualname__ for processor in first.processors],
        "batch shapes": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        "num_pages": first.num_pages,
        "max_model_len": plan.max_model_len,
    }
    if device.platform == "cpu":
        own |= {"CPU": cpu_key(), "native kernels": unavailable() or "there"}
    return own


def agreed_plan(config: EngineConfig, plan: EnginePlan, numbers: dict[str, int], processes: Processes) -> EnginePlan:
    """Return the plan with the numbers that all processes use."""
    if (plan.models[0].num_pages, plan.max_model_len) == (numbers["num_pages"], numbers["max_model_len"]):
        return plan
    changes = {"num_gpu_blocks_override": numbers["num_pages"], "max_model_len": numbers["max_model_len"]}
    return plan_engine(dataclasses.replace(config, **changes), plan.config, processes)
