"""What kind of CPU this is (Linux; elsewhere only what Python knows)."""

import hashlib
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def has_bfloat16_products(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the CPU multiplies bfloat16 by itself; without it such products are many times slower than
    float32's."""
    flags = _lines(cpuinfo, "flags") + _lines(cpuinfo, "Features")
    return any(name in line.split() for line in flags for name in ("avx512_bf16", "amx_bf16", "bf16"))


def cpu_key(cpuinfo: Path = _CPUINFO) -> str:
    """Return a name for this kind of CPU: compiled programs hold its instructions."""
    features = [platform.machine(), platform.processor()]
    for name in ("model name", "flags", "Features"):
        features += sorted(set(_lines(cpuinfo, name)))
    return hashlib.sha256("\n".join(features).encode()).hexdigest()[:16]


def _lines(cpuinfo: Path, name: str) -> list[str]:
    if not cpuinfo.exists():
        return []
    return [line for line in cpuinfo.read_text().splitlines() if line.startswith(name)]
