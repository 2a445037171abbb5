"""Measures this machine's devices, links and overheads, for plans that predict its own times."""

import contextlib
import dataclasses
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.api.config import EngineConfig
from jaxserve.device.memory import device_memory_bytes
from jaxserve.lab import report
from jaxserve.lab.compare.run import RunSettings, decode_seconds, with_weights
from jaxserve.lab.devices import Device
from jaxserve.lab.hardware import DEVICES
from jaxserve.lab.measure import COLLECTIVE_BYTES, ROWS, collective_times, hand_over_times, matmul_rates
from sharding import MeshShape, ensure_cpu_devices, make_mesh

CPU_DEVICES = 4
"""Virtual devices of a CPU that are measured by default."""
_DTYPES = {"cpu": ("float32", "bfloat16"), "gpu": ("bfloat16", "float32")}
_FEW_LAYERS, _MANY_LAYERS = 4, 24
_MANY_ROWS = 32
_ROUNDS = 3
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}

logger = logging.getLogger(__name__)


def calibrate(num_devices: int | None = None) -> Device:
    """Measure this machine: matmuls, collectives, and the time of a step besides them. Nothing else should run.

    Args:
        num_devices: Devices to measure at the same time; None for all GPUs or, on CPUs, 4 virtual devices.

    Returns:
        A device for :func:`jaxserve.plan` and :func:`jaxserve.compare`; ``Device.save`` keeps it.

    Raises:
        MeshError: There are fewer devices, or JAX has started with fewer virtual ones.
    """
    ensure_cpu_devices(CPU_DEVICES if num_devices is None else num_devices)
    shape = MeshShape(tensor=jax.device_count() if num_devices is None else num_devices)
    devices = make_mesh(shape).devices.flatten().tolist()
    kind = _known(devices[0])
    times = (*collective_times(devices), *hand_over_times(devices))
    logger.info("measured %d collectives", len(times))
    link = dataclasses.replace(kind.link, name=f"measured {kind.link.name}", measured=times, source="measured")
    rates = {dtype: tuple(matmul_rates(devices, dtype, link)) for dtype in _DTYPES[kind.platform]}
    logger.info("measured matmuls: %s", rates)
    dtype, found = next(iter(rates.items()))
    _, rows, rate = found[0]
    device = dataclasses.replace(
        kind,
        name=f"measured {kind.name}",
        bytes_per_s=rate * jnp.dtype(dtype).itemsize / (2 * rows),
        bandwidth_share=1.0,
        flops={dtype: max(rate for *_, rate in found) for dtype, found in rates.items()},
        matmul_share=1.0,
        matmul_rates=rates,
        link=link,
        num_cores=os.cpu_count() or 1,
        source="measured",
    )
    rounds = [_overheads(len(devices)) for _ in range(_ROUNDS)]
    return dataclasses.replace(
        device, **{name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    )


def _known(device: Any) -> Device:
    """Return the row of the table for a device, with its own memory if the table has none."""
    if device.platform == "cpu":
        return DEVICES["cpu"]
    for kind in DEVICES.values():
        if kind.device_kind == device.device_kind:
            return kind
    kind, memory = device.device_kind, device_memory_bytes(device)
    return dataclasses.replace(DEVICES["h100"], name=kind, device_kind=kind, memory_bytes=memory)


def _overheads(num_devices: int) -> dict[str, float]:
    """Return the overheads of a step, of a launch and of a layer: those of a model whose matmuls take no time.

    On one device the time of a layer, of one row or many, is the difference between many layers, which hide the host's
    work, and twice as many. As many replicas or stages of few layers as there are devices, each with a sequence of its
    own, wait for the host: for a plan for each sequence, and a launch for each sequence and stage.
    """
    times = list[dict[int, float]]()
    for num_layers in (_MANY_LAYERS, 2 * _MANY_LAYERS):
        with _tiny_model(num_layers) as model:
            times.append(_step_seconds(model, "tensor=1", 1, _MANY_ROWS))
    layer_s, rows_s = (max(0.0, times[1][batch] - times[0][batch]) / _MANY_LAYERS for batch in (1, _MANY_ROWS))
    with _tiny_model(_FEW_LAYERS) as model:
        replicas_s = _step_seconds(model, f"data={num_devices}", num_devices)[num_devices]
        stages_s = None
        if 1 < num_devices <= _FEW_LAYERS:
            stages_s = _step_seconds(model, f"stage={num_devices}", num_devices)[num_devices]
    per_replica = replicas_s / num_devices
    per_stage = per_replica if stages_s is None else stages_s / num_devices
    launch_s = min(per_replica, max(0.0, per_stage - per_replica) / max(1, num_devices - 1))
    return {
        "layer_overhead_s": layer_s,
        "row_overhead_s": max(0.0, rows_s - layer_s) / (_MANY_ROWS - 1),
        "launch_overhead_s": launch_s,
        "step_overhead_s": per_replica - launch_s,
    }


@contextlib.contextmanager
def _tiny_model(num_layers: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as source:
        (Path(source) / "config.json").write_text(json.dumps({**_TINY, "num_hidden_layers": num_layers}))
        with with_weights(EngineConfig(model=source)) as (directory, _):
            yield directory


def _step_seconds(directory: str, mesh: str, *batches: int) -> dict[int, float]:
    """Return the time of a decode step of the tiny model, by batch size."""
    parts = 1 if mesh == "tensor=1" else batches[0]
    found = decode_seconds(directory, {"mesh": mesh}, RunSettings(batches, 32, {"dtype": "float32"}), parts)
    logger.info("steps of the tiny model on %s take %s", mesh, found)
    return found


def calibration_text(device: Device) -> str:
    """Return what was measured as tables."""
    rates = [(dtype, *each) for dtype, found in device.matmul_rates.items() for each in found]
    cells = [
        [dtype, str(count), *(f"{each[3] / 1e9:,.1f}" for each in rates if each[:2] == (dtype, count))]
        for dtype, count in dict.fromkeys(each[:2] for each in rates)
    ]
    names = ["weights", "devices", *(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS)]
    tables: list[report.Table] = [("Matmuls (GFLOP/s)", names, cells)]
    found = device.link.measured
    times = [
        [kind, str(count), *(report.seconds(each[3]) for each in found if each[:2] == (kind, count))]
        for kind, count in dict.fromkeys(each[:2] for each in found)
    ]
    sizes = [report.size(num_bytes) for num_bytes in COLLECTIVE_BYTES]
    if times:
        tables.append(("Collectives, by the bytes of the whole array", ["kind", "devices", *sizes], times))
    overheads = [
        [what, report.seconds(time_s)]
        for what, time_s in (
            ("step: plan it, collect its tokens", device.step_overhead_s),
            ("launch of a stage, on each device", device.launch_overhead_s),
            ("layer, of one row", device.layer_overhead_s),
            ("each further row of a layer", device.row_overhead_s),
        )
    ]
    tables.append(("Besides bytes and arithmetic", ["", "time"], overheads))
    memory = f"{device.bytes_per_s / 1e9:.1f} GB/s of weights read"
    return report.as_text(f"{device.name}, {memory}", tables, "")
