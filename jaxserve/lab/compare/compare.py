"""``jaxserve compare``: the meshes and layouts of a number of devices, planned, run and ranked."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxserve.api.config import EngineConfig, known_settings
from jaxserve.api.config_checks import check_whole
from jaxserve.api.errors import ConfigError
from jaxserve.cli_arguments import add_dataclass_arguments, given_arguments
from jaxserve.lab.compare.candidates import Candidates, enumerate_candidates
from jaxserve.lab.compare.rank import Workload
from jaxserve.lab.compare.result import Comparison, Row
from jaxserve.lab.compare.run import MANY_TOKENS, Measured, RunSettings, run_all, with_weights
from jaxserve.lab.devices import Device
from jaxserve.lab.hardware import DEVICES, LINKS, get_device, get_link
from jaxserve.lab.links import Link
from jaxserve.lab.plan.command import SETTINGS
from jaxserve.lab.plan.plan import read_model
from jaxserve.lab.records import BATCH_SIZES
from jaxserve.pictures import check_format
from sharding import ShardingLayout, ensure_cpu_devices

_SETTINGS = tuple(name for name in SETTINGS if name not in ("mesh", "layout", "enable_expert_parallel"))
_MOST_DEVICES = 4096
_CONTEXT, _RUN_CONTEXT = 1024, 64


def compare(
    model: str | Path,
    devices: int,
    *,
    layouts: Sequence[str | ShardingLayout] | None = None,
    meshes: Sequence[str] | None = None,
    device: str | Device | None = None,
    link: str | Link | None = None,
    hosts: int | None = None,
    batch_sizes: Sequence[int] = (1, 32),
    context: int | None = None,
    run: bool = False,
    **settings: Any,
) -> Comparison:
    """Compare the meshes and layouts that a model can run in on a number of devices, and recommend one.

    Each is planned from ``config.json`` alone, for devices that need not exist.

    Args:
        model: Directory with a ``config.json``, ``.gguf`` file, hub id, or ``demo``.
        devices: Number of devices.
        layouts: Layouts to compare, by name or as ``ShardingLayout``; None: all of the registry.
        meshes: Meshes to compare; None: all with as many devices.
        device: Kind of device, as in :func:`jaxserve.plan`; None is ``cpu`` if candidates run on CPUs, else ``h100``.
        link: Link between devices of a host; None is the device's own.
        hosts: Hosts that the devices are divided over; None: at most 8 GPUs on each.
        batch_sizes: Sequences at once on all devices together, of ``BATCH_SIZES``; candidates are ranked by the last.
        context: Tokens of context of each sequence; None: 1,024, with ``run`` 64, and at most half the model's.
        run: Whether to run each candidate on this machine's devices, which are virtual on CPUs, and to compare its
            greedy tokens with those of one device. A model without weights gets random ones; on CPUs the default dtype
            is then float32.
        settings: Further settings of an engine, as in ``EngineConfig``.

    Raises:
        ConfigError: A setting is unknown or not valid; the message lists what is.
    """
    sizes = _checked(devices, batch_sizes)
    settings = _run_settings(devices, settings) if run else settings
    whole = EngineConfig.from_arguments(str(model), **settings)
    settings = known_settings(settings)
    kind = _device(device or ("cpu" if run and jax.default_backend() == "cpu" else "h100"), link)
    context = _context(whole, context, run)
    common = {"layouts": layouts, "meshes": meshes, "hosts": hosts, "context": context, "settings": settings}
    found = enumerate_candidates(str(model), devices, kind, **common)
    if not found.valid:
        raise _none_valid(model, devices, found)
    measured, weights = list[Measured | None]([None] * len(found.valid)), ""
    if run:
        with with_weights(whole) as (directory, weights):
            measured = [*run_all(directory, found.valid, RunSettings(sizes, context, settings))]
    return Comparison(
        model=str(model),
        num_devices=devices,
        device=kind,
        batch_sizes=sizes,
        workload=Workload(sizes[-1], context),
        rows=tuple(map(Row, found.valid, measured)),
        excluded=found.excluded,
        weights=weights,
    )


def _checked(devices: int, batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the batch sizes, ascending, after checking them and the number of devices."""
    check_whole("devices", devices, 1, _MOST_DEVICES)
    unknown = [size for size in batch_sizes if size not in BATCH_SIZES]
    if unknown or not batch_sizes:
        raise ConfigError(
            f"batch_sizes: expected some of {', '.join(map(str, BATCH_SIZES))}, got {list(batch_sizes)!r}"
        )
    return tuple(sorted(set(batch_sizes)))


def _run_settings(devices: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of engines that run on this machine, which gets as many virtual CPUs if it has no GPUs."""
    ensure_cpu_devices(devices)
    return {"dtype": "float32", **settings} if jax.default_backend() == "cpu" else settings


def _device(device: str | Device, link: str | Link | None) -> Device:
    """Return a kind of device, with another link if one is given."""
    kind = get_device(device)
    return kind if link is None else dataclasses.replace(kind, link=get_link(link))


def _none_valid(model: str | Path, devices: int, found: Candidates) -> ConfigError:
    """Return the error where no mesh and layout is valid."""
    reasons = "; ".join(dict.fromkeys(each.reason for each in found.excluded))
    return ConfigError(f"no mesh and layout of {devices} devices is valid for {model}: {reasons}")


def _context(config: EngineConfig, context: int | None, run: bool) -> int:
    """Return the context to compare, after checking that the model, and a run's outputs, have room for it."""
    model = read_model(config)
    longest = model.max_positions if config.max_model_len in (None, -1) else config.max_model_len
    most = longest - (MANY_TOKENS if run else 0)
    if context is None:
        context = max(1, min(_RUN_CONTEXT if run else _CONTEXT, longest // 2, most))
    check_whole("context", context, 1, most)
    return context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("model", help="directory with a config.json, .gguf file, hub id, or demo")
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="number of devices")
    parser.add_argument("--layouts", nargs="+", metavar="NAME", help="layouts to compare (default: all)")
    parser.add_argument("--meshes", nargs="+", metavar="MESH", help="meshes to compare (default: all with N devices)")
    parser.add_argument(
        "--device",
        help=f"{', '.join(DEVICES)}, or the file of a calibration (default: cpu with --run on CPUs, else h100)",
    )
    parser.add_argument("--link", help=f"between devices of a host: {', '.join(LINKS)} (default: the device's own)")
    parser.add_argument("--hosts", type=int, help="hosts of the devices (default: at most 8 GPUs on each)")
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=int,
        default=[1, 32],
        metavar="B",
        help="sequences at once; candidates are ranked by the largest (default: 1 32)",
    )
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help="context of each sequence (default: 1024; 64 with --run)"
    )
    parser.add_argument(
        "--run",
        action="store_true",
        dest="runs",
        help="run each on this machine's devices and compare tokens and times",
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the comparison to a .svg, .png or .pdf file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_dataclass_arguments(parser.add_argument_group("engine"), EngineConfig, _SETTINGS)


def run(options: argparse.Namespace) -> None:
    """Compare, print, and draw if requested."""
    if options.picture is not None:
        check_format("picture", options.picture)
    own = ("layouts", "meshes", "device", "link", "hosts", "batch_sizes", "context")
    given = given_arguments(options, (*own, *_SETTINGS))
    found = compare(options.model, options.devices, run=options.runs, **given)
    if options.picture is not None:
        found.draw(options.picture)
    print(json.dumps(found.as_dict()) if options.json else found)
