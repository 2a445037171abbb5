"""Which process sends which shards where, when an array goes to another mesh with devices of other processes.

Both meshes have as many devices, and both shardings the same spec, so that the device at a position of the target needs
the shard of the one at the same position of the source. Every process finds the same moves, without asking another.
"""

from typing import NamedTuple

from jax.sharding import NamedSharding

from sharding.mesh import Device


class Moves(NamedTuple):
    """The part of one process.

    Attributes:
        own: Of each distinct shard that the process has and needs, its position in the source, and all those in the
            target.
        sent: Positions in the source of the shards that go to each other process, in order.
        received: Positions in the target of each shard that comes from another process, in the order of its ``sent``.
    """

    own: list[tuple[int, list[int]]]
    sent: dict[int, list[int]]
    received: dict[int, list[list[int]]]


def find_moves(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], process: int) -> Moves:
    """Return what a process does so that an array gets from one mesh to another.

    A process that has a shard already is not sent it; one that needs it several times gets it once.
    """
    moves = Moves([], {}, {})
    devices, indices = mesh_devices(source), source.devices_indices_map(shape)
    senders = [device.process_index for device in devices]
    shards = [_key(indices[device], shape) for device in devices]
    needed = dict[tuple[int, tuple[int, ...]], list[int]]()
    for position, device in enumerate(mesh_devices(target)):
        needed.setdefault((device.process_index, shards[position]), []).append(position)
    for (receiver, shard), positions in needed.items():
        held = [each for each, sender in enumerate(senders) if sender == receiver and shards[each] == shard]
        sender = senders[positions[0]]
        if held:
            if receiver == process:
                moves.own.append((held[0], positions))
        elif sender == process:
            moves.sent.setdefault(receiver, []).append(positions[0])
        elif receiver == process:
            moves.received.setdefault(sender, []).append(positions)
    return moves


def mesh_devices(sharding: NamedSharding) -> list[Device]:
    """Return the devices of a sharding's mesh, in the order of their positions."""
    assert sharding.mesh.devices is not None, "the mesh is abstract"
    return [*sharding.mesh.devices.flat]


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return where a shard begins, which names it."""
    return tuple(part.indices(size)[0] for part, size in zip(index, shape, strict=True))
