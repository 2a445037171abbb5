"""Every native kernel under the sanitizers of addresses, undefined behaviour and threads, with the shapes of its cases.

A child process runs every case, and a library in front of the kernels writes each call to a file
(``replay/record.c``). A program with the kernels and a sanitizer in it makes the calls again (``replay/replay.c``),
with every buffer in memory of its own, and compares one thread with several. The index of drafts, which Python calls,
has such a test of its own.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pallas_kernels import native_library
from tests.native_build import build_library

REPOSITORY = Path(__file__).resolve().parents[2]
REPLAY = Path(__file__).resolve().parent / "replay"
ADDRESSES = ("-fsanitize=address,undefined,bounds-strict", "-fno-sanitize-recover=all")
THREADS = ("-fsanitize=thread",)
CHECKED = ("-O1", "-g", "-fno-omit-frame-pointer")
NUM_THREADS = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc with its sanitizers"),
    pytest.mark.skipif(not native_library.PATH.exists(), reason="the native library was not built"),
]

CHILD = textwrap.dedent("""
    import sys, zlib
    from pathlib import Path
    import jax, jax.numpy as jnp, numpy as np
    from pallas_kernels import native_library
    native_library.PATH = Path(sys.argv[1])
    from pallas_kernels import paged_attention_native, quantized_linear, quantized_linear_native, registry
    from pallas_kernels.quantized import random_records
    assert native_library.unavailable() is None, native_library.unavailable()
    for name, table in registry.OPERATIONS.items():
        if "native" not in table:
            continue
        op, native = registry.operation(name), registry.load(name, "native")
        for case_name, case in op.CASES.items():
            # Of attention both dtypes, in turns: eager inputs of a case take longer than all its calls.
            each = case
            if name.endswith("attention") and zlib.crc32(case_name.encode()) % 2:
                each = case._replace(dtype="bfloat16")
            if native.unsupported("cpu", "cpu", op.dtype(each), **op.sizes(each)) is None:
                inputs = op.make_inputs(each, jax.random.key(1))
                jax.block_until_ready(op.run(native, each, op.prepare(native, each, inputs)))
    # Two that no case calls.
    form, inner = quantized_linear.FORMS["int8_channel"], 512
    records = np.array(random_records(form, 70, inner, jax.random.key(5)))
    packed = jnp.asarray(quantized_linear_native.pack(records, form, False))
    jax.block_until_ready(quantized_linear_native.rows(packed, jnp.array([69, 0, 35]), inner, form))
    pools = (jnp.zeros((6, 2, 64, 16)), jnp.zeros((6, 2, 16, 64)))
    jax.block_until_ready(paged_attention_native.copy_pages(pools, jnp.array([1, 5]), jnp.array([0, 2])))
""")


def record(folder: Path, limit: str) -> Path:
    """The file of all calls that the cases make where no newer instructions may be used."""
    library, calls = folder / "librecord.so", folder / f"{limit}.calls"
    kernels = native_library.PATH
    link = ["-Wl,--no-as-needed", str(kernels), f"-Wl,-rpath,{kernels.parent}", "-ldl"]
    command = ["gcc", "-O1", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-shared", str(REPLAY / "record.c")]
    subprocess.run([*command, "-o", str(library), *link], check=True)
    number = native_library._INSTRUCTIONS.index(limit)
    environment = {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAXSERVE_MAX_CPU_ISA": limit,
        "JAXSERVE_CALLS": str(calls),
        "JAXSERVE_INSTRUCTIONS": str(number),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(library)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return calls


def build(folder: Path, flags: Sequence[str]) -> Path:
    """The program that makes calls again, with a sanitizer."""
    program = folder / "replay"
    sources = {name: (build_library.SOURCES / source, isa) for name, (source, isa) in build_library.OBJECTS.items()}
    sources["replay"] = REPLAY / "replay.c", ()

    def compile_one(name: str) -> str:
        source, isa = sources[name]
        made = str(folder / f"{name}.o")
        subprocess.run(["gcc", *build_library.FLAGS, *CHECKED, *flags, *isa, "-c", str(source), "-o", made], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run(["gcc", *flags, *objects, "-o", str(program), "-lpthread", "-lm"], check=True)
    return program


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Calls with the oldest instructions that kernels need, and with the newest that this CPU has."""
    folder = tmp_path_factory.mktemp("calls")
    return [record(folder, limit) for limit in dict.fromkeys(("avx2", native_library.instructions()))]


@pytest.mark.parametrize("flags", [ADDRESSES, THREADS], ids=["addresses", "threads"])
def test_no_kernel_does_what_it_must_not(calls: list[Path], flags: Sequence[str], tmp_path: Path) -> None:
    program = build(tmp_path, flags)
    done = subprocess.run(
        [program, str(NUM_THREADS), *calls],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    counts = {name: int(count) for name, count in map(str.split, done.stdout.splitlines())}
    assert set(counts) == set(native_library._HANDLERS)
    assert [name for name, count in counts.items() if count == 0] == [], "handlers that no case calls"
