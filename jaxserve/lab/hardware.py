"""The devices and links that are known by name.

The table's numbers are the vendors' peaks; ``Device.bandwidth_share`` and ``Device.matmul_share`` say how much of them
programs reach. Those of a calibration (:mod:`jaxserve.lab.calibration`) are measured.
"""

import difflib
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.api.errors import ConfigError
from jaxserve.device.memory import machine_memory_bytes
from jaxserve.lab.devices import Device, read_device
from jaxserve.lab.links import Link

_GIB, _MIB = 1 << 30, 1 << 20
_TERA, _GIGA = 1e12, 1e9


def _links(*links: Link) -> Mapping[str, Link]:
    return MappingProxyType({link.name: link for link in links})


LINKS: Mapping[str, Link] = _links(
    # PCI-SIG: 8, 16 and 32 GT/s per lane, 16 lanes, 128b/130b coding. Latency: a staged copy and a kernel's start.
    Link(name="pcie3", bytes_per_s=15.75 * _GIGA, latency_s=10e-6),
    Link(name="pcie4", bytes_per_s=31.5 * _GIGA, latency_s=10e-6),
    Link(name="pcie5", bytes_per_s=63.0 * _GIGA, latency_s=8e-6),
    # NVIDIA Ampere GA102 whitepaper: four links, 112.5 GB/s in both directions together. It connects two cards.
    Link(name="nvlink-3090", bytes_per_s=56.25 * _GIGA, latency_s=5e-6),
    # NVIDIA A100 and H100 datasheets: 600 and 900 GB/s in both directions together. Latency: about 6 µs for a small
    # all-reduce of two GPUs (NVIDIA/nccl issue 1259), two messages after each other.
    Link(name="nvlink-a100", bytes_per_s=300 * _GIGA, latency_s=3e-6),
    Link(name="nvlink-h100", bytes_per_s=450 * _GIGA, latency_s=3e-6),
    Link(name="nvlink-h200", bytes_per_s=450 * _GIGA, latency_s=3e-6),
    # NVIDIA ConnectX-6 and ConnectX-7 datasheets: 200 and 400 Gbit/s per port; a port per GPU, as in DGX systems.
    Link(name="infiniband-hdr", bytes_per_s=25 * _GIGA, latency_s=8e-6),
    Link(name="infiniband-ndr", bytes_per_s=50 * _GIGA, latency_s=8e-6),
    # Virtual CPU devices copy through memory; an order of magnitude, to be replaced by a measurement.
    Link(name="memory", bytes_per_s=5 * _GIGA, latency_s=50e-6),
)


def _gpu(name: str, kind: str, mebibytes: int, terabytes: float, teraflops: Mapping[str, float], link: str) -> Device:
    """Return a row of the table; memory in MiB, bandwidth in TB/s, arithmetic in TFLOP/s."""
    return Device(
        name=name,
        device_kind=kind,
        memory_bytes=mebibytes * _MIB,
        bytes_per_s=terabytes * _TERA,
        flops=MappingProxyType({dtype: rate * _TERA for dtype, rate in teraflops.items()}),
        link=LINKS[link],
        host_link=LINKS["infiniband-ndr" if link in ("nvlink-h100", "nvlink-h200") else "infiniband-hdr"],
    )


def _half(rate: float, single: float) -> dict[str, float]:
    return {"bfloat16": rate, "float16": rate, "float32": single}


_GPUS = (
    # Memory: total that nvidia-smi reports. The shares of the peaks are those of an H200: 4.3 of 4.8 TB/s copied, and
    # 790 of 989 TFLOP/s multiplied. Rates are of dense matmuls that accumulate in float32, without sparsity.
    _gpu("h200", "NVIDIA H200", 143_771, 4.8, _half(989.4, 66.9), "nvlink-h200"),  # NVIDIA H200 datasheet
    _gpu("h100", "NVIDIA H100 80GB HBM3", 81_559, 3.35, _half(989.4, 66.9), "nvlink-h100"),  # H100 datasheet, SXM
    _gpu("a100-80g", "NVIDIA A100-SXM4-80GB", 81_920, 2.039, _half(312.0, 19.5), "nvlink-a100"),  # A100 datasheet, SXM
    _gpu("a100-40g", "NVIDIA A100-SXM4-40GB", 40_960, 1.555, _half(312.0, 19.5), "nvlink-a100"),  # A100 datasheet, SXM
    _gpu("l40s", "NVIDIA L40S", 46_068, 0.864, _half(362.05, 91.6), "pcie4"),  # NVIDIA L40S datasheet
    _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 24_576, 0.936, _half(71.0, 35.6), "pcie4"),  # GA102 whitepaper, table 9
    _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 24_564, 1.008, _half(165.2, 82.6), "pcie4"),  # AD102 whitepaper
)


def _cpu() -> Device:
    """Return this machine's CPU: its memory, and orders of magnitude of the rest until it is measured."""
    cores = os.cpu_count() or 1
    return Device(
        name="cpu",
        device_kind="cpu",
        platform="cpu",
        memory_bytes=machine_memory_bytes(),
        bytes_per_s=10 * _GIGA * min(cores, 4),
        flops=MappingProxyType(dict.fromkeys(("float32", "bfloat16", "float16"), 50 * _GIGA * cores)),
        link=LINKS["memory"],
        host_link=LINKS["infiniband-hdr"],
        per_host=1 << 20,
        shares_host=True,
        num_cores=cores,
    )


DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in (*_GPUS, _cpu())})


def get_device(device: str | Device) -> Device:
    """Return a device by its name in ``DEVICES``, or by the JSON file of a calibration.

    Raises:
        ConfigError: The name is unknown, in which case the message lists all, or the file cannot be read.
    """
    if isinstance(device, Device):
        return device
    return read_device(device) if str(device).endswith(".json") else _named("device", device, DEVICES)


def get_link(link: str | Link) -> Link:
    """Return a link by its name in ``LINKS``.

    Raises:
        ConfigError: The name is unknown; the message lists all.
    """
    return link if isinstance(link, Link) else _named("link", link, LINKS)


def _named(what: str, name: Any, table: Mapping[str, Any]) -> Any:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ConfigError(f"unknown {what} {name!r}{hint}; known: {', '.join(table)}")
