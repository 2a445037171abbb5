"""What the device-less compile check reads out of a compiler's texts; the check itself, where CUDA wheels are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.compile_text import copied_bytes, graph_kernels, launched_segments
from sharding.plan import compiled_collectives

THUNKS = """000: kCommandBuffer [source       | next=003 (1)]
    001: kCustomKernel [source        | next=002 (2)] loop_fusion_10 grid: [1, 1, 1]
    002: kCopy         [source        | next=003 (1)] kCopy
003: kAllReduce [prev=000 (1) | next=004 (1)]
004: kWhile         [prev=000 (1) | sink]
condition:
    005: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        006: kCustomKernel [source       | next=007 (1)] paged_decode_attention grid: [1, 1, 1] threads: [64, 1, 1]
"""
HLO = """
  %copy.1 = bf16[32,4096,4096]{2,1,0:T(8,128)} copy(%param.1), metadata={op_name="x"}
  %copy.2 = f32[] copy(%y)
  %wrapped_copy = f32[256,128256]{1,0} copy(%z)
  %a = (f32[4,8]{1,0}, f32[]) all-reduce(%x, %y), channel_id=1
  %b = bf16[4]{0} all-gather-start(%x), replica_groups={}
  %c = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-reduce-start(%x), channel_id=1
  %slice_fusion = (f32[1,6144,4096]{2,1,0}, f32[1,6144,4096]{2,1,0}) fusion(%w), kind=kLoop, calls=%fused_slice.2
"""


def test_segments_are_what_the_host_launches() -> None:
    assert launched_segments(THUNKS) == ("kCommandBuffer", "kAllReduce", "kWhile")
    assert graph_kernels(THUNKS) == ("loop_fusion_10", "wrapped_compare", "paged_decode_attention")


def test_copies_are_operations_of_their_own_and_kernels_that_only_slice() -> None:
    assert copied_bytes(HLO) == [2 * 32 * 4096 * 4096, 4, 4 * 256 * 128256, 2 * 4 * 6144 * 4096]


def test_collectives_count_by_operand() -> None:
    assert compiled_collectives(HLO) == {"all-reduce": 3, "all-gather": 1}


def test_the_parser_reads_joined_collectives() -> None:
    text = """
      %a = (f32[4,8]{1,0}, f32[]) all-reduce(%x, %y), channel_id=1, replica_groups={{0,1},{2,3}}
      %b = f32[4]{0} all-reduce-start(%x), replica_groups=mesh['data'=2,'tensor'=2] {'tensor'}
      ROOT %c = bf16[4,16]{1,0} all-gather(f32[4,8]{1,0} %x), replica_groups=[2,2]<=[4]T(1,0), dimensions={1}
      %e = f32[4]{0} collective-broadcast(%x), channel_id=2
      %d = f32[4]{0} add(%all-reduce, %all-gather)
    """
    assert compiled_collectives(text) == {"all-reduce": 3, "all-gather": 1, "collective-broadcast": 1}


@pytest.mark.slow
def test_kernels_and_whole_steps_compile_for_an_h200(repository: Path) -> None:
    """Takes a quarter of an hour. JAXSERVE_CUDA_PYTHON names a Python with JAX's CUDA wheels, else .venvs/cuda's."""
    python = Path(os.environ.get("JAXSERVE_CUDA_PYTHON", repository / ".venvs" / "cuda" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"no {python}: make it with `bash scripts/compile_check.sh`")
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    script = repository / "scripts" / "compile_check.py"
    found = subprocess.run([python, script], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="JAX may have CUDA wheels here")
def test_without_cuda_wheels_it_says_what_is_missing(repository: Path) -> None:
    script = repository / "scripts" / "compile_check.py"
    found = subprocess.run([sys.executable, script, "--only", "steps"], capture_output=True, text=True)
    assert found.returncode == 2
    assert "needs Python >= 3.12 with jax[cuda13] >= 0.11" in found.stderr
