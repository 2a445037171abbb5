"""What pipeline stages hand over through the backend, where it sends between processes: GPUs do, CPUs do not."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.device import stage_link
from jaxserve.group.job import join_job
from jaxserve.group.settings import GroupPlace
from sharding import can_send
from tests.free_ports import free_ports

LIMIT_S = 120


def mesh_of(ranks: list[int], kind: str = "NVIDIA H200", can: bool = True) -> Any:
    """A mesh of GPUs of these processes."""
    client = SimpleNamespace(supports_cross_host_transfers=can)
    devices = [SimpleNamespace(process_index=rank, device_kind=kind, client=client) for rank in ranks]
    return SimpleNamespace(devices=np.array(devices))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (mesh_of([1, 1]), True),
        (mesh_of([1, 2]), True),
        (mesh_of([0, 1]), False),
        (mesh_of([1, 1, 1]), False),
        (mesh_of([1, 1], kind="NVIDIA H100"), False),
    ],
    ids=["another", "others", "shared", "more devices", "another kind"],
)
def test_what_a_backend_can_send(target: Any, expected: bool) -> None:
    assert can_send(mesh_of([0, 0]), target) == expected
    assert not can_send(mesh_of([0, 0], can=False), target)


@pytest.mark.slow
def test_jax_would_send_what_is_handed_over() -> None:
    """Both processes make the call, and JAX refuses it only because this backend is a CPU's."""
    command = [sys.executable, "-m", __name__]
    port = str(free_ports())
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "2"}
    processes = [
        subprocess.Popen([*command, str(rank), port], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for each in printed:
        by_default, refused = each.splitlines()
        assert by_default == "False", "a CPU's backend does not send"
        assert "does not support cross-host device transfers" in refused


def main() -> None:
    """Hand over as one of two processes, as if the backend could send."""
    rank, port = map(int, sys.argv[1:])
    join_job(GroupPlace("127.0.0.1", port, 2, rank, b"s" * 32, join_timeout=60.0, step_timeout=60.0))
    by_rank = [[device for device in jax.devices() if device.process_index == each] for each in range(2)]
    source, target = (Mesh(np.array(devices), ("tensor",)) for devices in by_rank)
    spec = PartitionSpec(None, "tensor")
    print(can_send(source, target), flush=True)
    stage_link.can_send = lambda *_: True
    over = stage_link.HandOver(source, target, 0, SimpleNamespace(), is_forward=True)  # pyright: ignore[reportArgumentType]
    given = [jax.device_put(jnp.ones((4, 8)), NamedSharding(source, spec))] if rank == 0 else None
    try:
        over.send(given, [jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(target, spec))])
    except ValueError as error:
        print(str(error).splitlines()[0], flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
