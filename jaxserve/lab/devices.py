"""A kind of device: memory, bandwidth and arithmetic."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxserve.api.errors import ConfigError
from jaxserve.api.text_files import write_text
from jaxserve.lab.links import Link, interpolated, nearest
from sharding import PlannedDevice

_LINKS = ("link", "host_link")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of device.

    Attributes:
        name: Name in ``DEVICES``.
        device_kind: JAX's name of the device, by which kernels are chosen.
        platform: JAX platform name.
        memory_bytes: Total memory.
        bytes_per_s: Peak memory bandwidth.
        flops: Peak multiplications and additions per second of dense matmuls, by dtype.
        link: Link between devices of one host.
        host_link: Link between devices of different hosts.
        bandwidth_share: Share of the peak bandwidth that reading weights and pages reaches.
        matmul_share: Share of the peak arithmetic that large matmuls reach.
        matmul_rates: Measured multiplications and additions per second, by dtype: devices of a program, rows, and the
            rate of matmuls of as many, with weights that are read from memory. They replace ``flops`` for the dtype.
        step_overhead_s: Time in which the host plans a step and collects its tokens.
        launch_overhead_s: Time in which the host launches the program of a stage on one of its devices.
        layer_overhead_s: Time of a layer of one row besides its bytes and its arithmetic.
        row_overhead_s: The same of each further row.
        per_host: Most devices of a host, unless a number of hosts is given.
        shares_host: Whether all devices of a host share its memory, bandwidth and arithmetic, as virtual CPU devices
            do.
        num_cores: Cores of a host that its devices share.
        source: ``modelled`` for numbers of the table, ``measured`` for those of a calibration.
    """

    name: str
    device_kind: str
    platform: str = "gpu"
    memory_bytes: int
    bytes_per_s: float
    flops: Mapping[str, float]
    link: Link
    host_link: Link
    bandwidth_share: float = 0.9
    matmul_share: float = 0.8
    matmul_rates: Mapping[str, tuple[tuple[int, int, float], ...]] = dataclasses.field(default_factory=dict)
    step_overhead_s: float = 0.0
    launch_overhead_s: float = 0.0
    layer_overhead_s: float = 0.0
    row_overhead_s: float = 0.0
    per_host: int = 8
    shares_host: bool = False
    num_cores: int = 1
    source: str = "modelled"

    def planned(self, count: int, per_host: int) -> list[PlannedDevice]:
        """Return this many devices, of which consecutive ones are on one host."""
        kind = self.platform, self.device_kind, self.memory_bytes
        return [PlannedDevice(index, *kind, index // per_host) for index in range(count)]

    def fewest_hosts(self, count: int) -> int:
        """Return the fewest hosts that this many devices can be divided over, with at most ``per_host`` on each."""
        return next(hosts for hosts in range(1, count + 1) if count % hosts == 0 and count // hosts <= self.per_host)

    def flops_of(self, dtype: str, rows: int | float, num_devices: int = 1) -> float:
        """Return the arithmetic per second that matmuls of a dtype reach.

        Args:
            dtype: Element type of the weights.
            rows: Rows that are multiplied by each weight. These and the devices make a difference for measured rates
                only.
            num_devices: Devices of the program, which wait for each other.

        Raises:
            ConfigError: The device has no rate for the dtype.
        """
        if dtype in self.matmul_rates:
            found = self.matmul_rates[dtype]
            count = nearest((each[0] for each in found), num_devices)
            return interpolated(rows, [each[1:] for each in found if each[0] == count])
        if dtype not in self.flops:
            raise ConfigError(f"device {self.name} has no rate for {dtype}; known: {', '.join(self.flops)}")
        return self.flops[dtype] * self.matmul_share

    def save(self, path: str | Path) -> None:
        """Write the device to a JSON file, which :func:`read_device` reads.

        Raises:
            ConfigError: The file cannot be written.
        """
        write_text("device file", path, json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the device as values that JSON can hold."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        links = {name: dataclasses.asdict(values[name]) for name in _LINKS}
        return {**values, "flops": dict(self.flops), "matmul_rates": dict(self.matmul_rates), **links}


def read_device(path: str | Path) -> Device:
    """Read a device from a file that :meth:`Device.save` wrote.

    Raises:
        ConfigError: The file cannot be read, or does not describe a device.
    """
    try:
        values = json.loads(Path(path).read_bytes())
        links = {name: Link(**{**values[name], "measured": _tuples(values[name]["measured"])}) for name in _LINKS}
        rates = {dtype: _tuples(found) for dtype, found in values["matmul_rates"].items()}
        return Device(**{**values, **links, "matmul_rates": rates})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"device file {path}: expected a file that jaxserve plan --calibrate wrote, got {type(error).__name__}: "
            f"{error}"
        ) from error


def _tuples(rows: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(map(tuple, rows))
