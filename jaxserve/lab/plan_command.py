"""``jaxserve plan``: memory, communication and time of a model on a mesh, without weights or devices."""

import argparse
import json
from typing import Any

from jaxserve.cli_arguments import add_dataclass_arguments
from jaxserve.config import EngineConfig
from jaxserve.lab.hardware import DEVICES, LINKS
from jaxserve.lab.plan import plan

SETTINGS = (
    "mesh",
    "layout",
    "max_model_len",
    "dtype",
    "hf_overrides",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "block_size",
    "stage_layers",
    "enable_expert_parallel",
    "revision",
    "download_dir",
    "hf_token",
)
"""Settings of an engine that change a plan."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("model", help="directory with a config.json, hub id, or demo")
    parser.add_argument("--device", default="h100", help=f"{', '.join(DEVICES)} (default: %(default)s)")
    parser.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="hosts of the devices (default: as few as have at most 8 GPUs each)",
    )
    parser.add_argument("--link", help=f"between devices of a host: {', '.join(LINKS)} (default: the device's own)")
    parser.add_argument("--host-link", help="between hosts, one of the same (default: the device's own)")
    parser.add_argument("--num-seqs", type=int, metavar="N", help="most sequences per step (default: the engine's)")
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help="context of each sequence in a decode step (default: 1024)"
    )
    parser.add_argument(
        "--compile",
        dest="compiles",
        action="store_true",
        help="compile the largest step for the GPU, which need not be there; needs JAX's CUDA wheels, takes minutes",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_dataclass_arguments(parser.add_argument_group("engine"), EngineConfig, SETTINGS)


def run(options: argparse.Namespace) -> None:
    """Plan and print."""
    own = ("device", "hosts", "link", "host_link", "num_seqs", "context", "compiles")
    given = {name: getattr(options, name) for name in (*own, *SETTINGS)}
    found = plan(options.model, **_without_none(given))
    print(json.dumps(found.as_dict()) if options.json else found)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
