"""Measure how fast quantized weights load, and the host memory that this takes, format by format.

    python scripts/bench_loading.py                                  all formats, matrices of 4096 x 4096
    python scripts/bench_loading.py --formats "awq" "gguf Q4_K"

Each format is loaded in a process of its own, from the page cache to bfloat16, in turns with the native kernel, with
NumPy alone, and from a checkpoint of the same size that is bfloat16 already. Prints the bytes of bfloat16 written per
second of CPU time, which other work on the machine changes least (the fastest of the repetitions), how fast the native
kernel is relative to the bfloat16 checkpoint, and how far the peak of the process's memory is above the loaded arrays.

With ``--stored``, weights stay quantized, packed for the native kernels; the bytes of the file that are loaded per
second of CPU time are compared with those of the bfloat16 checkpoint, whose weights are packed for them too.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

from checkpoints import CheckpointReader, Stored, TensorRecipe, load_arrays, open_checkpoint, whole
from checkpoints.quantized.gguf_blocks import UNPACK
from checkpoints.quantized.gguf_types import TYPES
from checkpoints.quantized.planes import Planes
from checkpoints.quantized.reader import QuantizedReader, keep_records, quantized_in
from checkpoints.quantized.records import Kept
from jaxserve.layers.storage import Weight, load_method
from jaxserve.layers.weight_forms import WeightForms
from jaxserve.models.loading import decode, pack
from tests import quantized_files as files
from tests.gguf_files import Blocks, random_blocks, write_gguf
from tests.quantized_cases import BITS4, BITS8, Case, compressed, fp8, gptq, mlx, packed

_NUM_MATRICES = 3
_FLOAT8 = ml_dtypes.float8_e4m3fn
_CASES: Mapping[str, Case] = {
    "compressed-tensors int8": compressed(partial(files.write_one_byte, dtype=np.int8, is_per_row=True), num_bits=8),
    "compressed-tensors 4 bits": packed(4, 128, sym=True),
    "compressed-tensors 4 bits, zeros": packed(4, 128, sym=False),
    "compressed-tensors mxfp4": compressed(files.write_mxfp4, num_bits=4, type="float", group_size=32),
    "compressed-tensors nvfp4": compressed(partial(files.write_nvfp4, is_modelopt=False), num_bits=4, type="float"),
    "fp8, one scale": fp8(None, "weight_scale"),
    "fp8, blocks": fp8((128, 128), "weight_scale_inv", weight_block_size=[128, 128]),
    "nf4, double": Case(partial(files.write_nf4, is_double=True), BITS4),
    "bitsandbytes int8": Case(files.write_bnb_int8, BITS8),
    "mlx 4 bits": mlx(4, 64),
    "mlx 6 bits": mlx(6, 64),
    "awq": Case(partial(files.write_awq, group=128), files.section("awq", bits=4, group_size=128)),
    "gptq 4 bits": gptq(4, 128),
    "gptq 4 bits, act-order": gptq(4, 128, act_order=True),
    "gptq 3 bits": gptq(3, 128),
    "gptq 8 bits": gptq(8, 128),
}


def _write_case(case: Case, folder: Path, size: int) -> Path:
    """Write a checkpoint of safetensors."""
    written = case.write(np.random.default_rng(0), (size, size))
    stored = {
        f"m{number}.{suffix}": array for number in range(_NUM_MATRICES) for suffix, array in written.stored.items()
    }
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": case.section}))
    return folder


def _write_mxfp4(folder: Path, size: int) -> Path:
    """Write matrices of experts as GPT-OSS has them."""
    rng = np.random.default_rng(0)
    stored: dict[str, np.ndarray] = {}
    for number in range(_NUM_MATRICES):
        stored[f"m{number}.weight_blocks"] = rng.integers(0, 256, (1, size, size // 32, 16), np.uint8)
        stored[f"m{number}.weight_scales"] = rng.integers(118, 124, (1, size, size // 32)).astype(np.uint8)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    return folder


def _write_plain(folder: Path, size: int) -> Path:
    """Write a checkpoint that is not quantized."""
    matrix = np.ones((size, size), ml_dtypes.bfloat16)
    save_file({f"m{number}.weight": matrix for number in range(_NUM_MATRICES)}, folder / "model.safetensors")
    return folder


def _write_gguf(kind: str, folder: Path, size: int) -> Path:
    """Write a GGUF file."""
    number, form = next((number, form) for number, form in TYPES.items() if form.name == kind)
    blocks = random_blocks(kind, size * size // form.block, form.num_bytes, np.random.default_rng(0), 1 / 1024)
    tensors = {
        f"blk.{index}.ffn_up.weight": Blocks((size, size), number, blocks.tobytes()) for index in range(_NUM_MATRICES)
    }
    fields = {"general.architecture": "llama", "llama.attention.head_count": 1}
    return write_gguf(folder / "m.gguf", fields, tensors)


FORMATS: Mapping[str, Callable[[Path, int], Path]] = {
    **{name: partial(_write_case, case) for name, case in _CASES.items()},
    "mxfp4 of gpt-oss": _write_mxfp4,
    **{f"gguf {kind}": partial(_write_gguf, kind) for kind in UNPACK},
}


_COLUMNS: Mapping[str, str] = {
    "native": "native, GB per CPU second",
    "numpy": "NumPy",
    "plain": "bfloat16",
    "ratio": "native : bfloat16",
    "above": "memory, MB",
}
_STORED_COLUMNS: Mapping[str, str] = {
    "stored": "file, GB per CPU second",
    "plain": "bfloat16",
    "ratio": "file : bfloat16",
}


def _memory(field: str) -> int:
    """Return a field of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _load(path: Path, decoder: Callable[[Planes, np.ndarray], None]) -> tuple[float, int]:
    """Load a checkpoint; return the seconds of CPU time that it takes and the bytes of the arrays."""
    with open_checkpoint(path) as reader:
        if isinstance(reader, QuantizedReader):
            reader.decode = decoder
        recipes = {name: whole(name, info.shape) for name, info in reader.tensors.items()}
        start = time.process_time()
        arrays = load_arrays(reader, recipes, "bfloat16", SingleDeviceSharding(jax.devices("cpu")[0]))
        jax.block_until_ready(arrays)
        return time.process_time() - start, sum(array.nbytes for array in arrays.values())


def _weights(reader: CheckpointReader) -> dict[str, tuple[TensorRecipe, Weight]] | None:
    """Return how the native kernels store each matrix of a checkpoint; None if one cannot stay quantized."""
    found: dict[str, tuple[TensorRecipe, Weight]] = {}
    records = {}
    if isinstance(reader, QuantizedReader):
        records = {name: tensor.records and tensor.records() for name, tensor in reader.quantized.items()}
    forms = WeightForms({name: each for name, each in records.items() if each is not None})
    for name, info in reader.tensors.items():
        recipe, method, segments = whole(name, info.shape), "plain", ()
        if name in records:
            rows = forms.find(recipe, (1, 1))
            if rows is None:
                return None
            recipe, segments, method = rows.recipe, rows.segments, "quantized"
        shape = info.shape
        weight = Weight(shape[0], shape[1], ("o", None), (1, 1), "bfloat16", "native", method, segments=segments)
        found[name] = recipe, weight
    if records:
        keep_records(reader, {name: Kept(forms[name], found[name][1].segments[0].form.span) for name in records})
    return found


def _load_packed(path: Path) -> tuple[float, int]:
    """Load a checkpoint for the native kernels; return the seconds of CPU time, and the bytes of the file (0: its
    weights cannot stay quantized)."""
    sharding = SingleDeviceSharding(jax.devices("cpu")[0])
    with open_checkpoint(path) as reader:
        quantized = quantized_in(reader)
        num_bytes = sum(info.num_bytes for info in reader.tensors.values())
        if quantized is not None:
            num_bytes, quantized.pack = quantized.num_stored_bytes(quantized.quantized), pack
        weights = _weights(reader)
        if weights is None:
            return math.inf, 0
        stored: dict[str, Stored] = {}
        for name, (_, weight) in weights.items():
            method = load_method(weight.method)
            arrays = {
                f"{name}.{part}": jax.ShapeDtypeStruct(array.shape, np.dtype(array.dtype), sharding=sharding)
                for part, array in method.arrays(weight).items()
                if part == "weight"  # orders of features are known before
            }
            stored[name] = Stored(lambda part, _, own=weight, by=method: [*by.fill(own, part).values()], arrays)
        dtype = "bfloat16" if quantized is None else "uint8"
        recipes = {name: recipe for name, (recipe, _) in weights.items()}
        start = time.process_time()
        jax.block_until_ready(load_arrays(reader, recipes, dtype, sharding, stored=stored))
        return time.process_time() - start, num_bytes


def _measure_packed(path: Path, plain: Path, repetitions: int) -> dict[str, float]:
    """Return the columns of the table of weights that stay quantized: speeds in GB/s and their ratio."""
    _load_packed(path)
    taken = [(_load_packed(path), _load_packed(plain)) for _ in range(repetitions)]
    speeds = [max(turn[place][1] / turn[place][0] for turn in taken) / 1e9 for place in range(2)]
    return {"stored": speeds[0], "plain": speeds[1], "ratio": speeds[0] / speeds[1]}


def _measure(path: Path, plain: Path, repetitions: int) -> dict[str, float]:
    """Return the columns of the table: speed in GB/s, ratio of speeds, and memory above the arrays in MB."""
    jax.devices("cpu")
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    _, num_bytes = _load(path, decode)
    above = _memory("VmHWM") - before - num_bytes
    turns = {"native": (path, decode), "plain": (plain, decode), "numpy": (path, Planes.decode_into)}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(repetitions):
        for name, turn in turns.items():
            seconds[name].append(_load(*turn)[0])
    speeds = {name: num_bytes / min(taken) / 1e9 for name, taken in seconds.items()}
    return speeds | {"ratio": speeds["native"] / speeds["plain"], "above": above / 1e6}


def main(arguments: list[str] | None = None) -> None:
    """Measure the formats and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of a matrix (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="turns of each (default: %(default)s)")
    parser.add_argument("--stored", action="store_true", help="keep weights quantized, packed for the native kernels")
    parser.add_argument(
        "--measure", type=Path, nargs=2, help="measure this checkpoint and a plain one, print JSON (for the processes)"
    )
    options = parser.parse_args(arguments)
    if options.measure is not None:
        path, plain = options.measure
        measure = _measure_packed if options.stored else _measure
        print(json.dumps(measure(path, plain, options.repetitions)))
        return
    columns = _STORED_COLUMNS if options.stored else _COLUMNS
    print("| format |", " | ".join(columns.values()), "|")
    print(f"|{'---|' * (1 + len(columns))}", flush=True)
    with tempfile.TemporaryDirectory() as plain:
        _write_plain(Path(plain), options.size)
        for name in options.formats:
            with tempfile.TemporaryDirectory() as folder:
                path = FORMATS[name](Path(folder), options.size)
                command = [sys.executable, __file__, "--repetitions", str(options.repetitions)]
                command += ["--stored"] if options.stored else []
                command += ["--measure", str(path), plain]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found: dict[str, Any] = json.loads(done.stdout)
            numbers = (f"{found[column]:.{0 if column == 'above' else 2}f}" for column in columns)
            print(f"| {name} |", " | ".join(numbers), "|", flush=True)


if __name__ == "__main__":
    main()
