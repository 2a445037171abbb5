"""Compiles for an H200 on a machine without one, using XLA's device-less path, and reads the results.

Needs Python 3.12 or newer with the CUDA wheels of JAX 0.11 or newer (``jax[cuda13]``), and neither a card nor a driver.
Import it before JAX: it sets what the CUDA plugin reads.
"""

import dataclasses
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax  # noqa: E402  (after the environment that its plugin reads)
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, use_abstract_mesh  # noqa: E402

from scripts.compile_text import copied_bytes, graph_kernels, launched_segments  # noqa: E402
from sharding import MeshShape, make_mesh  # noqa: E402
from sharding.plan import compiled_collectives  # noqa: E402

TARGET = Path(__file__).parent.parent / "jaxserve" / "lab" / "targets" / "h200.txtpb"
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


class NoCudaError(RuntimeError):
    """The CUDA wheels of JAX are not installed."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Properties of a compiled program.

    Attributes:
        seconds: Time lowering and compiling took.
        alias_bytes: Memory of arguments that its results reuse.
        temporary_bytes: Memory it takes while it runs.
        segments: Kinds of host launches, in order: ``kCommandBuffer`` is a CUDA graph.
        kernels: Names of all kernels, graphs' included.
        copies: Bytes of each array it copies as it is.
        collectives: Number of each collective.
    """

    seconds: float
    alias_bytes: int
    temporary_bytes: int
    segments: tuple[str, ...]
    kernels: tuple[str, ...]
    copies: tuple[int, ...]
    collectives: Mapping[str, int]

    @property
    def num_graphs(self) -> int:
        """Number of CUDA graphs that the host launches."""
        return self.segments.count("kCommandBuffer")

    def copies_from(self, least_bytes: int) -> list[int]:
        """Return the copies of at least this many bytes."""
        return [size for size in self.copies if size >= least_bytes]


def h200_mesh(num_devices: int = 1) -> Mesh:
    """Return an abstract mesh of H200s of one host, ``tensor`` across them.

    Raises:
        NoCudaError: The CUDA wheels of JAX are not installed.
    """
    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{num_devices}"
        )
    except Exception as error:  # JAX raises several kinds
        raise NoCudaError(f"compiling for CUDA needs Python >= 3.12 with jax[cuda13] >= 0.11: {error}") from error
    return make_mesh(MeshShape(tensor=num_devices), list(found.devices))


def compile_for(
    mesh: Mesh,
    function: Callable[..., Any],
    *structs: Any,
    donate_argnums: int | Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> Compilation:
    """Compile a function for the devices of a mesh.

    Args:
        mesh: From ``h200_mesh``.
        function: Takes arrays.
        structs: Shapes of its arguments, with their shardings.
        donate_argnums: Arguments given up.
        options: Further compiler options.
    """
    return compile_traced(mesh, jax.jit(function, donate_argnums=donate_argnums), *structs, options=options)


def compile_traced(mesh: Mesh, function: Any, *structs: Any, options: Mapping[str, Any] | None = None) -> Compilation:
    """Return the same for something that has ``lower`` already: a jitted function, or a traced one (without
    ``structs``)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as dump, use_abstract_mesh(mesh.abstract_mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX 0.11 on Pallas-Triton; donated arguments that no result can take
        compiled = function.lower(*structs).compile(compiler_options={**(options or {}), "xla_dump_to": dump})
        seconds = time.monotonic() - began
        thunks = _read(dump, "thunk_sequence_after_thunk_passes.txt") or _read(dump, "thunk_sequence.txt")
    analysis = compiled.memory_analysis()
    text = compiled.as_text()
    return Compilation(
        seconds=seconds,
        alias_bytes=analysis.alias_size_in_bytes,
        temporary_bytes=analysis.temp_size_in_bytes,
        segments=launched_segments(thunks),
        kernels=graph_kernels(thunks),
        copies=tuple(copied_bytes(text)),
        collectives=compiled_collectives(text),
    )


def _read(folder: str, ending: str) -> str:
    """Return the longest of the files with an ending: the program itself, not a small one it came with."""
    texts = [path.read_text() for path in Path(folder).iterdir() if path.name.endswith(ending)]
    return max(texts, key=len, default="")
