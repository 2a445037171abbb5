"""How a server's memory is kept from growing."""

import ctypes
import os
import subprocess
import sys

import pytest

_LOOK = """
import ctypes
from jaxserve.server.resources import LARGE_BUFFER_BYTES, map_large_buffers_apart

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def is_apart(size):
    before = libc.mallinfo2().hblks
    buffer = libc.malloc(ctypes.c_size_t(size))
    after = libc.mallinfo2().hblks
    libc.free(buffer)
    return after > before

if {is_kept}:
    map_large_buffers_apart()
large = 2 * LARGE_BUFFER_BYTES
print(is_apart(large), is_apart(large), is_apart(LARGE_BUFFER_BYTES // 2))
"""


@pytest.mark.skipif(
    getattr(ctypes.CDLL(None), "mallinfo2", None) is None, reason="the C library is not glibc, or older than 2.33"
)
@pytest.mark.parametrize(
    ("is_kept", "environment", "expected"),
    [
        pytest.param(False, {}, "True False False", id="as glibc does"),
        pytest.param(True, {}, "True True False", id="as a server does"),
        pytest.param(True, {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}, "False False False", id="as the environment says"),
        pytest.param(
            True,
            {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"},
            "False False False",
            id="as its tunables say",
        ),
    ],
)
def test_large_buffers_are_mapped_apart_each_time(is_kept: bool, environment: dict[str, str], expected: str) -> None:
    script = _LOOK.replace("{is_kept}", str(is_kept))
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run(
        [sys.executable, "-c", script], env={**inherited, **environment}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == expected


_FREED = """
import asyncio
from pathlib import Path
from jaxserve.server.resources import return_free_memory, share_heap

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

async def main():
    share_heap()
    before = resident_mib()
    kept = [bytes(3000) for _ in range(40_000)]
    pins = kept[::500]
    kept.clear()
    after = resident_mib()
    returning = asyncio.create_task(return_free_memory(0.01))
    while resident_mib() > before + 20:
        await asyncio.sleep(0.01)
    returning.cancel()
    print(after > before + 80)

asyncio.run(main())
"""


@pytest.mark.skipif(getattr(ctypes.CDLL(None), "malloc_trim", None) is None, reason="the C library is not glibc")
def test_free_memory_between_what_is_kept_is_given_back() -> None:
    found = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "True\n", "it would have been kept"


_IN_HEAP = """
import ctypes, threading
from jaxserve.server.resources import share_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if {is_shared}:
    share_heap()
found = []
thread = threading.Thread(target=lambda: found.append(libc.malloc(ctypes.c_size_t(5000))))
thread.start()
thread.join()
(heap,) = (line.split()[0].split("-") for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]"))
print(int(heap[0], 16) <= found[0] < int(heap[1], 16))
"""


@pytest.mark.skipif(
    getattr(ctypes.CDLL(None), "mallinfo2", None) is None, reason="the C library is not glibc, or older than 2.33"
)
@pytest.mark.parametrize(
    ("is_shared", "environment", "expected"),
    [(False, {}, "False"), (True, {}, "True"), (True, {"MALLOC_ARENA_MAX": "8"}, "False")],
)
def test_threads_share_the_heap(is_shared: bool, environment: dict[str, str], expected: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    script = _IN_HEAP.replace("{is_shared}", str(is_shared))
    found = subprocess.run(
        [sys.executable, "-c", script], env={**inherited, **environment}, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == expected
