"""What connects two devices, and the time of collectives over it."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """What connects two devices.

    Attributes:
        name: Name in ``LINKS``.
        bytes_per_s: Peak rate in one direction, per device.
        latency_s: Time of a message of one byte, with the start of the collective's kernel.
        share: Share of the peak that large messages reach.
        measured: Times of collectives: kind, devices, bytes of the result on each device, seconds. A kind that is there
            takes the time of the nearest number of devices, interpolated between bytes; others that of a formula.
        source: ``modelled`` for numbers of the table, ``measured`` for those of a calibration.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    share: float = 0.8
    measured: tuple[tuple[str, int, int, float], ...] = ()
    source: str = "modelled"

    @property
    def rate(self) -> float:
        """Bytes per second of large messages."""
        return self.bytes_per_s * self.share


def ring_seconds(kind: str, num_bytes: int, num_devices: int, link: Link) -> float:
    """Return the time of a collective in which each device talks to its two neighbours only.

    Args:
        kind: Kind of collective, as in ``sharding.plan.Collective``.
        num_bytes: Bytes of its result on each device.
        num_devices: Devices that take part.
        link: Slowest link between neighbours.
    """
    rounds = (num_devices - 1) * (2 if kind == "all-reduce" else 1)
    return rounds * (_whole_bytes(kind, num_bytes, num_devices) / num_devices / link.rate + link.latency_s)


def one_shot_seconds(kind: str, num_bytes: int, num_devices: int, link: Link) -> float:
    """Return the time of a collective in which each device sends to all others at once; arguments as above.

    In an all-reduce each device then receives all parts whole, which is faster for few bytes only.
    """
    whole = _whole_bytes(kind, num_bytes, num_devices)
    sent = whole if kind == "all-reduce" else whole / num_devices
    return (num_devices - 1) * sent / link.rate + link.latency_s


def collective_seconds(kind: str, num_bytes: int, num_devices: int, link: Link) -> float:
    """Return the time of a collective: that of the faster algorithm; arguments as above."""
    if num_devices == 1:
        return 0.0
    found = [each for each in link.measured if each[0] == kind]
    if found:
        count = nearest((each[1] for each in found), num_devices)
        return interpolated(num_bytes, [each[2:] for each in found if each[1] == count])
    if kind in ("collective-permute", "hand-over"):
        return num_bytes / link.rate + link.latency_s
    return min(model(kind, num_bytes, num_devices, link) for model in (ring_seconds, one_shot_seconds))


def _whole_bytes(kind: str, num_bytes: int, num_devices: int) -> int:
    """Return the bytes of the whole array that devices combine."""
    return num_bytes * num_devices if kind == "reduce-scatter" else num_bytes


def interpolated(x: int | float, points: Sequence[tuple[int, float]]) -> float:
    """Return the value at ``x``, interpolated in logarithms; beyond the first or the last point, that point's."""
    logs = np.log(np.asarray(points, np.float64).T)
    return float(np.exp(np.interp(math.log(max(x, 1e-9)), logs[0], logs[1])))


def nearest(counts: Iterable[int], count: int) -> int:
    """Return that of several numbers of devices which is nearest to ``count`` as a ratio."""
    return min(counts, key=lambda each: abs(math.log(each / count)))
