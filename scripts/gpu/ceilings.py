"""Measure what this card can do: copy bandwidth and bf16 matrix rate. All else is stated as a share of the two."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu.figures import Figure, rounded
from scripts.gpu.parts import AS_NEEDED, Context, Item, Program, SkippedError
from scripts.gpu.timing import MIN_SETS, Rotation

IS_ALONE: bool = False
ENVIRONMENT: dict[str, str] = AS_NEEDED
COPY, MATMUL = "copy bandwidth", "bf16 matrix rate"


def items(context: Context) -> list[Item]:
    """Goals use JAX's figures; torch's are for comparison."""
    return [Item("jax", 15.0), Item("torch", 15.0)]


def run(item: str, context: Context) -> Iterator[Figure]:
    """Measure one library."""
    yield from (_jax if item == "jax" else _torch)(context)


def programs(context: Context) -> Iterator[Program]:
    """The JAX ones."""
    for name, rotation in _rotations(context).items():
        yield Program(name, rotation.program, rotation.arguments)


def _sizes(context: Context) -> tuple[int, int]:
    """Return the elements of the copied array, and the width of the matrices."""
    return (1 << 16, 64) if context.is_tiny else (1 << 30, 8192)


def _rotations(context: Context) -> dict[str, Rotation]:
    count, side = _sizes(context)
    array = jax.ShapeDtypeStruct((count,), jnp.uint32)
    matrix = jax.ShapeDtypeStruct((side, side), jnp.bfloat16)
    return {
        "copy": Rotation(jnp.copy, array, MIN_SETS),
        "add": Rotation(_add_one, array, MIN_SETS),
        "read": Rotation(jnp.max, array, MIN_SETS),
        "matmul": Rotation(_matmul, (matrix, matrix), MIN_SETS),
    }


def _add_one(x: jax.Array) -> jax.Array:
    return x + 1


def _matmul(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jnp.dot(*pair, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def _jax(context: Context) -> Iterator[Figure]:
    """Measure a copy as memory move and as kernel (the faster counts), a pure read, and a matmul."""
    count, side = _sizes(context)
    num_bytes = 4 * count
    seconds = {}
    for name, rotation in _rotations(context).items():

        def make(i: int, name: str = name) -> Any:
            key = jax.random.key(context.seed % 1_000_003 + i)
            if name != "matmul":
                return jax.random.bits(key, (count,), jnp.uint32)
            left, right = jax.random.split(key)
            return tuple(jax.random.normal(k, (side, side), jnp.bfloat16) for k in (left, right))

        seconds[name] = rotation.measure(rotation.compile(), make).seconds
    copied = 2 * num_bytes / min(seconds["copy"], seconds["add"])
    note = f"{num_bytes / 1e9:.1f} GB read and as much written; as memory move "
    note += f"{2 * num_bytes / seconds['copy'] / 1e9:.0f}, as kernel {2 * num_bytes / seconds['add'] / 1e9:.0f}"
    yield Figure(part="ceilings", name=COPY, value=rounded(copied / 1e9), unit="GB/s", note=note)
    read = num_bytes / seconds["read"]
    yield Figure(part="ceilings", name="read bandwidth", value=rounded(read / 1e9), unit="GB/s", note="a maximum")
    rate = 2 * side**3 / seconds["matmul"]
    note = f"{side}^3, random normal numbers"
    yield Figure(part="ceilings", name=MATMUL, value=rounded(rate / 1e12), unit="TFLOP/s", note=note)


def _torch(context: Context) -> Iterator[Figure]:
    """Measure both through PyTorch."""
    if importlib.util.find_spec("torch") is None:
        raise SkippedError("torch is not installed")
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise SkippedError("torch sees no GPU")
    count, side = _sizes(context)
    source = torch.randint(1 << 30, (count,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    seconds = torch_seconds(torch, lambda: target.copy_(source))
    value = rounded(8 * count / seconds / 1e9)
    yield Figure(part="ceilings", name="copy bandwidth, torch", value=value, unit="GB/s")
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    seconds = torch_seconds(torch, lambda: torch.matmul(left, right))
    value = rounded(2 * side**3 / seconds / 1e12)
    yield Figure(part="ceilings", name="bf16 matrix rate, torch", value=value, unit="TFLOP/s")


def torch_seconds(torch: Any, call: Any, calls: int = 10, repeats: int = 7) -> float:
    """Median seconds of a call, by the device's own events around several."""
    times = []
    for _ in range(3):
        call()
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / calls)
    return sorted(times)[len(times) // 2]
