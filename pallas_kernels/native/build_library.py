"""Find a C compiler and build the library of native kernels, while the package is installed: imports nothing of it."""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

IS_SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
SOURCES = Path(__file__).resolve().parent
LIBRARY = "libjaxserve_native.so"
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *AVX2)
AVX512VNNI = (*AVX512, "-mavx512vnni")
AMX = (*AVX512VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
AVX512BF16 = (*AVX512, "-mavx512bf16")
OBJECTS = (
    {
        f"{name}_{isa}": (f"{name}.c", flags)
        for name in (
            *("argmax", "attention", "delta_net", "dequantize", "linear", "mamba2", "quantized", "rounded"),
            *("qkv_write", "short_convolution", "truncation"),
        )
        for isa, flags in (("avx512", AVX512), ("avx2", AVX2))
    }
    | {f"{name}_amx": (f"{name}_amx.c", AMX) for name in ("attention", "linear", "quantized", "rounded")}
    | {"linear_avx512bf16": ("linear.c", AVX512BF16), "rounded_avx512vnni": ("rounded.c", AVX512VNNI)}
    | {"records": ("records.c", AVX2)}
    | {
        name: (f"{name}.c", ())
        for name in (
            "handlers",
            "threads",
            "linear_job",
            "linear_pack",
            "quantized_pack",
            "token_index",
            *(
                f"{operation}_handler"
                for operation in (
                    *("argmax", "attention", "dequantize", "grouped", "linear", "quantized", "recurrent"),
                    *("truncation", "write"),
                )
            ),
        )
    }
)
# Sums are written in the order of evaluation: reassociation by the compiler would change bits.
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
OLDEST = {"clang": 14, "gcc": 11}
ZIG_TARGET = ("-target", "x86_64-linux-gnu.2.28", "-mcpu=x86_64")  # without it zig compiles for this machine's CPU


class Compiler(NamedTuple):
    """A command that compiles C, and whether its libraries run on all distributions since glibc 2.28."""

    command: tuple[str, ...]
    is_portable: bool = False


def find_compiler(environment: Mapping[str, str]) -> Compiler | None:
    """Find a C compiler: the one that ``CC`` names, clang, gcc or ziglang's, or return None."""
    if environment.get("CC"):
        return Compiler(tuple(shlex.split(environment["CC"])))
    for name, oldest in OLDEST.items():
        path = shutil.which(name, path=environment.get("PATH"))
        if path and _major_version(path) >= oldest and _can_compile(path):
            return Compiler((path,))
    if importlib.util.find_spec("ziglang") is not None:
        return Compiler((sys.executable, "-m", "ziglang", "cc", *ZIG_TARGET), is_portable=True)
    return None


def build(compiler: Compiler, sources: Path, library: Path, flags: tuple[str, ...] = ()) -> None:
    """Compile the sources and link the library; the file appears only when it is complete.

    Args:
        compiler: From ``find_compiler``.
        sources: Folder of the C files.
        library: The file to write.
        flags: Further flags, such as those of a sanitizer.

    Raises:
        subprocess.CalledProcessError: The compiler failed; its messages are on standard error.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = {f"{folder}/{name}.o": each for name, each in OBJECTS.items()}

        def compile_one(item: tuple[str, tuple[str, tuple[str, ...]]]) -> None:
            made, (source, instructions) = item
            command = [*compiler.command, *FLAGS, *flags, *instructions, "-c", str(sources / source), "-o", made]
            subprocess.run(command, check=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, objects.items()))
        linked = Path(folder) / LIBRARY
        link = [*compiler.command, "-shared", "-Wl,-s", *flags, *objects, "-o", str(linked), "-lpthread", "-lm"]
        subprocess.run(link, check=True)
        partial = library.with_name(f".{library.name}.partial")
        shutil.copyfile(linked, partial)
        partial.replace(library)


def _major_version(path: str) -> int:
    """Ask a compiler for its version; 0 where it does not run."""
    try:
        done = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.match(r"\d+", done.stdout)
    return int(match[0]) if match else 0


def _can_compile(path: str) -> bool:
    """Try a compiler on the headers that are needed: some distributions have the compiler without them."""
    program = "#include <immintrin.h>\n#include <linux/futex.h>\n#include <pthread.h>\n#include <stdlib.h>\n"
    command = [path, *FLAGS, *AMX, "-x", "c", "-c", "-", "-o", "/dev/null"]
    try:
        return subprocess.run(command, input=program, capture_output=True, text=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
