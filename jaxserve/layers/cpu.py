"""Features of this CPU (read on Linux; elsewhere only what Python reports)."""

import hashlib
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def has_bfloat16_products(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the CPU has bfloat16 matmul instructions; without them bfloat16 matmuls are many times slower than
    float32."""
    flags = _lines(cpuinfo, "flags") + _lines(cpuinfo, "Features")
    return any(name in line.split() for line in flags for name in ("avx512_bf16", "amx_bf16", "bf16"))


def cpu_key(cpuinfo: Path = _CPUINFO) -> str:
    """Return a name for this kind of CPU, as a cache key: compiled programs depend on its instructions."""
    features = [platform.machine(), platform.processor()]
    for name in ("model name", "flags", "Features"):
        features += sorted(set(_lines(cpuinfo, name)))
    return hashlib.sha256("\n".join(features).encode()).hexdigest()[:16]


def _lines(cpuinfo: Path, name: str) -> list[str]:
    if not cpuinfo.exists():
        return []
    return [line for line in cpuinfo.read_text().splitlines() if line.startswith(name)]
