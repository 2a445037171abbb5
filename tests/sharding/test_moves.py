"""Shards that processes send each other when an array goes from one mesh to another."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding import PlannedDevice, find_moves, mesh_devices

SHAPE = (8, 6)


def sharding(ranks: Sequence[int], spec: PartitionSpec, first: int = 0) -> NamedSharding:
    """A sharding over devices of these processes, in two columns."""
    devices = [PlannedDevice(first + index, "cpu", "cpu", 0, rank) for index, rank in enumerate(ranks)]
    grid = np.array(devices, dtype=object).reshape(-1, 2)
    return NamedSharding(Mesh(grid, ("rows", "columns"), axis_types=(AxisType.Auto,) * 2), spec)


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("rows"), PartitionSpec(("rows", "columns"))])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([0, 0, 0, 0], [1, 1, 1, 1]),
        ([0, 0, 1, 1], [2, 2, 3, 3]),
        ([0, 0, 1, 1], [1, 1, 0, 0]),
        ([0, 0, 0, 1], [1, 1, 2, 2]),
    ],
)
def test_every_device_gets_its_shard_once(source: list[int], target: list[int], spec: PartitionSpec) -> None:
    """A process gets every shard that it needs: of itself if it has it, else once, from one that has it."""
    given, needed = sharding(source, spec), sharding(target, spec, first=10)
    values = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    shards = [values[given.devices_indices_map(SHAPE)[device]] for device in mesh_devices(given)]
    moves = {rank: find_moves(given, needed, SHAPE, rank) for rank in {*source, *target}}
    found = dict[int, np.ndarray]()
    for rank, own in moves.items():
        for position, targets in own.own:
            assert source[position] == rank
            found |= {each: shards[position] for each in targets}
        for sender, received in own.received.items():
            sent = moves[sender].sent[rank]
            assert all(source[position] == sender != rank for position in sent)
            for position, targets in zip(sent, received, strict=True):
                found |= {each: shards[position] for each in targets}
        held = [shards[position].tobytes() for position, holder in enumerate(source) if holder == rank]
        come = [shards[position].tobytes() for each in moves.values() for position in each.sent.get(rank, ())]
        assert len({*come}) == len(come) and not {*held} & {*come}, "sent twice, or in vain"
    for position, device in enumerate(mesh_devices(needed)):
        assert np.array_equal(found[position], values[needed.devices_indices_map(SHAPE)[device]])


def test_nothing_is_sent_within_a_process() -> None:
    given, needed = (sharding([0, 0, 0, 0], PartitionSpec("rows"), first) for first in (0, 10))
    moves = find_moves(given, needed, SHAPE, 0)
    assert not moves.sent and not moves.received
    assert sorted(itertools.chain(*(targets for _, targets in moves.own))) == [0, 1, 2, 3]
    assert find_moves(given, needed, SHAPE, 1) == ([], {}, {})
