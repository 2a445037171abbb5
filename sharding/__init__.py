"""Device meshes, sharding layouts as data, and collectives. Imports no other package of this project."""

from sharding.axes import LOGICAL_AXES, MESH_AXES
from sharding.global_arrays import (
    can_send,
    hand_over,
    is_shared,
    on_all,
    own_device,
    own_devices,
    put,
    put_parts,
    send,
)
from sharding.layout import LayoutError, ShardingLayout, stacked, whole_and_split
from sharding.mesh import MeshError, MeshShape, PlannedDevice, data_slices, ensure_cpu_devices, make_mesh, stage_slices
from sharding.moves import Moves, find_moves, mesh_devices
from sharding.registry import LAYOUTS, get_layout

__all__ = [
    "LAYOUTS",
    "LOGICAL_AXES",
    "MESH_AXES",
    "LayoutError",
    "MeshError",
    "MeshShape",
    "Moves",
    "PlannedDevice",
    "ShardingLayout",
    "can_send",
    "data_slices",
    "ensure_cpu_devices",
    "find_moves",
    "get_layout",
    "hand_over",
    "is_shared",
    "make_mesh",
    "mesh_devices",
    "on_all",
    "own_device",
    "own_devices",
    "put",
    "put_parts",
    "send",
    "stage_slices",
    "stacked",
    "whole_and_split",
]
