"""``jaxserve plan``: memory, communication and time of a model on a mesh, without weights or devices."""

import argparse
import json
import math
import sys
from pathlib import Path

from jaxserve.api.config import EngineConfig
from jaxserve.api.config_checks import parse_mesh
from jaxserve.api.errors import ConfigError
from jaxserve.api.text_files import check_output_file
from jaxserve.cli_arguments import add_dataclass_arguments, given_arguments
from jaxserve.lab.calibration import CPU_DEVICES, calibrate, calibration_text
from jaxserve.lab.hardware import DEVICES, LINKS
from jaxserve.lab.plan.plan import plan
from jaxserve.lab.records import DRAFT_BATCH_SIZES

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
    "speculative_config",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "stage_layers",
    "enable_expert_parallel",
    "revision",
    "download_dir",
    "hf_token",
)
"""Settings of an engine that change a plan."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("model", nargs="?", help="directory with a config.json, .gguf file, hub id, or demo")
    parser.add_argument(
        "--device",
        help=f"{', '.join(DEVICES)}, or the file of a calibration (default: what --calibrate measures, or h100)",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="measure matmuls, collectives and overheads of this machine, as many devices as --mesh has (default: all "
        f"GPUs or, on CPUs, {CPU_DEVICES} virtual devices), and write them to FILE, a --device; MODEL may be omitted. "
        "Nothing else should run meanwhile",
    )
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
        "--draft-batches",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of sequences of decode steps with the drafts of --speculative-config (default: "
        f"{' '.join(map(str, DRAFT_BATCH_SIZES))})",
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
    """Calibrate if asked to, plan and print."""
    if options.calibrate is not None:
        _calibrate(options)
    elif options.model is None:
        raise ConfigError("expected MODEL, --calibrate FILE, or both")
    if options.model is None:
        return
    own = ("device", "hosts", "link", "host_link", "num_seqs", "context", "draft_batches", "compiles")
    found = plan(options.model, **given_arguments(options, (*own, *SETTINGS)))
    print(json.dumps(found.as_dict()) if options.json else found)


def _calibrate(options: argparse.Namespace) -> None:
    """Measure this machine, and plan for it."""
    if options.device is not None:
        raise ConfigError(
            "--device and --calibrate exclude each other: a calibration measures the devices of this machine"
        )
    if not options.calibrate.endswith(".json"):
        raise ConfigError(f"--calibrate: expected the name of a .json file, got {options.calibrate!r}")
    folder = Path(options.calibrate).parent
    if not folder.is_dir():
        raise ConfigError(f"--calibrate {options.calibrate}: there is no folder {folder}")
    check_output_file("--calibrate", options.calibrate)
    sizes = None if options.mesh is None else parse_mesh(options.mesh, {})
    device = calibrate(None if sizes is None else math.prod(sizes.values()))
    device.save(options.calibrate)
    print(calibration_text(device), file=sys.stderr if options.json else sys.stdout)
    options.device = device
